"""An EAGLE-3 draft over a context-parallel group: the rows, loss and gradients of one rank, wherever a row lives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.eagle3_cases import (
    Document,
    compute_gradients,
    compute_loss_sums,
    make_config,
    make_document,
    make_draft,
    pack,
    run_draft,
    sum_losses,
)

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


def make_documents(name: str) -> list[Document]:
    return [make_document(length, prompt, seed=i) for i, (length, prompt) in enumerate(PACKINGS[name])]


def check_against_one_rank(name: str, *, norm_output: bool) -> None:
    """Compare rows, loss sums and gradients of all ranks together with those of one rank."""
    config = make_config(norm_output=norm_output)
    documents = make_documents(name)
    whole = run_draft(make_draft(config), documents)
    expected_sums = compute_loss_sums(make_draft(config), documents).detach()
    expected = compute_gradients(make_draft(config), [documents])

    draft, tokens = make_draft(config), pack(documents)
    layout = PackedLayout.build(tokens.cu_seqlens, dist.get_world_size(), dist.get_rank())
    taps, embeddings = (torch.cat([getattr(d, x) for d in documents]) for x in ("taps", "embeddings"))
    # what stands in padding rows must not matter
    local = [layout.shard(x) + 1e3 * (layout.global_rows < 0)[:, None] for x in (taps, embeddings)]
    rows = draft(*local, tokens, layout, dist.group.WORLD)
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


@instantiate_parametrized_tests
class TestTwoRanks(GlooTestCase):
    world_size = 2

    @parametrize("name", list(PACKINGS))
    def test_rows_losses_and_gradients_equal_one_rank(self, name: str):
        check_against_one_rank(name, norm_output=False)

    def test_the_fed_back_row_may_be_normed(self):
        check_against_one_rank("mixed", norm_output=True)


@instantiate_parametrized_tests
class TestFourRanks(GlooTestCase):
    world_size = 4

    @parametrize("name", ["mixed", "one_target"])
    def test_rows_losses_and_gradients_equal_one_rank(self, name: str):
        check_against_one_rank(name, norm_output=False)
