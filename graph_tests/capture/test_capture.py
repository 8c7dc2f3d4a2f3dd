"""What happens in a capture, and in which order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cuda_fakes import FakeGraph, fake_cuda
from helpers import make_layer, named, random_inputs
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops.cuda.capture import capture
from megamoe_compile.custom_ops.cuda.timing import capture_calls

DEVICE = torch.device("cuda", 1)  # on a CPU only its name is asked for
WARM_UP = ["side waits for main", "on side"]
BEHIND = ["off side", "main waits for side"]


def test_the_order_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch)
    outputs = iter(("first", "second", "captured output"))

    def run() -> str:
        log.append("run")
        return next(outputs)

    def instantiate(graph: Any) -> None:
        assert type(graph) is FakeGraph
        log.append("own instantiate")

    graph, output = capture(
        run,
        device=DEVICE,
        pool="a pool",
        warm_ups=2,
        at_end=lambda: log.append("at the end"),
        barrier=lambda: log.append("barrier"),
        instantiate=instantiate,
    )
    assert type(graph) is FakeGraph and output == "captured output"
    assert log == [
        ("stream of", DEVICE),
        *WARM_UP,
        *("run", "run"),
        *BEHIND,
        "barrier",
        *("capture on side in a pool", "run", "at the end", "captured"),
        "own instantiate",
        "barrier",
    ]


def test_calls_are_captured_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch)
    # The default of `instantiate` is torch's own: it is bound when the module is imported.
    monkeypatch.setattr(
        capture, "__kwdefaults__", {**capture.__kwdefaults__, "instantiate": FakeGraph.instantiate}
    )
    capture_calls([functools.partial(log.append, name) for name in ("a", "b")])
    assert log == [
        ("stream of", None),
        *WARM_UP,
        *("a", "b"),
        *BEHIND,
        *("capture on side in None", "a", "b", "captured"),
        "instantiate",
    ]


def test_a_warm_up_may_compile_and_a_capture_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    rows = iter((2, 2, 3, 4))

    def run() -> Tensor:
        return compiled(torch.zeros(next(rows)))

    _, output = capture(run, instantiate=lambda graph: None)
    assert torch.equal(output, torch.ones(2))
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        capture(run, instantiate=lambda graph: None)
    assert torch.equal(compiled(torch.zeros(5)), torch.ones(5))  # allowed again


def test_a_runner_captures_its_bucket(
    monkeypatch: pytest.MonkeyPatch, context: mm.MegaMoEContext
) -> None:
    """Two warm-ups and the capture run with the bucket's rows; then the mask is everything."""
    layer = make_layer(context)
    runner = mm.GraphRunner(layer, named(random_inputs(context.config, 4)), [4], context)
    log = fake_cuda(monkeypatch)
    runner._instantiate = lambda graph: log.append("own instantiate")
    monkeypatch.setattr(context, "barrier", lambda: log.append("barrier"))
    context.num_valid.fill_(4)

    def run() -> str:
        log.append(int(context.num_valid))
        return "output"

    replay, output = runner._capture_cuda(run, "the pool")
    assert output == "output" and int(context.num_valid) == ALL_VALID
    assert log == [
        ("stream of", context.device),
        *WARM_UP,
        *(4, 4),
        *BEHIND,
        "barrier",
        *("capture on side in the pool", 4, "captured"),
        *("own instantiate", "barrier"),
    ]
    assert replay() == "output" and log[-1] == "replay"
