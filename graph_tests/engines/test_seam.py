"""What every engine's adapter gets from the seam: contexts, the warm-up moment, the real rows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import assert_same, make_config, no_launch, random_checkpoint, random_inputs, refuses
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.engines.seam import EngineContexts, EngineLayer

SHAPE = dict(hidden_size=128, intermediate_size=128, num_experts=4, top_k=2)
CPU = torch.device("cpu")


def engine_of(**options: Any) -> EngineContexts:
    return EngineContexts(**{"max_tokens_per_rank": 64, "backend": "reference", **options})


def layer_of(engine: EngineContexts, real_rows: Any = None, **shape: Any) -> EngineLayer:
    context = engine.context_for(engine.config(**{**SHAPE, **shape}), CPU)
    layer = EngineLayer(context, engine, real_rows)
    layer.load_weights(*random_checkpoint(context.config))
    return layer


@pytest.fixture
def warmups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[mm.MegaMoEContext, list[int]]]:
    """Every warm-up of a context, in order."""
    calls: list[tuple[mm.MegaMoEContext, list[int]]] = []
    original = mm.MegaMoEContext.warmup

    def warmup(context: mm.MegaMoEContext, buckets: Any) -> None:
        original(context, buckets)
        calls.append((context, list(buckets)))

    monkeypatch.setattr(mm.MegaMoEContext, "warmup", warmup)
    return calls


# -- contexts --------------------------------------------------------------------------------------


def test_one_context_per_geometry() -> None:
    engine = engine_of(swiglu_limit=7.0)
    first, equal, wide = (layer_of(engine, intermediate_size=i) for i in (128, 128, 256))
    assert first.context is equal.context
    assert wide.context is not first.context
    assert engine.contexts == [first.context, wide.context]
    for layer in (first, wide):
        assert layer.context.config.max_tokens_per_rank == 64
        assert layer.context.config.swiglu_limit == 7.0, "a change wins over the shape"
    engine.close()
    assert first.context.closed
    assert wide.context.closed
    assert engine.contexts == []
    engine.close()  # idempotent
    assert layer_of(engine).context is not first.context, "a closed one is not handed out"


def test_layers_own_the_context() -> None:
    engine = engine_of()
    layer = layer_of(engine)
    assert engine.contexts == [layer.context]
    del layer
    gc.collect()
    assert engine.contexts == []


# -- the warm-up moment ----------------------------------------------------------------------------


def test_the_first_call_warms_up_once(
    warmups: list[tuple[mm.MegaMoEContext, list[int]]],
) -> None:
    engine = engine_of(buckets=[1, 4])
    layers = [layer_of(engine), layer_of(engine), layer_of(engine, intermediate_size=256)]
    assert warmups == [], "not before all weights are loaded"
    inputs = random_inputs(layers[0].context.config, 4)
    for _ in range(2):
        for layer in layers:
            layer(*inputs)
    assert warmups == [(layers[0].context, [1, 4]), (layers[2].context, [1, 4])]


def test_no_buckets_no_warm_up(warmups: list[tuple[mm.MegaMoEContext, list[int]]]) -> None:
    layer = layer_of(engine_of())
    layer(*random_inputs(layer.context.config, 4))
    assert warmups == []


def test_a_traced_first_call_is_refused(
    warmups: list[tuple[mm.MegaMoEContext, list[int]]],
) -> None:
    layer = layer_of(engine_of(buckets=[4]))
    inputs = random_inputs(layer.context.config, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with no_launch(layer.context), pytest.raises(Exception, match="one eager step"):
        compiled(*inputs)
    assert warmups == []
    expected = layer(*inputs)
    assert len(warmups) == 1
    torch._dynamo.reset()
    assert_same(compiled(*inputs), expected, "compiled after the eager call")


def test_a_captured_first_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(engine_of(buckets=[4]))
    inputs = random_inputs(layer.context.config, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with no_launch(layer.context), refuses(mm.MegaMoEError, "CUDA graph capture", "eager step"):
            layer(*inputs)
    layer(*inputs)  # the refusal has not counted as the warm-up
    assert layer._cold is None


@pytest.mark.gpu
def test_a_first_call_inside_a_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    engine = EngineContexts(max_tokens_per_rank=64, buckets=[4], backend="triton")
    config = engine.config(**SHAPE)
    layer = EngineLayer(engine.context_for(config, device), engine)
    layer.load_weights(*random_checkpoint(config))
    inputs = random_inputs(config, 4, device="cuda")
    with (
        refuses(mm.MegaMoEError, "CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(*inputs)
    expected = layer(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*inputs)
    output.fill_(torch.nan)
    graph.replay()
    assert_same(output, expected, "replayed after the eager call")
    engine.close()


def test_a_bucket_above_the_capacity() -> None:
    layer = layer_of(engine_of(buckets=[65]))
    with refuses(mm.CapacityError, "at most 64", "[65]"):
        layer(*random_inputs(layer.context.config, 4))


# -- the real rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_real_rows_reach_the_layer(compiled: bool) -> None:
    """As an engine has them: the last entry of an int32 tensor that it writes before each step."""
    starts = torch.zeros(9, dtype=torch.int32)
    layer = layer_of(engine_of(), lambda: starts[-1:])
    plain = mm.MegaMoE(layer.context)
    plain.install(layer.prepared)
    call: Any = layer
    if compiled:
        call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for real in (8, 3, 0):
        x, ids, weights = random_inputs(make_config(), 8, seed=real)
        x[real:] = torch.nan  # what a padded batch holds is nobody's business
        starts.fill_(real)
        got = call(x, ids, weights)
        assert_same(got[:real], plain(x[:real], ids[:real], weights[:real]), "real rows")
        assert_same(got[real:], torch.zeros_like(got[real:]), "rows of the padding")


def test_without_a_number_of_its_own_the_contexts_holds() -> None:
    numbers: list[Tensor | None] = [None]
    layer = layer_of(engine_of(), lambda: numbers[0])
    inputs = random_inputs(layer.context.config, 4)
    whole = layer(*inputs)
    layer.context.num_valid.fill_(2)
    half = layer(*inputs)
    assert_same(half[:2], whole[:2], "rows below num_valid")
    assert not half[2:].any()
    numbers[0] = torch.tensor([4], dtype=torch.int32)
    assert_same(layer(*inputs), whole, "the engine's number")
    assert_same(layer(*inputs, num_valid=2), half, "the caller's number")
    numbers[0] = torch.tensor([4])
    with no_launch(layer.context), refuses(ValueError, "one int32", "torch.int64"):
        layer(*inputs)
