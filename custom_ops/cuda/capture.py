"""Capture a call in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .graph_fills import Instantiate

Output = TypeVar("Output")


def _nothing() -> None:
    pass


def capture(
    run: Callable[[], Output],
    *,
    device: torch.device | None = None,
    pool: Any = None,
    warm_ups: int = 1,
    at_end: Callable[[], object] = _nothing,
    barrier: Callable[[], object] = _nothing,
    instantiate: Instantiate = torch.cuda.CUDAGraph.instantiate,
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Warm up, then capture `run`. It may compile in a warm-up, and not in the capture.

    Args:
        device: a CUDA device; default: the current one.
        pool: of the graph's memory; default: one of its own.
        warm_ups: eager runs before the capture, on the stream that captures: lazily made state
            belongs to a stream.
        at_end: captured behind `run`, and in no warm-up.
        barrier: of several ranks: before the capture, once each has warmed up, and after it.
        instantiate: see `instantiator`.

    Returns:
        (the graph, what `run` returned while it was captured: the outputs of each replay)
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    barrier()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        torch.cuda.graph(graph, pool=pool, stream=stream),
    ):
        output = run()
        at_end()
    instantiate(graph)
    barrier()
    return graph, output
