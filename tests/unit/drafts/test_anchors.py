"""Which anchors are drawn, and that nothing but (seed, step, sample id) decides it."""

from __future__ import annotations

from dataclasses import replace

import torch

from specco.drafts.anchors import find_candidates, find_valid_slots, sample_anchors
from specco.packing import PackedTokens, pack_documents


def make_tokens(masks: list[str], sample_ids: list[int] | None = None, **changes) -> PackedTokens:
    """Pack documents given by their loss masks, "p" = trained."""
    loss_masks = [torch.tensor([c == "p" for c in mask]) for mask in masks]
    documents = [torch.arange(len(mask)) for mask in masks]
    (tokens,) = pack_documents(documents, loss_masks, max_tokens=10_000, sample_ids=sample_ids)
    return replace(tokens, **changes)


class TestCandidates:
    def test_table_of_the_module_page(self):
        tokens = make_tokens(["..pppp.pp"])
        assert sample_anchors(tokens, 99).tolist() == [2, 3, 4, 7]
        assert find_valid_slots(tokens, torch.tensor([2, 3, 4, 7]), 3).sum(1).tolist() == [3, 2, 1, 1]

    def test_no_block_starts_at_the_end_of_a_document_or_of_a_prompt(self):
        tokens = make_tokens([".pp", "pp", "p", "..", ".p", "p.p"])
        assert find_candidates(tokens).nonzero().flatten().tolist() == [1, 3]
        assert find_valid_slots(tokens, torch.tensor([1, 3]), 2).tolist() == [[True, False], [True, False]]


class TestDraw:
    masks = ("p" * 40, "." * 5, "p" * 12, "..ppp", "p" * 30)

    def draw(self, order: list[int], num_anchors: int = 8, **changes) -> dict[int, list[int]]:
        """Return the anchors' positions in their documents by sample id."""
        tokens = make_tokens([self.masks[i] for i in order], sample_ids=[100 + i for i in order], **changes)
        anchors = sample_anchors(tokens, num_anchors)
        documents = tokens.document_ids[anchors]
        starts = tokens.cu_seqlens.long()[documents]
        return {100 + i: (anchors - starts)[documents == at].tolist() for at, i in enumerate(order)}

    def test_counts_order_and_no_repeats(self):
        drawn = self.draw([0, 1, 2, 3, 4])
        assert [len(drawn[100 + i]) for i in range(5)] == [8, 0, 8, 2, 8]
        assert drawn[103] == [2, 3]
        for positions in drawn.values():
            assert positions == sorted(set(positions))

    def test_any_packing_draws_the_same(self):
        whole = self.draw([0, 1, 2, 3, 4])
        assert self.draw([4, 2, 3, 1, 0]) == whole
        for i in range(5):
            assert self.draw([i]) == {100 + i: whole[100 + i]}

    def test_seed_step_and_sample_decide(self):
        first = self.draw([0, 4], draw_key=(3, 7))
        assert self.draw([0, 4], draw_key=(3, 7)) == first
        assert self.draw([0, 4], draw_key=(3, 8)) != first
        assert self.draw([0, 4], draw_key=(4, 7)) != first
        twins = make_tokens(["p" * 40] * 2, sample_ids=[1, 2])
        anchors = sample_anchors(twins, 8)
        assert anchors[:8].tolist() != (anchors[8:] - 40).tolist()

    def test_every_candidate_is_drawn_as_often(self):
        counts = torch.zeros(40)
        for step in range(500):
            counts[self.draw([0], draw_key=(0, step))[100]] += 1
        # 500 draws of 8 of 39: 102.6 each, standard deviation 9
        assert counts[39] == 0
        assert float((counts[:39] - 500 * 8 / 39).abs().max()) < 45

    def test_the_callers_generator_is_left_alone(self):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        self.draw([0, 1, 2, 3, 4])
        assert torch.equal(torch.get_rng_state(), state)
