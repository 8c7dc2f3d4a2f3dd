"""Loads that are refused for their values, reloads in place, and loads that fail half-way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Checkpoint,
    PeakStorage,
    assert_same,
    make_config,
    make_layer,
    named,
    no_launch,
    random_checkpoint,
    random_inputs,
    refuses,
)
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile import weights as weights_module
from megamoe_compile.weights import WEIGHT_NAMES

ONE_EXPERT = 3 * 128 * 128  # bytes of a small FP8 expert, scales left out
NAN, INF = math.nan, math.inf


def storages(layer: mm.MegaMoE) -> list[int]:
    return [getattr(layer, name).data_ptr() for name in WEIGHT_NAMES]


def copies(layer: mm.MegaMoE) -> list[Tensor]:
    return [getattr(layer, name).clone() for name in WEIGHT_NAMES]


def assert_weights(layer: mm.MegaMoE, expected: list[Tensor]) -> None:
    for name, want in zip(WEIGHT_NAMES, expected, strict=True):
        assert_same(getattr(layer, name), want, name)


def prepared(context: mm.MegaMoEContext, checkpoint: Checkpoint) -> list[Tensor]:
    """What a fresh layer makes of it."""
    layer = mm.MegaMoE(context)
    layer.load_weights(*checkpoint.clone())
    return copies(layer)


# -- values ---------------------------------------------------------------------------------------


def loaders(context: mm.MegaMoEContext) -> list[Callable[[mm.MegaMoE, Checkpoint], None]]:
    """Load all, reload all, or load expert 2 alone."""
    return [
        lambda layer, made: layer.load_weights(*made),
        lambda layer, made: layer.reload_weights(*made),
        lambda layer, made: layer.load_expert(2, *made[2]),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, -1e-30])
@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_scales_that_are_no_scales_are_refused(
    context: mm.MegaMoEContext, name: str, value: float
) -> None:
    bad = random_checkpoint(context.config, seed=3)
    block = (1, 0) if name == "w13_scale" else (0, 0)
    getattr(bad, name)[(2, *block)] = value
    fresh, loaded = mm.MegaMoE(context), make_layer(context)
    before, kept = copies(loaded), bad.w13.clone()
    for load in loaders(context):
        with refuses(ValueError, name, "expert 2", f"block {list(block)}", "at least 0"):
            load(loaded, bad)
        assert_weights(loaded, before)
    for load in (loaders(context)[0], loaders(context)[2]):
        with refuses(ValueError, name):
            load(fresh, bad)
    assert not fresh.loaded
    assert_same(bad.w13, kept, "the checkpoint")


def test_an_e8m0_nan_is_refused(context: mm.MegaMoEContext) -> None:
    bad = random_checkpoint(context.config)
    assert bad.w13_scale is not None and bad.w2_scale is not None
    bad.w13_scale, bad.w2_scale = (
        t.to(torch.float8_e8m0fnu) for t in (bad.w13_scale, bad.w2_scale)
    )
    bad.w2_scale.view(torch.uint8)[3, 0, 0] = 255
    with refuses(ValueError, "w2_scale", "expert 3", "nan"):
        mm.MegaMoE(context).load_weights(*bad)


def test_a_scale_of_zero_is_that_of_a_block_of_zeros(context: mm.MegaMoEContext) -> None:
    checkpoint = random_checkpoint(context.config)
    assert checkpoint.w13_scale is not None
    checkpoint.w13_scale[1, 0, 0] = 0.0
    layer = mm.MegaMoE(context)
    layer.load_weights(*checkpoint)
    assert bool(layer(*random_inputs(context.config, 5)).isfinite().all())


def test_an_expert_of_another_rank_is_named_by_its_global_id() -> None:
    config = make_config()
    context = mm.MegaMoEContext(config, device="cpu")
    context.weight_geometry = weights_module.WeightGeometry.of(
        config, rank=1, ep_size=2, alignment=128, device=context.device
    )
    whole = random_checkpoint(config)
    assert whole.w13_scale is not None
    whole.w13_scale[3, 0, 0] = NAN
    for made in (whole, Checkpoint(*whole[2:4])):  # type: ignore[arg-type]
        with refuses(ValueError, "w13_scale of expert 3"):
            mm.MegaMoE(context).load_weights(*made.clone())


@pytest.mark.parametrize("name", ["w13_bias", "w2_bias"])
def test_biases_are_finite(context: mm.MegaMoEContext, name: str) -> None:
    geometry = dataclasses.replace(context.weight_geometry, expert_bias=True)
    biases = {"w13_bias": torch.zeros(4, 256), "w2_bias": torch.zeros(4, 128)}
    parts = [*random_checkpoint(context.config), *biases.values()]
    weights_module.check_checkpoint(geometry, (4,), *parts)  # type: ignore[arg-type]
    biases[name][1, 7] = INF
    with refuses(ValueError, f"{name} of expert 1"):
        weights_module.check_checkpoint(geometry, (4,), *parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_weights_are_finite_with_validate(context: mm.MegaMoEContext, name: str, fp8: bool) -> None:
    """e4m3 has no infinity, and two NaNs."""
    for value in (0x7F, 0xFF) if fp8 else (NAN, INF, -INF):
        bad = random_checkpoint(context.config, seed=3, fp8=fp8)
        weight = getattr(bad, name)
        (weight.view(torch.uint8) if fp8 else weight)[2, 5, 9] = value
        strict = make_layer(context, validate=True)
        before = copies(strict)
        for load in loaders(context):
            with refuses(ValueError, f"{name} of expert 2", "finite"):
                load(strict, bad)
        assert_weights(strict, before)
        good = random_checkpoint(context.config, seed=4, fp8=fp8)
        strict.load_weights(*good)


@pytest.mark.parametrize("experts", [4, 32])
def test_validate_takes_one_expert_of_memory(experts: int) -> None:
    with mm.MegaMoEContext(make_config(num_experts=experts), device="cpu") as context:
        layer = mm.MegaMoE(context, validate=True)
        checkpoint = random_checkpoint(context.config)
        with PeakStorage() as measure:
            layer.load_weights(*checkpoint)
        assert measure.peak <= 2 * ONE_EXPERT


def test_a_state_with_bad_scales_writes_nothing(context: mm.MegaMoEContext) -> None:
    state = make_layer(context, seed=4).state_dict()
    state["w2_scale"] = state["w2_scale"].clone()
    state["w2_scale"][1, 0, 0] = NAN
    loaded, fresh = make_layer(context), mm.MegaMoE(context)
    before = copies(loaded)
    for layer in (loaded, fresh):
        with refuses(ValueError, "w2_scale", "nan"):
            layer.load_state_dict(state)
    assert_weights(loaded, before)
    assert not fresh.loaded


# -- reloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_reload_is_a_load_in_place(context: mm.MegaMoEContext, fp8: bool) -> None:
    layer, new = make_layer(context), random_checkpoint(context.config, seed=5, fp8=fp8)
    inputs = random_inputs(context.config, 5)
    runner = mm.GraphRunner(layer, named(inputs), [1, 8], context)
    runner.capture(progress=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(*inputs)
    before, kept = storages(layer), new.clone()
    layer.reload_weights(*new)
    assert storages(layer) == before
    assert_weights(layer, prepared(context, kept))
    assert_same(new.w13, kept.w13, "the source")
    expected = layer(*inputs)
    assert_same(runner(num_tokens=5, **named(inputs)), expected)
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        assert_same(compiled(*inputs), expected)


@pytest.mark.parametrize("own_scales", [True, False])
def test_adopted_tensors_are_reloaded_in_place(
    context: mm.MegaMoEContext, own_scales: bool
) -> None:
    """New values in the checkpoint's layout are written where the adopted ones were."""
    layer, adopted = mm.MegaMoE(context), random_checkpoint(context.config)
    layer.load_weights(*adopted)
    before, inputs = storages(layer), random_inputs(context.config, 5)
    for seed in (5, 6):
        new = random_checkpoint(context.config, seed=seed)
        with torch.no_grad():
            for mine, value in zip(adopted, new, strict=True):
                assert mine is not None and value is not None
                mine.copy_(value)
        given = adopted.w13, new.w13_scale, adopted.w2, new.w2_scale
        layer.reload_weights(*(adopted if own_scales else given))
        assert storages(layer) == before
        assert_weights(layer, prepared(context, new))
        with refuses(ValueError, "own prepared storage", "reload_weights"):
            layer.load_weights(*adopted)
        fresh = mm.MegaMoE(context)
        fresh.load_weights(*new)
        assert_same(layer(*inputs), fresh(*inputs))


