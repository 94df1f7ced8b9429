"""Plot a JSON file of ``bench_branch_attention.py``: every variant relative to our ring mode.

python tools/bench_plot.py bench.json bench.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PANELS = {"cpu_s": "CPU time, busiest rank", "peak_mib": "peak memory growth", "saved_mib": "saved for backward"}


def plot_results(results: list[dict], machine: dict[str, str], path: Path) -> None:
    """Draw one panel per figure and number of ranks, grouped bars per case, 1.0 = ``ours-ring``.

    Args:
        results: rows of the benchmark, in the order it wrote them.
        machine: as ``bench_branch_attention.describe_machine`` returns it.
        path: image file to write.
    """
    results = [row for row in results if row["case"]["cp"] > 1]
    degrees = sorted({row["case"]["cp"] for row in results})
    figure, axes = plt.subplots(len(PANELS), len(degrees), figsize=(7 * len(degrees), 9), squeeze=False)
    for column, cp in enumerate(degrees):
        here = [row for row in results if row["case"]["cp"] == cp]
        for ax, (key, title) in zip(axes[:, column], PANELS.items(), strict=True):
            draw_panel(ax, here, key)
            ax.set_title(f"{title}, cp {cp}")
            ax.set_ylabel("relative to ours-ring")
        # Each number of ranks has variants of its own; the legend gets a strip above the highest bar.
        axes[0, column].set_ylim(top=1.3 * axes[0, column].get_ylim()[1])
        axes[0, column].legend(fontsize="x-small", ncols=6, loc="upper center")
    figure.suptitle(
        f"Branch attention, forward and backward, {results[0]['case']['dtype']}; "
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_panel(ax: plt.Axes, rows: list[dict], key: str) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    by_case = {(row["name"], row["variant"]): row for row in rows}
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        for j, name in enumerate(names):
            unit = by_case[name, "ours-ring"][key]
            label = variant if j == 0 else None
            ax.bar(j + i * width - 0.4, by_case[name, variant][key] / unit, width, label=label, color=f"C{i}")
    ax.axhline(1.0, color="black", linewidth=0.8)
    labels = [name.rsplit(" ", 1)[0].replace(" ", "\n", 1) for name in names]
    ax.set_xticks(range(len(names)), labels, fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files; their rows are laid end to end")
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.results]
    plot_results([row for file in files for row in file["results"]], files[0]["machine"], options.image)


if __name__ == "__main__":
    main()
