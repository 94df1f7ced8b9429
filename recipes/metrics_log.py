"""Where a run's metrics go: one JSON row a step, TensorBoard, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends rows to ``metrics.jsonl`` and scalars to TensorBoard; made on one rank only.

    Args:
        folder: of the run; made if it is not there. An older metrics.jsonl is replaced.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self._file = (self.folder / "metrics.jsonl").open("w")
        self._board = SummaryWriter(str(self.folder / "tensorboard"))

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; ``row["step"]`` is its step, every other number a scalar of that step."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()


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
