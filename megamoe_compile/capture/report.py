"""What a capture says about itself: a row per bucket, and a bar while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from ..custom_ops.paths.choice import Decision

T = TypeVar("T")


@dataclasses.dataclass
class BucketSummary:
    """One row of `GraphRunner.summary()`; seconds, bytes and microseconds as the names say.

    `backend` is what a layer call in this bucket takes, and `decision` says by what times, where
    there was a choice.
    """

    bucket: int
    path: str  # "cuda_graph" or, on a CPU, "compiled"
    backend: str
    capture_seconds: float
    graph_bytes: int
    replay_microseconds: float
    replays: int = 0
    decision: Decision | None = None


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def progress_bar(items: list[T], show: bool) -> Iterable[T]:
    if not show:
        return items
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is a courtesy, not a dependency
        return items
    bar: Iterable[T] = tqdm(items, desc="capture", unit="bucket")
    return bar
