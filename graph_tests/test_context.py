"""The context: which backend and why, its life, and what two of them don't share."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_same,
    make_config,
    make_layer,
    no_launch,
    op_arguments,
    oracle,
    random_checkpoint,
    random_inputs,
    refuses,
)

import megamoe_compile as mm
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops import library

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# -- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backend_and_reason_on_a_cpu(backend: Any) -> None:
    with mm.MegaMoEContext(make_config(backend=backend), device="cpu") as context:
        assert context.backend == "reference"
        assert ("CPU" if backend == "auto" else "asked for") in context.reason
        assert (context.rank, context.world_size) == (0, 1)
        assert context.device == torch.device("cpu")


@pytest.mark.parametrize("backend", ["deep_gemm", "triton"])
def test_a_gpu_backend_is_refused_on_a_cpu(backend: Any) -> None:
    config = make_config(backend=backend)
    verdict = mm.probe(config, "cpu")
    assert verdict.backend is None
    for words in (backend, "cpu", "device='cuda'", "backend='reference'"):
        assert words in verdict.reason
    with pytest.raises(mm.BackendUnavailable, match="needs a CUDA device"):
        mm.MegaMoEContext(config, device="cpu")


@pytest.mark.parametrize("device", ["meta", "xpu", "mps", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    verdict = mm.probe(make_config(), device)
    assert verdict.backend is None
    assert device in verdict.reason
    with pytest.raises(mm.BackendUnavailable):
        mm.MegaMoEContext(make_config(), device=device)


def test_the_reference_needs_a_device_with_data() -> None:
    verdict = mm.probe(make_config(backend="reference"), "meta")
    assert verdict.backend is None
    assert "meta" in verdict.reason


@pytest.mark.parametrize("config", [make_config(), None, "auto", 3, object()], ids=type)
def test_probe_never_raises(config: Any) -> None:
    for device in ("", "gpu", "cpu:x", None, 1.5, object(), [], b"cpu", -3, 10**9):
        verdict = mm.probe(config, device)  # type: ignore[arg-type]
        assert isinstance(verdict, mm.Capability)
        assert isinstance(verdict.reason, str) and verdict.reason
        assert verdict.backend in (None, "reference", "deep_gemm", "triton")


@pytest.mark.parametrize("config", [None, "auto", 3])
def test_probe_of_a_config_that_is_none_says_so(config: Any) -> None:
    verdict = mm.probe(config, "cpu")
    assert verdict.backend is None
    assert "MegaMoEConfig" in verdict.reason


def test_probe_never_raises_whatever_fails_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("driver gone")

    monkeypatch.setattr("megamoe_compile.backends.capability._decide", broken)
    verdict = mm.probe(make_config(), "cpu")
    assert verdict.backend is None
    assert "driver gone" in verdict.reason


def test_details_name_what_was_looked_at() -> None:
    details = mm.probe(make_config(), "cpu").details
    assert details["torch"] == torch.__version__
    assert details["device"] == "cpu"
    assert details["requested"] == "auto"


# -- closing --------------------------------------------------------------------------------------


def users_of(context: mm.MegaMoEContext) -> dict[str, Callable[[], Any]]:
    """Every way to the kernel, each used once while the context was open."""
    layer, inputs = make_layer(context), random_inputs(context.config, 3)
    named = dict(zip(("hidden_states", "topk_ids", "topk_weights"), inputs, strict=True))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inductor = torch.compile(layer, fullgraph=True)
    runner = mm.GraphRunner(layer, named, [4], context)
    runner.capture()
    arguments = op_arguments(layer, inputs)
    users: dict[str, Callable[[], Any]] = {
        "eager": lambda: layer(*inputs),
        "op": lambda: library.fused_moe(*arguments),
        "compiled": lambda: compiled(*inputs),
        "inductor": lambda: inductor(*inputs),
        "runner": lambda: runner(num_tokens=3, **named),
    }
    with torch.no_grad():
        for use in users.values():
            use()
    # Compiling, capturing and construction after close() raise too.
    users["capture"] = runner.capture
    users["new layer"] = lambda: mm.MegaMoE(context)
    users["warmup"] = lambda: context.warmup([1])
    users["load_weights"] = lambda: layer.load_weights(*random_checkpoint(context.config))
    users["invalid_id_count"] = lambda: context.invalid_id_count
    users["with"] = context.__enter__
    users["late compile"] = lambda: torch.compile(
        lambda *a: layer(*a), fullgraph=True, backend="aot_eager"
    )(*inputs)
    return users


def test_a_closed_context_raises_everywhere(context: mm.MegaMoEContext) -> None:
    users = users_of(context)
    context.close()
    assert context.closed
    with torch.no_grad():
        for name, use in users.items():
            with no_launch(context), pytest.raises(mm.MegaMoEError) as caught:
                use()
            assert isinstance(caught.value, mm.ContextClosed), name
            assert "expected" in str(caught.value) and "got" in str(caught.value), name


def test_close_is_idempotent(context: mm.MegaMoEContext) -> None:
    assert not context.closed
    context.close()
    context.close()
    assert context.closed
    with refuses(mm.ContextClosed, "Build a new MegaMoEContext"):
        context.check_open()


def test_with_closes_also_after_an_error() -> None:
    with pytest.raises(KeyError), mm.MegaMoEContext(make_config(), device="cpu") as context:
        raise KeyError("the user's own")
    assert context.closed


def test_a_context_that_is_dropped_is_closed() -> None:
    """A graph may outlive it: the op then raises, and touches no freed memory."""
    context = mm.MegaMoEContext(make_config(), device="cpu")
    layer = make_layer(context)
    arguments = op_arguments(layer, random_inputs(context.config, 2))
    library.fused_moe(*arguments)
    del layer, context
    gc.collect()
    with refuses(mm.ContextClosed, "Keep the context alive"):
        library.fused_moe(*arguments)


def test_s57_create_and_close_leaks_nothing() -> None:
    inputs = random_inputs(make_config(), 3)
    ids, alive, results = [], [], []
    for _ in range(5):
        with mm.MegaMoEContext(make_config(), device="cpu") as context:
            layer = make_layer(context)
            runner = mm.GraphRunner(
                layer,
                dict(zip(("hidden_states", "topk_ids", "topk_weights"), inputs, strict=True)),
                [4],
                context,
            )
            runner.capture()
            results.append(layer(*inputs))
            alive += [weakref.ref(o) for o in (context, context._runtime, layer, runner, layer.w13)]
            ids.append(context.context_id)
        runtime = alive[1 + 5 * (len(ids) - 1)]
        assert runtime() is None, "close() frees the buffer, even while layers live"
        del context, layer, runner
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []
    assert len(set(ids)) == 5, "an id is never used again: an old graph must not find a stranger"
    for result in results:
        assert_same(result, results[0])


def test_s57_a_failing_construction_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = len(library._RUNTIMES)
    with pytest.raises(mm.BackendUnavailable):
        mm.MegaMoEContext(make_config(backend="triton"), device="cpu")
    assert len(library._RUNTIMES) == entries


def test_s58_a_thousand_token_counts_use_one_buffer(context: mm.MegaMoEContext) -> None:
    layer = make_layer(context)
    runtime, size, entries = context._runtime, context.buffer_bytes, len(library._RUNTIMES)
    config = context.config
    for step in range(1000):
        layer(*random_inputs(config, step * 7 % (config.max_tokens_per_rank + 1) // 8, seed=step))
    assert context._runtime is runtime
    assert (context.buffer_bytes, len(library._RUNTIMES)) == (size, entries)


# -- state ----------------------------------------------------------------------------------------


def test_layers_share_the_counter_and_the_mask(context: mm.MegaMoEContext) -> None:
    layers = [make_layer(context, seed=n) for n in range(3)]
    assert context.layers == layers
    assert [layer.index for layer in layers] == [0, 1, 2]
    for layer in layers:
        assert layer.launch_count is context.launch_count
        assert layer.num_valid is context.num_valid
        assert {"launch_count", "num_valid"} <= dict(layer.named_buffers()).keys()
    assert int(context.num_valid) == ALL_VALID
    context.num_valid.fill_(2)
    inputs = random_inputs(context.config, 4)
    for layer in layers:
        assert layer(*inputs).any(dim=1).tolist() == [True, True, False, False]
    layers.pop(1)
    del layer
    gc.collect()
    assert context.layers == layers
    assert make_layer(context).index == 3


def test_s42_s57_two_live_contexts_share_nothing() -> None:
    """Target with 64 rows and draft with 32, one geometry, alternating in one step."""
    target = mm.MegaMoEContext(make_config(), device="cpu")
    draft = mm.MegaMoEContext(make_config(max_tokens_per_rank=32), device="cpu")
    layers = [make_layer(target), make_layer(draft, seed=1)]
    expected = [make_layer(mm.MegaMoEContext(make_config(), device="cpu"), seed=n) for n in (0, 1)]
    assert target.context_id != draft.context_id
    assert target.launch_count.data_ptr() != draft.launch_count.data_ptr()
    target.num_valid.fill_(1)
    for step in range(1, 4):
        inputs = random_inputs(target.config, 5, seed=step)
        assert layers[0](*inputs).any(dim=1).tolist() == [True] + 4 * [False]
        assert_same(layers[1](*inputs), expected[1](*inputs))
        assert int(target.launch_count) == int(draft.launch_count) == step
    x, ids, weights = random_inputs(target.config, 33)
    layers[0](x, ids, weights)
    with refuses(mm.CapacityError, "at most 32", "33"):
        layers[1](x, ids, weights)
    ids[0, 0] = 77
    layers[0](x, ids, weights)
    assert (target.invalid_id_count, draft.invalid_id_count) == (1, 0)
    target.close()
    assert_same(layers[1](*inputs), expected[1](*inputs))
    draft.close()


def test_s03_steps_on_one_context_equal_fresh_ones(context: mm.MegaMoEContext) -> None:
    """128, 0, 1, 128 other tokens: no step sees what the last one left."""
    layer = make_layer(context)
    for step, tokens in enumerate((64, 0, 1, 64, 3, 0, 64)):
        inputs = random_inputs(context.config, tokens, seed=step)
        with mm.MegaMoEContext(context.config, device="cpu") as fresh:
            assert_same(layer(*inputs), make_layer(fresh)(*inputs), f"step {step}")


def test_s07_above_capacity_and_the_buffer_is_still_good() -> None:
    with mm.MegaMoEContext(make_config(max_tokens_per_rank=32), device="cpu") as context:
        layer = make_layer(context)
        good = random_inputs(context.config, 32)
        expected = layer(*good)
        for tokens in (33, 477):
            with no_launch(context), refuses(mm.CapacityError, "at most 32", str(tokens)):
                layer(*random_inputs(context.config, tokens))
        assert_same(layer(*good), expected)
        assert issubclass(mm.CapacityError, ValueError)


def test_errors_have_one_base() -> None:
    for error in (mm.BackendUnavailable, mm.CapacityError, mm.NotWarmedUp, mm.ContextClosed):
        assert issubclass(error, mm.MegaMoEError)


@pytest.mark.parametrize("made_in,used_in", [("inference", "no_grad"), ("no_grad", "inference")])
def test_s72_made_in_one_mode_and_used_in_the_other(made_in: str, used_in: str) -> None:
    modes: dict[str, Callable[[], Any]] = {
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
    }
    with modes[made_in]():
        context = mm.MegaMoEContext(make_config(), device="cpu")
        layer = make_layer(context)
        inputs = random_inputs(context.config, 3)
        expected = layer(*inputs)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for mode in (used_in, made_in):
        with modes[mode]():
            for call in (layer, compiled):
                assert_same(call(*inputs), expected)
            context.num_valid.fill_(ALL_VALID)
    assert_same(expected, oracle(layer, inputs))
    assert int(context.launch_count) == 5
    context.close()


def test_warmup_is_refused_above_capacity(context: mm.MegaMoEContext) -> None:
    context.warmup([1, 64])
    with refuses(mm.CapacityError, "at most 64", "65"):
        context.warmup([1, 65])


def test_reset_starts_the_step_state_anew(context: mm.MegaMoEContext) -> None:
    layer, inputs = make_layer(context), random_inputs(context.config, 3)
    expected = layer(*inputs)
    context.num_valid.fill_(1)
    counter = context.launch_count.data_ptr()
    context.reset()
    assert (int(context.launch_count), int(context.num_valid)) == (0, ALL_VALID)
    assert context.launch_count.data_ptr() == counter
    assert_same(layer(*inputs), expected)


def test_the_context_is_not_copied(context: mm.MegaMoEContext) -> None:
    """A copy would hold a counter and a mask that the kernel never sees."""
    layer = make_layer(context)
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with refuses(mm.MegaMoEError, "MegaMoEContext"):
            attempt(context)
    with refuses(mm.MegaMoEError, "MegaMoEContext"):
        copy.deepcopy(layer)
