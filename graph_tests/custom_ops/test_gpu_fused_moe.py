"""The C++ kernel of the op on a GPU: the same bits, rules and errors as the Python kernel."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    GPU_SHAPE,
    Inputs,
    assert_same,
    make_config,
    make_layer,
    op_arguments,
    outcome,
    random_inputs,
    refuses,
)
from native_mocks import strided, wrong_calls
from torch.library import opcheck

import megamoe_compile as mm
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.deep_gemm.native import NativeLaunch
from megamoe_compile.custom_ops.library import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = {**GPU_SHAPE, "backend": "deep_gemm"}  # the mega kernel for every number of tokens
WARM = [1, 3, 8, 32, 128]


@pytest.fixture(scope="module")
def context() -> Iterator[mm.MegaMoEContext]:
    with mm.MegaMoEContext(make_config(**SHAPE), device="cuda") as made:
        if native_of(made) is None:
            pytest.skip(f"{made.backend}: this wheel's binding has no C interface")
        made.warmup(WARM)
        yield made


@pytest.fixture(scope="module")
def layer(context: mm.MegaMoEContext) -> mm.MegaMoE:
    return make_layer(context)


def native_of(context: mm.MegaMoEContext) -> NativeLaunch | None:
    assert context._runtime is not None
    return context._runtime.native


def launches(context: mm.MegaMoEContext) -> int:
    native = native_of(context)
    assert native is not None
    return native.launches


def inputs_of(layer: mm.MegaMoE, tokens: int, **options: Any) -> Inputs:
    return random_inputs(layer.context.config, tokens, device="cuda", **options)


def in_python(layer: mm.MegaMoE, inputs: Inputs) -> torch.Tensor:
    return library._fused_moe(*op_arguments(layer, inputs))


@pytest.mark.parametrize("tokens", [0, *WARM])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_from_python(
    layer: mm.MegaMoE, tokens: int, ids: torch.dtype, weights: torch.dtype
) -> None:
    inputs = inputs_of(layer, tokens, ids_dtype=ids, weights_dtype=weights)
    want = in_python(layer, inputs)
    before, count = launches(layer.context), int(layer.launch_count)
    for given in (inputs, strided(inputs)):
        for valid in (None, tokens // 2):
            y = layer(*given, num_valid=valid)
            assert_same(y[:valid], want[:valid])
            assert y.is_contiguous() and not bool(y[tokens if valid is None else valid :].any())
    assert launches(layer.context) == before + 4 and int(layer.launch_count) == count + 4


def test_a_first_launch_is_pythons(layer: mm.MegaMoE) -> None:
    inputs, before = inputs_of(layer, 77), launches(layer.context)
    first = layer(*inputs)
    assert launches(layer.context) == before
    assert_same(layer(*inputs), first)
    assert launches(layer.context) == before + 1


def test_capture_needs_a_warm_count_and_takes_the_fast_path(layer: mm.MegaMoE) -> None:
    cold, warm = inputs_of(layer, 211), inputs_of(layer, 8)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with refuses(mm.NotWarmedUp, "211"), torch.cuda.graph(graph, stream=stream):
        layer(*cold)
    torch.cuda.synchronize()
    want, before = layer(*warm), launches(layer.context)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(*warm)
    assert launches(layer.context) == before + 1
    graph.replay()
    assert_same(y, want)
    with refuses(mm.NotWarmedUp, "211"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        layer(*cold)
    torch.cuda.synchronize()
    assert_same(layer(*warm), want)


def test_launches_on_the_current_stream(layer: mm.MegaMoE) -> None:
    """Behind slow work on a side stream that makes the inputs."""
    x, ids, weights = inputs_of(layer, 32)
    want, stream = layer(x, ids, weights), torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        y = layer(late, ids, weights)
    assert not stream.query()
    stream.synchronize()
    assert_same(y, want)


def test_refused_calls_have_pythons_words(layer: mm.MegaMoE) -> None:
    inputs = inputs_of(layer, 3)
    before, count = launches(layer.context), int(layer.launch_count)
    for what, call in wrong_calls(layer, inputs).items():
        got = outcome(lambda call=call: fused_moe(*call))
        assert got and got == outcome(lambda call=call: library._fused_moe(*call)), what
    assert (launches(layer.context), int(layer.launch_count)) == (before, count)
    layer(*inputs)
    assert launches(layer.context) == before + 1


def test_an_error_of_the_mega_kernel_has_its_text(layer: mm.MegaMoE) -> None:
    """Its own host check: weights of the right shape that are not contiguous."""
    inputs = inputs_of(layer, 3)
    want = layer(*inputs)
    arguments = list(op_arguments(layer, inputs))
    wide = layer.w13.view(torch.uint8).repeat(1, 1, 2).view(torch.float8_e4m3fn)
    arguments[3] = wide[:, :, : layer.w13.shape[2]]
    with refuses(RuntimeError, "mega kernel launch", "stride"):
        fused_moe(*arguments)
    assert "stride" in outcome(lambda: library._fused_moe(*arguments))
    assert_same(layer(*inputs), want)


def test_opcheck(layer: mm.MegaMoE) -> None:
    for tokens in (0, 3):
        inputs = inputs_of(layer, tokens)
        for test in ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
            opcheck(fused_moe, op_arguments(layer, inputs), test_utils=test)
        opcheck(fused_moe, op_arguments(layer, inputs, as_bytes=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_take_the_fast_path(layer: mm.MegaMoE, mode: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, mode=mode)
    with torch.no_grad():
        for tokens in (8, 32, 1, 128, 8):
            inputs, before = inputs_of(layer, tokens), launches(layer.context)
            assert_same(compiled(*inputs).clone(), layer(*inputs))
            least = 2 if mode == "default" else 1  # a replayed graph launches nothing here
            assert launches(layer.context) >= before + least


def test_inference_mode_and_new_memory(layer: mm.MegaMoE) -> None:
    inputs = inputs_of(layer, 8)
    with torch.inference_mode():
        first, second = layer(*inputs), layer(*inputs)
    assert first.is_inference() and first.data_ptr() != second.data_ptr()
    assert_same(first, second)
    for _ in range(5):
        layer(*inputs)
    level = torch.cuda.memory_allocated()
    for _ in range(1000):
        layer(*inputs)
    assert torch.cuda.memory_allocated() == level


def test_a_closed_context_is_refused() -> None:
    with mm.MegaMoEContext(make_config(**SHAPE), device="cuda") as context:
        layer = make_layer(context)
        inputs = inputs_of(layer, 8)
        layer(*inputs), layer(*inputs)
        native = native_of(context)
        if native is None:
            pytest.skip("this wheel's binding has no C interface")
        assert native.launches == 1
        arguments = op_arguments(layer, inputs)
    assert native.launches == -1
    gc.collect()
    with refuses(mm.ContextClosed):
        fused_moe(*arguments)


def test_an_sm_budget_stays_in_python(layer: mm.MegaMoE) -> None:
    with mm.MegaMoEContext(make_config(**SHAPE), device="cuda", num_sms=64) as small:
        assert native_of(small) is None
        other = make_layer(small)
        inputs = inputs_of(other, 8)
        other(*inputs)
        assert_same(other(*inputs), in_python(other, inputs))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device_is_refused(layer: mm.MegaMoE) -> None:
    inputs = inputs_of(layer, 8)
    with torch.cuda.device(1), refuses(mm.MegaMoEError, "current CUDA device"):
        layer(*inputs)
