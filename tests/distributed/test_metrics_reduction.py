"""Pairs add up over ranks, and ranks that reduce different figures are told so."""

from __future__ import annotations

import torch

from specco.metrics import all_reduce_pairs, compute_means, make_pair
from specco.testing.distributed import GlooTestCase


class TestAllReducePairs(GlooTestCase):
    world_size = 2

    def test_sums_and_counts_add_up_before_the_division(self):
        pairs = {"b": make_pair(1.0 + self.rank, 1), "a": make_pair(10.0 * self.rank, 3 * self.rank)}
        reduced = all_reduce_pairs(pairs if self.rank else dict(reversed(pairs.items())))
        assert {name: pair.tolist() for name, pair in reduced.items()} == {"a": [10, 3], "b": [3, 2]}
        assert compute_means(reduced) == {"a": 10 / 3, "b": 1.5}
        assert pairs["b"].tolist() == [1 + self.rank, 1], "the caller's pairs stay its own"

    def test_other_names_are_refused_on_every_rank(self):
        with self.assertRaisesRegex(ValueError, rf"\['x{self.rank}'\]"):
            all_reduce_pairs({f"x{self.rank}": torch.ones(2, dtype=torch.float64)})
