"""What `megamoe bench` writes: JSON, a Markdown table and a plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .measure import percent
from .results import Cell, ColumnResult

TITLES = {
    "hf-eager": "transformers, eager",
    "hf": "transformers, best captured",
    "chain": "unfused FP8 chain, captured",
    "megamoe": "megamoe, captured",
}
LISTED_KERNELS = 16  # of each cell, in the Markdown; the JSON has all
LEGEND = """\
- ms/step: median of single steps; spread: their interquartile range. Each step has other tokens,
  and counts their copy and the launch. On CUDA between events, with the GPU idle before.
- All columns run one step with one attention and the same weights; only hf-eager is not compiled.
- GB/s: bytes that a step reads at least (touched experts in the column's own dtype, all other
  weights once, the requests' KV cache) over ms/step. A weight of an expert is 2 bytes in hf-eager
  and hf, 1 in chain and megamoe.
- MoE share: of the time of all kernels in a profile of replays, what lies between a router's top-k
  and the next layer; "unknown" where these kernels were not recognized. Profiles were made after
  the last column was timed, on columns built again.
- compile s: first call at this batch size, with what Inductor's caches on disk held. host us: host
  time of a replay's call, the median and in brackets the least. peak GB: of torch's allocator;
  megamoe holds the graphs of all its buckets, the other columns one graph.
- "-": does not apply, or was not measured.
"""


def as_dict(facts: Mapping[str, Any], columns: Sequence[ColumnResult]) -> dict[str, Any]:
    """One JSON object: the facts of the run, and all columns."""
    return {
        **facts,
        "columns": [dataclasses.asdict(column) for column in columns],
        "speedup_over_best_hf": speedups(columns, "hf"),
        "speedup_over_chain": speedups(columns, "chain"),
    }


def speedups(columns: Sequence[ColumnResult], base: str) -> dict[int, float]:
    """Tokens/s of megamoe over those of column `base`, by batch size."""
    cells = {(column.name, cell.batch): cell for column in columns for cell in column.cells}
    return {
        batch: cell.tokens_per_s / cells[base, batch].tokens_per_s
        for (name, batch), cell in cells.items()
        if name == "megamoe" and (base, batch) in cells
    }


def table(columns: Sequence[ColumnResult]) -> str:
    """A Markdown table, a row per batch size and column; then legend, failures and notes."""
    over = {base: speedups(columns, base) for base in ("hf", "chain")}
    head = (
        "batch",
        "experts",
        "implementation",
        "tokens/s",
        "ms/step",
        "spread",
        "vs hf",
        "vs chain",
        "MoE share",
        "GB/s",
        "compile s",
        "capture s",
        "host us",
        "peak GB",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    rows = sorted(
        (
            (cell.batch, order, column, cell)
            for order, column in enumerate(columns)
            for cell in column.cells
        ),
        key=lambda row: row[:2],
    )
    for batch, _, column, cell in rows:
        ours = column.name == "megamoe"
        values = (
            str(batch),
            column.name,
            cell.implementation,
            f"{cell.tokens_per_s:.1f}",
            f"{cell.time.median:.3f}",
            f"{cell.time.spread:.3f}",
            *(
                f"{ratios[batch]:.2f}" if ours and batch in ratios else "-"
                for ratios in over.values()
            ),
            "-" if cell.share is None else percent(cell.share),
            f"{cell.gigabytes_per_s:.0f}",
            _number(cell.compile_s),
            _number(cell.capture_s),
            "-" if cell.host is None else f"{cell.host.median:.0f} ({cell.host.least:.0f})",
            "-" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e9:.1f}",
        )
        lines.append("| " + " | ".join(values) + " |")
    lines += ["", LEGEND]
    lines += [f"- {column.name} failed: {column.error}" for column in columns if column.error]
    lines += [f"- {column.name}: {note}" for column in columns for note in column.notes]
    lines += [
        f"- {column.name}, batch {cell.batch}: {'; '.join(cell.notes)}"
        for column in columns
        for cell in column.cells
        if cell.notes
    ]
    lines += [
        f"- {column.name}: {len(column.buckets)} buckets {column.buckets} captured in "
        f"{column.capture_s:.1f} s after warm-up"
        for column in columns
        if column.capture_s is not None
    ]
    return "\n".join(lines) + "\n"


def kernels(columns: Sequence[ColumnResult]) -> str:
    """The largest kernels of every profiled cell, in Markdown."""
    parts = []
    for column in columns:
        for cell in column.cells:
            if cell.share is not None:
                parts.append(_kernels_of(column.name, cell))
    return "\n".join(parts)


def _kernels_of(name: str, cell: Cell) -> str:
    assert cell.share is not None
    lines = [
        f"### {name}, batch {cell.batch}: {cell.share.kernels} kernels, "
        f"{cell.share.kernel_ms:.3f} ms of {cell.time.median:.3f}",
        "",
        "| ms/step | launches | kernel |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {ms:.3f} | {count} | `{kernel[:100].replace('|', '/')}` |"
        for kernel, ms, count in cell.share.rows[:LISTED_KERNELS]
    ]
    return "\n".join(lines) + "\n"


def with_ending(path: Path, ending: str) -> Path:
    """PATH.json and so on: `with_suffix` would take the .5 of glm-4.5 for a suffix."""
    return path.with_name(path.name + ending)


def write(path: Path, facts: Mapping[str, Any], columns: Sequence[ColumnResult]) -> None:
    """Write PATH.json and PATH.md, whole, over what an earlier call left. Their folder exists."""
    data = json.dumps(as_dict(facts, columns), indent=1, default=str) + "\n"
    with_ending(path, ".json").write_text(data)
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"{head}\n\n{table(columns)}\n{kernels(columns)}"
    with_ending(path, ".md").write_text(text)


def plot(path: Path, facts: Mapping[str, Any], columns: Sequence[ColumnResult]) -> None:
    """Write PATH.png: tokens/s against the batch size. ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    batches = sorted({cell.batch for column in columns for cell in column.cells})
    for column in columns:
        if column.cells:
            axes.plot(
                [batches.index(cell.batch) for cell in column.cells],
                [cell.tokens_per_s for cell in column.cells],
                marker="o",
                label=TITLES[column.name],
            )
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yscale("log")
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"decode, {facts['model']}\n{facts['gpu']}, torch {facts['torch']}", fontsize=10)
    axes.grid(alpha=0.3)
    if columns:
        axes.legend()
    figure.savefig(with_ending(path, ".png"), dpi=120)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
