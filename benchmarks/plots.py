"""Plots of a benchmark's rows: time against tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@contextlib.contextmanager
def panels(
    rows: Rows, path: Path, column: str, title: str = "{}", xlabel: str = "tokens"
) -> Iterator[list[tuple[Any, Rows]]]:
    """A panel for each value of a column, to be drawn into; then path.png.

    Args:
        title: of a panel, with the value in it.

    Yields:
        (axes, the rows of its value) of each panel.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    values = list(dict.fromkeys(row[column] for row in rows))
    figure = Figure(figsize=(5 * len(values), 4))
    axes = figure.subplots(1, len(values), squeeze=False)[0]
    for axis, value in zip(axes, values, strict=True):
        axis.set(
            xscale="log",
            yscale="log",
            xlabel=xlabel,
            ylabel="us per layer",
            title=title.format(value),
        )
    yield [
        (axis, [row for row in rows if row[column] == value])
        for axis, value in zip(axes, values, strict=True)
    ]
    for axis in axes:
        axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def draw_lines(axis: Any, rows: Rows, lines: Sequence[tuple[str, str]]) -> None:
    """Columns of times and their styles; a column without any value is left out."""
    for key, style in lines:
        points = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), style, label=key.removesuffix("_us"))
