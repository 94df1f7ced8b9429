"""Drafts over several ranks, FSDP2 or context-parallel: the start, gradients and files of one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.draft_cases import (
    Document,
    compute_gradients,
    compute_loss_sums,
    embed_mask,
    make_config,
    make_dflash_config,
    make_document,
    make_draft,
    make_dspark_config,
    pack,
    run_draft,
    sum_losses,
)
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specco.drafts.base import DraftConfig
from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import save_draft
from specco.drafts.load import load_draft, load_weights
from specco.ops.layout import PackedLayout
from specco.testing.distributed import GlooTestCase, instantiate_parametrized_tests, parametrize
from specco.testing.tolerances import STEP_FLOAT64, relative_error

PACKINGS = {
    # lengths that no cp divides, documents of one token, one document, prompts that leave a rank without targets
    "mixed": [(9, 3), (1, 0), (2, 1), (14, 5), (6, 6), (3, 1), (7, 0)],
    "one": [(23, 4)],
    "one_target": [(11, 10), (5, 5)],
    "none": [(6, 6), (3, 3)],
}


FAMILIES = {
    "eagle3_norm_output": make_config(norm_output=True),
    "dflash": make_dflash_config(),
    "dflash_sliding": make_dflash_config(layer_types=("sliding_attention",) * 2, sliding_window=5),
    "dspark": make_dspark_config(),
}


def make_documents(name: str) -> list[Document]:
    return [make_document(length, prompt, seed=i) for i, (length, prompt) in enumerate(PACKINGS[name])]


def check_against_one_rank(name: str, config: DraftConfig) -> None:
    """Compare rows, loss sums and gradients of all ranks together with those of one rank."""
    documents = make_documents(name)
    whole = run_draft(make_draft(config), documents)
    expected_sums = compute_loss_sums(make_draft(config), documents).detach()
    expected = compute_gradients(make_draft(config), [documents])

    draft, tokens = make_draft(config), pack(documents)
    layout = PackedLayout.build(tokens.cu_seqlens, dist.get_world_size(), dist.get_rank())
    taps, embeddings = (torch.cat([getattr(d, x) for d in documents]) for x in ("taps", "embeddings"))
    # what stands in padding rows must not matter
    local = [layout.shard(x) + 1e3 * (layout.global_rows < 0)[:, None] for x in (taps, embeddings)]
    rows = draft(*local, tokens, layout, dist.group.WORLD, embed_mask(draft))
    for i in range(rows.hidden.shape[0]):
        (match,) = ((whole.slot_ids == rows.slot_ids[i]) & (whole.branch_ids == rows.branch_ids[i])).nonzero()
        assert (whole.labels[match], whole.teacher_rows[match]) == (rows.labels[i], rows.teacher_rows[i])
        assert relative_error(rows.hidden[i], whole.hidden[match][0]) < STEP_FLOAT64
    counts = torch.tensor(rows.hidden.shape[0])
    dist.all_reduce(counts)
    assert int(counts) == whole.hidden.shape[0]

    sums = sum_losses(draft, documents, rows)
    sums.sum().backward()
    total = sums.detach().clone()
    dist.all_reduce(total)
    assert relative_error(total, expected_sums) < STEP_FLOAT64
    for parameter_name, parameter in draft.named_parameters():
        dist.all_reduce(parameter.grad)
        assert relative_error(parameter.grad, expected[parameter_name]) < STEP_FLOAT64, parameter_name


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
class TestTwoRanks(GlooTestCase):
    world_size = 2

    @parametrize("has_targets", [True, False])
    def test_fsdp_gradients_equal_one_rank(self, has_targets: bool):
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

    @parametrize("name", list(PACKINGS))
    def test_context_parallel_equals_one_rank(self, name: str):
        check_against_one_rank(name, make_config())

    @parametrize("family", list(FAMILIES))
    def test_context_parallel_of_other_families(self, family: str):
        check_against_one_rank("mixed", FAMILIES[family])

    @parametrize("name", ["one_target", "none"])
    def test_ranks_without_blocks(self, name: str):
        check_against_one_rank(name, make_dspark_config())


@instantiate_parametrized_tests
class TestFourRanks(GlooTestCase):
    world_size = 4

    @parametrize("name", ["mixed", "one_target"])
    def test_context_parallel_equals_one_rank(self, name: str):
        check_against_one_rank(name, make_config())

    @parametrize("family", ["dflash", "dspark"])
    def test_context_parallel_of_block_drafts(self, family: str):
        check_against_one_rank("mixed", FAMILIES[family])
