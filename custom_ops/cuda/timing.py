"""Time calls under CUDA graph replay, for a choice between them at warm-up.

Each variant's calls are captured in one graph of their own, so that no host cost and no launch gap
counts. The graphs are replayed in turn, so that a drift of clocks hits all alike, and a time is the
median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from .capture import capture

Name = TypeVar("Name", bound=str)
WARM_UP = 3  # replays of each variant: clocks rise, caches and TLBs fill
LEAST_ROUNDS, MOST_ROUNDS = 7, 25
SECONDS = 0.4  # of all rounds together, once the least are done


def time_in_turn(variants: Mapping[Name, Sequence[Callable[[], object]]]) -> dict[Name, float]:
    """Microseconds of one call of each variant, the median; synchronizes.

    Args:
        variants: per name, calls that can be captured: warm, on fixed memory. Each runs once
            eagerly, and once per replay.
    """
    torch.cuda.synchronize()
    graphs = {name: capture_calls(calls) for name, calls in variants.items()}
    for graph in graphs.values():
        for _ in range(WARM_UP):
            graph.replay()
    samples: dict[Name, list[float]] = {name: [] for name in graphs}
    spent = 0.0
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and spent > SECONDS:
            break
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds = start.elapsed_time(end)
            spent += milliseconds / 1e3
            samples[name].append(milliseconds * 1e3 / len(variants[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def capture_calls(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls in order; each runs once before. Their outputs are dropped."""

    def run() -> None:
        for call in calls:
            call()

    return capture(run)[0]
