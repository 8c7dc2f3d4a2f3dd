"""What a capture asks of torch.cuda, on a CPU: everything is logged, and work runs at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class FakeStream:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    """A graph that is captured within `torch.cuda.graph` and does nothing in a replay."""

    def __init__(self, log: list[Any], keep_graph: bool) -> None:
        assert keep_graph
        self.log = log

    def instantiate(self) -> None:
        self.log.append("instantiate")

    def replay(self) -> None:
        self.log.append("replay")


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install the fakes; returns their log."""
    log: list[Any] = []
    main = FakeStream(log, "main")

    def make_stream(device: Any = None) -> FakeStream:
        log.append(("stream of", device))
        return FakeStream(log, "side")

    @contextlib.contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    @contextlib.contextmanager
    def capturing(graph: FakeGraph, pool: Any, stream: FakeStream) -> Iterator[None]:
        log.append(f"capture on {stream.name} in {pool}")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: FakeGraph(log, keep_graph))
    return log
