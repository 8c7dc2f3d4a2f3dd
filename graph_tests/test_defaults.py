"""The default dtype and device of a process change nothing.

Models are built under `torch.set_default_dtype(torch.bfloat16)`, and transformers loads them under
`torch.device("meta")`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from helpers import (
    Checkpoint,
    Inputs,
    assert_same,
    make_config,
    named,
    random_checkpoint,
    random_inputs,
)
from torch import Tensor

import megamoe_compile as mm

DEFAULTS = ["bfloat16", "float16", "float64", "meta device", "meta block"]


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    """Inside, the process has another default dtype, or device."""
    if name == "meta block":
        with torch.device("meta"):
            yield
    elif name == "meta device":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, name))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


Made = tuple[Checkpoint, Checkpoint, list[Inputs]]


def make_inputs(config: mm.MegaMoEConfig) -> Made:
    inputs = [random_inputs(config, tokens) for tokens in (5, 0, 9)]
    return random_checkpoint(config), random_checkpoint(config, fp8=False), inputs


def use_layer(config: mm.MegaMoEConfig, made: Made) -> list[Tensor]:
    """What a layer gives in most of the ways to use one."""
    fp8, bf16, batches = made[0].clone(), made[1], made[2]
    results = []
    with torch.no_grad(), mm.MegaMoEContext(config, device="cpu") as context:
        adopted, streamed = mm.MegaMoE(context, validate=True), mm.MegaMoE(context)
        adopted.load_weights(*fp8)
        streamed.load_expert(1, *bf16[1])  # type: ignore[arg-type]
        streamed.load_weights(*bf16)
        streamed.load_expert(1, *made[0][1])  # type: ignore[arg-type]
        context.warmup([1, 4])
        for layer in (adopted, streamed):
            results += [layer.w13, layer.w13_scale, layer.w2, layer.w2_scale]
            results += [layer(*inputs) for inputs in batches[:2]]
            results += [layer(*batches[0], num_valid=2)]
            for dynamic in (None, True):
                compiled = torch.compile(
                    layer, fullgraph=True, dynamic=dynamic, backend="aot_eager"
                )
                results += [compiled(*inputs) for inputs in batches[:2]]
        runner = mm.GraphRunner(adopted, named(batches[0]), [1, 4, 8], context)
        runner.capture(progress=False)
        for inputs in batches[:2]:
            tokens = inputs[0].shape[0]
            plan = mm.StepPlan.agree(tokens, None, [1, 4, 8], capacity=8)
            results += [runner(plan=plan, **named(inputs))]
            for mode in ("max_len", "sum_len"):
                plan = mm.StepPlan.from_counts([tokens], 0, mode=mode)
                gathered = mm.dp_gather(inputs[0], plan, None)
                results += [gathered, mm.dp_scatter(gathered, plan, None)]
                results += [plan.real_rows(), plan.counts(), plan.pad(inputs[0])]
        results += [torch.tensor(context.invalid_id_count, dtype=torch.int64, device="cpu")]
    return results


def use_chunks(config: mm.MegaMoEConfig, made: Made) -> list[Tensor]:
    """A batch above the capacity."""
    with torch.no_grad(), mm.MegaMoEContext(config, device="cpu") as context:
        layer = mm.MegaMoE(context)
        layer.load_weights(*made[0].clone())
        return [layer(*inputs) for inputs in made[2]]


def compare(name: str, use: Callable[..., list[Tensor]], fields: dict[str, Any]) -> None:
    config = make_config(**fields)
    made = make_inputs(config)
    want = use(config, made)
    torch._dynamo.reset()
    with default(name):
        got = use(config, made)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same(a, b, f"result {number}")


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(
    "changes", [{}, {"num_shared_experts": 1, "swiglu_limit": 2.0}], ids=["routed", "shared"]
)
def test_a_layer_is_the_same(name: str, changes: dict[str, Any]) -> None:
    compare(name, use_layer, {"max_tokens_per_rank": 8, **changes})


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_batch_above_the_capacity_is_the_same(name: str) -> None:
    compare(name, use_chunks, {"max_tokens_per_rank": 4, "over_capacity": "chunk"})


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_layer_of_triton_is_the_same(interpreter: ProcessPoolExecutor, name: str) -> None:
    fields = {"backend": "triton", "max_tokens_per_rank": 8, "num_experts": 2, "top_k": 1}
    interpreter.submit(compare, name, use_layer, fields).result()


@pytest.mark.parametrize("name", ["bfloat16", "meta block"])
def test_decode_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, cache, mask, batches and verdict."""
    pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")
    from megamoe_compile.commands.decode import command

    monkeypatch.setattr(command, "_compile", lambda step, context, inputs: step)

    def use() -> tuple[Any, ...]:
        from megamoe_compile.engines.transformers.model import prepare

        model = command.random_model()
        with prepare(model, max_tokens_per_rank=4) as context:
            report = command.decode(model, context, steps=8, max_length=8, buckets=[1, 4])
        assert report.parity, report.verdict()
        return report.tokens, report.decided_tokens, report.max_relative_error

    want = use()
    with default(name):
        assert use() == want


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", ["bfloat16", "meta block"])
def test_the_columns_of_bench_are_the_same(name: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")
    from bench_helpers import options

    from megamoe_compile.commands.bench.columns import built_column
    from megamoe_compile.commands.bench.results import ColumnResult

    def use(column: str) -> list[Tensor]:
        settings, results = options(), []
        with built_column(column, settings, lambda text: None, ColumnResult(column)) as built:
            run = built.ready(2, built.implementations[0])
            for tokens in settings.tokens(2):
                results += [t.clone() for t in run.call(tokens)]  # type: ignore[attr-defined]
        return results

    for column in ("megamoe", "hf-eager"):
        want = use(column)
        torch._dynamo.reset()
        with default(name):
            got = use(column)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, column)
