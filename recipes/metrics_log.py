"""Where a run's metrics go: one JSON row a step, TensorBoard, and a table at the end."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends rows to ``metrics.jsonl`` and scalars to TensorBoard; made on one rank only.

    Args:
        folder: of the run; made if it is not there.
        last_step: rows of an earlier run up to this step stay, later ones go: the run resumes after it. None: none
            stays.
    """

    def __init__(self, folder: str | Path, last_step: int | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        self.rows: list[dict[str, Any]] = []
        if last_step is not None and path.exists():
            self.rows = [row for row in read_rows(path) if row["step"] <= last_step]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(part, path)
        self._file = path.open("a")
        if last_step is None:
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        purge_step = None if last_step is None else last_step + 1
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; ``row["step"]`` is its step, every other number a scalar of that step.

        JSON has no NaN and no infinity: both are written as null.
        """
        self.rows.append(row)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; a last line that a killed run did not finish is left out."""
    lines = Path(path).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def print_table(rows: Sequence[dict[str, Any]], columns: dict[str, str], title: str) -> None:
    """Print the chosen columns of the rows.

    Args:
        rows: of metrics.jsonl; a column that a row lacks stays blank.
        columns: metric name to heading.
        title: above the table.
    """
    table = Table(title=title)
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_format(row.get(name)) for name in columns))
    Console(width=150).print(table)


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e9):
        return f"{int(value)}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.3f}"


def check_losses(metrics: dict[str, float], step: int) -> None:
    """Stop a run whose loss is lost; gradients that overflow alone are skipped and counted by the learner.

    Raises:
        FloatingPointError: a loss that is no finite number, the same on every rank.
    """
    for name in ("policy_loss", "draft_loss"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise FloatingPointError(f"{name} is {metrics[name]} at step {step}; the last checkpoint is from before it")