def test_a_slice_of_a_global_checkpoint_is_reloaded_in_place() -> None:
    config = make_config()
    context = mm.MegaMoEContext(config, device="cpu")
    context.weight_geometry = weights_module.WeightGeometry.of(
        config, rank=1, ep_size=2, alignment=128, device=context.device
    )
    layer, whole = mm.MegaMoE(context), random_checkpoint(config)
    layer.load_weights(*whole[2:4])  # type: ignore[arg-type]
    assert layer.w13.data_ptr() == whole.w13[2].data_ptr()
    for given in (slice(None), slice(2, 4)):
        new = random_checkpoint(config, seed=7 if given.start else 8)
        for mine, value in zip(whole, new, strict=True):
            assert mine is not None and value is not None
            mine.copy_(value)
        layer.reload_weights(*whole[given])  # type: ignore[arg-type]
        assert_weights(layer, prepared(context, Checkpoint(*new[2:4])))  # type: ignore[arg-type]
        assert_same(whole.w13[:2], new.w13[:2], "the other rank's experts")


def test_overlaps_elsewhere_are_refused(context: mm.MegaMoEContext) -> None:
    """Experts in another order, say: writing one would change another's source."""
    big = random_checkpoint(context.config, experts=5)
    layer = mm.MegaMoE(context)
    layer.load_weights(*big[:4])  # type: ignore[arg-type]
    before = copies(layer)
    assert big.w13_scale is not None and big.w2_scale is not None
    other = random_checkpoint(context.config, seed=1)
    w13, s13, w2, s2 = other
    for name, given in {
        "w13": (big.w13[1:], s13, w2, s2),
        "w13_scale": (w13, big.w13_scale[1:], w2, s2),
        "w2": (w13, s13, big.w2[1:], s2),
        "w2_scale": (w13, s13, w2, big.w2_scale[1:]),
    }.items():
        with refuses(ValueError, f"{name}: expected memory of its own"):
            layer.reload_weights(*given)
        assert_weights(layer, before)


