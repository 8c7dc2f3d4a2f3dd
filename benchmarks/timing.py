"""Timing of captured GPU work, and the facts that a result file must carry.

Method: each variant is captured once, many calls per graph, every call on fresh random inputs;
variants are replayed in turn, so that a drift of clocks hits all alike; a time is the median over
rounds of a replay's duration between two events, per call, and the spread is the interquartile
range. Figures are compared within one run only.

Traps, all met: zeros time faster than random data; one input set measures the L2 cache; events
around a single short replay measure launch latency, hence many calls per graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megamoe_compile.commands.bench import measure as bench_measure
from megamoe_compile.commands.environment import environment as environment
from megamoe_compile.custom_ops.cuda.timing import capture_calls


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median: float
    spread: float


def time_variants(
    variants: Mapping[str, Sequence[Callable[[], object]]],
    rounds: int = 30,
    align: Callable[[], object] | None = None,
    slowest: Callable[[dict[str, list[float]]], dict[str, list[float]]] | None = None,
) -> dict[str, Timing]:
    """Time each variant's calls, replayed in turn. Outputs of a call die with the graph pool.

    Args:
        align: of several ranks: queued before each timed replay, so that all ranks start together.
        slowest: of several ranks: from this rank's times of each round to those of the slowest.
    """
    graphs = {name: (capture_calls(calls), len(calls)) for name, calls in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for graph, _ in graphs.values():
        for _ in range(3):
            graph.replay()
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if align is not None:
                align()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1000 / calls)
    if slowest is not None:
        samples = slowest(samples)
    result = {}
    for name, values in samples.items():
        low, _, high = statistics.quantiles(values, n=4)
        result[name] = Timing(statistics.median(values), high - low)
    return result


def host_time(call: Callable[[], object], calls: int = 200) -> float:
    """Microseconds of host time of one call, the median; the queue is kept from filling up."""
    return bench_measure.host_time([call], calls).median


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes per second of a device-to-device copy, counting bytes read and bytes written.

    Eager, between events: inside a graph a copy becomes a memcpy node, which is slower.
    """
    count = int(gigabytes * 1e9) // 4
    source = torch.randint(0, 2**31 - 1, (count,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / statistics.median(samples[2:])


def add_run_arguments(parser: argparse.ArgumentParser, *, out_required: bool = True) -> None:
    """--rounds, --out and --commit."""
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, required=out_required, help="results: OUT.json, OUT.md, OUT.png"
    )
    parser.add_argument("--commit", help="of this code, where the run has no repository")


def results(args: argparse.Namespace, bandwidth: float, **facts: Any) -> dict[str, Any]:
    """What a result file begins with; its "rows" are empty yet."""
    return {
        "environment": environment(args.commit),
        "copy_terabytes_per_second": bandwidth / 1e12,
        **facts,
        "rows": [],
    }


def show(row: Mapping[str, Any]) -> None:
    """Print a row, at once."""
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def write_results(path: Path, data: Mapping[str, Any], table: str) -> None:
    """path.json and path.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows with the same keys; floats with four digits, None as a dash."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"
