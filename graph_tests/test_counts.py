"""Counts are whole numbers: what is none is refused, and a numpy integer is as good as an int."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    assert_same,
    make_config,
    make_layer,
    named,
    no_launch,
    random_checkpoint,
    random_inputs,
    refuses,
)

import megamoe_compile as mm

BAD: dict[str, Any] = {
    "True": True,
    "False": False,
    "numpy bool": np.True_,
    "float": 1.0,
    "text": "1",
    "tensor": torch.ones((), dtype=torch.int64, device="cpu"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[mm.GraphRunner]:
    with mm.MegaMoEContext(make_config(num_shared_experts=1), device="cpu") as context:
        layer = make_layer(context)
        made = mm.GraphRunner(layer, named(random_inputs(context.config, 4)), [1, 2, 4], context)
        made.capture(progress=False)
        yield made


def inputs(runner: mm.GraphRunner, tokens: int = 1) -> dict[str, Any]:
    return named(random_inputs(runner.context.config, tokens))


def layer_of(runner: mm.GraphRunner) -> Any:
    return runner.context.layers[0]


def new_runner(runner: mm.GraphRunner, buckets: Any, width: Any = 1) -> mm.GraphRunner:
    return mm.GraphRunner(runner.step, inputs(runner), buckets, runner.context, width=width)


def expert(runner: mm.GraphRunner, number: Any) -> torch.Tensor:
    layer = layer_of(runner)
    checkpoint = random_checkpoint(runner.context.config, seed=7)
    layer.load_expert(number, *checkpoint[1])
    return layer.w13_scale[1].clone()


PLAN = mm.StepPlan
# Each takes one count, of which 1 is good.
TAKERS: dict[str, Callable[[mm.GraphRunner, Any], Any]] = {
    "runner num_tokens": lambda r, n: r(num_tokens=n, **inputs(r)),
    "runner bucket": lambda r, n: r(num_tokens=1, bucket=n, **inputs(r)),
    "runner num_tokens with a plan": lambda r, n: r(
        plan=PLAN.from_counts([1], buckets=[1]), num_tokens=n, **inputs(r)
    ),
    "runner bucket with a plan": lambda r, n: r(
        plan=PLAN.from_counts([1], buckets=[1]), bucket=n, **inputs(r)
    ),
    "bucket_for": lambda r, n: r.bucket_for(n),
    "buckets": lambda r, n: new_runner(r, [n]).buckets,
    "width": lambda r, n: new_runner(r, [2], n).width,
    "warmup": lambda r, n: r.context.warmup([n]),
    "num_valid": lambda r, n: layer_of(r)(*inputs(r, 3).values(), num_valid=n),
    "expert": expert,
    "agree": lambda r, n: PLAN.agree(n),
    "agree buckets": lambda r, n: PLAN.agree(1, None, [n]),
    "agree width": lambda r, n: PLAN.agree(1, None, [2], n),
    "agree capacity": lambda r, n: PLAN.agree(3, None, capacity=n).num_chunks,
    "agree attn_tp": lambda r, n: PLAN.agree(1, attn_tp=n),
    "counts": lambda r, n: PLAN.from_counts([n]),
    "rank": lambda r, n: PLAN.from_counts([1, 2], n),
    "num_ranks": lambda r, n: PLAN.from_counts([1], num_ranks=n),
    "of_bucket": lambda r, n: PLAN.of_bucket(n),
    "of_bucket ranks": lambda r, n: PLAN.of_bucket(2, n),
    "of_bucket rank": lambda r, n: PLAN.of_bucket(2, 2, n),
    "of_bucket width": lambda r, n: PLAN.of_bucket(2, 1, 0, n),
    "attn_tp_gather": lambda r, n: mm.attn_tp_gather(torch.ones(1, 2), n, None),
    "backend_for": lambda r, n: r.context.backend_for(n),
    "intermediate_group_for": lambda r, n: r.context.intermediate_group_for(n),
    "decision_for": lambda r, n: r.context.decision_for(n),
    "max_tokens_per_rank": lambda r, n: make_config(max_tokens_per_rank=n),
    "top_k": lambda r, n: make_config(top_k=n),
    "num_shared_experts": lambda r, n: make_config(num_shared_experts=n),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_count_is_refused(runner: mm.GraphRunner, taker: str, bad: str) -> None:
    if taker == "num_valid" and bad == "tensor":
        pytest.skip("num_valid takes tensors, of int32")
    weights = layer_of(runner).w13.clone()
    with no_launch(runner.context), refuses(ValueError):
        TAKERS[taker](runner, BAD[bad])
    assert_same(layer_of(runner).w13, weights)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_numpy_integer_is_a_count(runner: mm.GraphRunner, taker: str) -> None:
    want, got = (TAKERS[taker](runner, n) for n in (1, np.int64(1)))
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert_same(got, want)
    else:
        assert got == want
        assert repr(got) == repr(want), "an int, wherever it is kept"


@pytest.mark.parametrize("taker", ["runner num_tokens", "bucket_for", "warmup", "num_valid"])
def test_a_negative_count_is_refused(runner: mm.GraphRunner, taker: str) -> None:
    with no_launch(runner.context), refuses(ValueError, "-1"):
        TAKERS[taker](runner, -1)


@pytest.mark.parametrize("bad", ["True", "float", "text"])
def test_pins_of_paths_are_counts(machine: object, bad: str) -> None:
    with refuses(ValueError, "bucket of paths"):
        mm.MegaMoEContext(make_config(), device="cpu", paths={BAD[bad]: "deep_gemm"})


@pytest.mark.parametrize("bad", ["True", "float", "tensor"])
@pytest.mark.parametrize("at", [0, 1])
def test_sizes_of_an_exchange_are_counts(bad: str, at: int) -> None:
    sizes = [8, 8]
    sizes[at] = BAD[bad]
    with refuses(ValueError, "max_rows and row_bytes"):
        mm.SymmetricExchange(*sizes, device="cpu")