@pytest.mark.parametrize("experts", [4, 32])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "own"])
def test_a_reload_takes_memory_for_one_expert(experts: int, kind: str) -> None:
    with mm.MegaMoEContext(make_config(num_experts=experts), device="cpu") as context:
        layer, adopted = mm.MegaMoE(context), random_checkpoint(context.config)
        layer.load_weights(*adopted)
        new = adopted if kind == "own" else random_checkpoint(context.config, fp8=kind == "fp8")
        with PeakStorage() as measure:
            layer.reload_weights(*new)
        assert 0 < measure.peak <= (10 if kind == "bf16" else 1) * ONE_EXPERT


def test_a_reload_of_nothing_is_refused(context: mm.MegaMoEContext) -> None:
    layer = mm.MegaMoE(context)
    with refuses(mm.MegaMoEError, "weights to replace", "load_weights"):
        layer.reload_weights(*random_checkpoint(context.config))
    assert not layer.loaded
    context.close()
    with refuses(mm.ContextClosed):
        layer.reload_weights(*random_checkpoint(context.config))


def test_a_refused_reload_writes_nothing(context: mm.MegaMoEContext) -> None:
    layer, new = make_layer(context), random_checkpoint(context.config, seed=5)
    before = copies(layer)
    with refuses(ValueError, "w2.shape"):
        layer.reload_weights(new.w13, new.w13_scale, new.w2[:3], new.w2_scale)
    assert_weights(layer, before)
    assert layer.loaded


