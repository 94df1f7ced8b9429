"""An EAGLE-3 draft as one FSDP2 group over two ranks: same start, same gradients, same files as on one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.eagle3_cases import compute_gradients, make_config, make_document, make_draft, run_draft
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import save_draft
from specco.drafts.load import load_draft, load_weights
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize
from specco.testing.tolerances import STEP_FLOAT64, relative_error


def shard(draft: Eagle3Draft) -> Eagle3Draft:
    """Shard in place, as the learner does; gradients come out summed over ranks and divided by their number."""
    fully_shard(draft, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    draft.set_force_sum_reduction_for_comms(True)
    return draft


def build_sharded(fill: float = torch.nan) -> Eagle3Draft:
    with torch.device("meta"):
        draft = Eagle3Draft(make_config()).double()
    shard(draft).to_empty(device="cpu")
    for parameter in draft.parameters():
        parameter.to_local().data.fill_(fill)
    return draft


@instantiate_parametrized_tests
class TestShardedDraft(GlooTestCase):
    world_size = 2

    @parametrize("has_targets", [True, False])
    def test_gradients_equal_one_rank(self, has_targets: bool):
        """The second rank has other documents, or none that trains a row; it must make the same collectives."""
        shares = [
            [make_document(9, 3, seed=0), make_document(4, 1, seed=1)],
            [make_document(12, 2, seed=2)] if has_targets else [make_document(5, 5, seed=2)],
        ]
        expected = compute_gradients(make_draft(make_config()), shares)
        draft = shard(make_draft(make_config()))
        actual = compute_gradients(draft, [shares[self.rank]])
        for name, gradient in expected.items():
            assert isinstance(actual[name], DTensor)
            self.assertLess(relative_error(2 * actual[name].full_tensor(), gradient), STEP_FLOAT64, name)

    def test_init_weights_does_not_depend_on_the_sharding(self):
        torch.manual_seed(5)
        draft = build_sharded()
        draft.init_weights()
        torch.manual_seed(5)
        whole = Eagle3Draft(make_config()).double()
        torch.manual_seed(5)
        whole.init_weights()
        for (name, mine), reference in zip(draft.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), reference), name

    def test_export_and_load_of_shards(self):
        paths = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(paths)
        directory = Path(paths[0])
        whole = make_draft(make_config())
        save_draft(shard(make_draft(make_config())), directory)
        dist.barrier()
        written = load_file(directory / "model.safetensors")
        for name, parameter in whole.named_parameters():
            assert torch.equal(written[name], parameter), name
        draft = build_sharded()
        load_weights(draft, directory)
        for (name, mine), reference in zip(draft.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), reference), name
        documents = [make_document(9, 3, seed=0)]
        assert torch.equal(
            run_draft(draft, documents).hidden, run_draft(load_draft(directory, dtype=torch.float64), documents).hidden
        )
        dist.barrier()
