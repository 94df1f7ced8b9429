"""The baselines of tools/bench_branch_attention.py compute the same attention as the dense oracle."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench_branch_attention import TOLERANCES, Case, check_case, make_groups

from specco.testing.distributed import GlooTestCase

HEADS = (4, 2, 8)


class BenchBaselinesTest(GlooTestCase):
    """Every baseline against the oracle at 4 ranks, outputs and all gradients: all Ulysses x ring splits."""

    world_size = 4

    def check(self, family: str, size: int, documents: str, dtype: str) -> None:
        case = Case(family, size, 640, documents, self.world_size, HEADS, dtype, width=4)
        variants = ["allgather", "usp-1x4", "usp-2x2", "usp-4x1"]
        results = check_case(case, variants, make_groups(self.world_size))
        self.assertEqual([row["variant"] for row in results], variants)
        for row in results:
            self.assertLessEqual(row["error"], TOLERANCES[dtype], row)

    def test_passes(self) -> None:
        for documents in ("single", "packed"):
            self.check("eagle3", 3, documents, "float64")

    def test_blocks(self) -> None:
        # Five anchors on 640 rows: at 4 ranks one of them has no block.
        for documents in ("single", "packed"):
            self.check("dflash", 5, documents, "float64")

    def test_bfloat16(self) -> None:
        self.check("eagle3", 2, "single", "bfloat16")