@pytest.mark.parametrize("context", [{"num_shared_experts": 1}], indirect=True)
def test_shared_experts_stay(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    shared = layer.w13[4].clone()
    layer.reload_weights(*random_checkpoint(context.config, seed=5))
    assert_same(layer.w13[4], shared)


@pytest.mark.gpu
def test_captured_graphs_see_reloaded_weights() -> None:
    config = make_config(backend="triton")
    with mm.MegaMoEContext(config, device="cuda") as context:
        layer = mm.MegaMoE(context)
        adopted = Checkpoint(
            *(None if t is None else t.cuda() for t in random_checkpoint(config))  # type: ignore[arg-type]
        )
        layer.load_weights(*adopted)
        inputs = random_inputs(config, 5, device="cuda")
        runner = mm.GraphRunner(layer, named(inputs), [1, 8], context)
        runner.capture(progress=False)
        new = random_checkpoint(config, seed=5)
        for mine, value in zip(adopted, new, strict=True):
            assert mine is not None and value is not None
            mine.copy_(value)
        layer.reload_weights(*adopted)
        fresh = mm.MegaMoE(context)
        fresh.load_weights(*new)
        assert_same(runner(num_tokens=5, **named(inputs)), fresh(*inputs))


# -- loads that fail half-way ---------------------------------------------------------------------


def fail_at(patch: pytest.MonkeyPatch, call: int) -> None:
    """The call-th expert is half written when memory runs out."""
    write, calls = weights_module.write_expert, []

    def failing(prepared: Any, row: int, *rest: Any) -> None:
        calls.append(row)
        write(prepared, row, *rest)
        if len(calls) == call:
            prepared.w2[row].view(torch.uint8).zero_()
            raise MemoryError("no more")

    patch.setattr("megamoe_compile.loading.write_expert", failing)


def refuses_to_run(layer: mm.MegaMoE, ids: str, runner: mm.GraphRunner, compiled: Any) -> None:
    inputs = random_inputs(layer.context.config, 5)
    words = ("weights of the layer", f"experts {ids} are old, new or mixed", "reload_weights")
    with no_launch(layer.context), torch.no_grad():
        with refuses(mm.MegaMoEError, *words):
            layer(*inputs)
        with refuses(mm.MegaMoEError, "address of MegaMoE[0].w13", "none", "reload_weights"):
            runner(num_tokens=5, **named(inputs))
        with pytest.raises(Exception, match="old, new or mixed"):
            compiled(*inputs)
        with pytest.raises(Exception, match="old, new or mixed"):
            runner.capture(progress=False)
    assert not layer.loaded


@pytest.mark.parametrize("how", ["load_weights", "reload_weights"])
@pytest.mark.parametrize("call", [1, 3, 4])
def test_a_layer_that_is_half_written_refuses_to_run(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch, how: str, call: int
) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 5)
    runner = mm.GraphRunner(layer, named(inputs), [8], context)
    runner.capture(progress=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(*inputs)
    before, new = storages(layer), random_checkpoint(context.config, seed=5)
    with monkeypatch.context() as patch:
        fail_at(patch, call)
        with pytest.raises(MemoryError):
            getattr(layer, how)(*new)
    refuses_to_run(layer, "[0, 1, 2, 3]", runner, compiled)
    with refuses(ValueError, "w2.shape"):  # a refused load mends nothing
        layer.reload_weights(new.w13, new.w13_scale, new.w2[:3], new.w2_scale)
    assert not layer.loaded
    layer.reload_weights(*new)
    assert storages(layer) == before, "captured graphs are valid again"
    assert_weights(layer, prepared(context, new))
    expected = layer(*inputs)
    runner.capture(progress=False)
    assert_same(runner(num_tokens=5, **named(inputs)), expected)
    with torch.no_grad():
        assert_same(compiled(*inputs), expected)


def test_a_replay_is_valid_again_after_a_reload(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 5)
    runner = mm.GraphRunner(layer, named(inputs), [8], context)
    runner.capture(progress=False)
    new = random_checkpoint(context.config, seed=5)
    with monkeypatch.context() as patch:
        fail_at(patch, 2)
        with pytest.raises(MemoryError):
            layer.reload_weights(*new)
    with refuses(mm.MegaMoEError, "none"):
        runner(num_tokens=5, **named(inputs))
    layer.reload_weights(*new)
    assert_same(runner(num_tokens=5, **named(inputs)), layer(*inputs))


def test_a_half_written_layer_is_mended_expert_by_expert(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, new = make_layer(context), random_checkpoint(context.config, seed=5)
    inputs = random_inputs(context.config, 5)
    with monkeypatch.context() as patch:
        fail_at(patch, 1)
        with pytest.raises(MemoryError):
            layer.load_expert(2, *new[2])  # type: ignore[arg-type]
    with refuses(mm.MegaMoEError, "experts [2] are"):
        layer(*inputs)
    layer.load_expert(1, *new[1])  # type: ignore[arg-type]
    with refuses(mm.MegaMoEError, "experts [2] are"):
        layer(*inputs)
    layer.load_expert(2, *new[2])  # type: ignore[arg-type]
    layer.load_expert(0, *new[0])  # type: ignore[arg-type]
    layer.load_expert(3, *new[3])  # type: ignore[arg-type]
    assert_weights(layer, prepared(context, new))
    layer(*inputs)


def test_a_state_dict_mends_a_half_written_layer(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, good = make_layer(context), make_layer(context, seed=4)
    before = storages(layer)
    with monkeypatch.context() as patch:
        fail_at(patch, 2)
        with pytest.raises(MemoryError):
            layer.reload_weights(*random_checkpoint(context.config, seed=5))
    assert not any(name in layer.state_dict() for name in WEIGHT_NAMES), "nothing to save"
    layer.load_state_dict(good.state_dict())
    assert storages(layer) == before
    assert_weights(layer, copies(good))


def test_an_adoption_that_fails_gives_the_checkpoint_back(
    context: mm.MegaMoEContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the same tensors again must not rearrange some experts twice."""
    interleave, calls = weights_module.interleave_gate_up, []

    def failing(w13: Tensor) -> Tensor:
        calls.append(w13)
        if len(calls) == 3:
            raise MemoryError("no more")
        return interleave(w13)

    layer, checkpoint = mm.MegaMoE(context), random_checkpoint(context.config)
    kept = checkpoint.clone()
    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "interleave_gate_up", failing)
        with pytest.raises(MemoryError):
            layer.load_weights(*checkpoint)
    assert not layer.loaded
    assert_same(checkpoint.w13, kept.w13)
    layer.load_weights(*checkpoint)
    assert_weights(layer, prepared(context, kept))
