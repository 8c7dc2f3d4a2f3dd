"""backend="auto" on one SM90 GPU: both paths, timed at warm-up, the faster one per bucket.

The compiled kernels stay in the user's cache; measured paths go to a folder of each test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    GPU_SHAPE,
    Inputs,
    assert_close,
    assert_same,
    make_config,
    make_layer,
    named,
    op_arguments,
    oracle,
    random_inputs,
    refuses,
)

import megamoe_compile as mm
from megamoe_compile.backends import paths
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops.cuda import timing as graph_timing
from megamoe_compile.custom_ops.library import fused_moe
from megamoe_compile.custom_ops.paths.choice import faster
from megamoe_compile.custom_ops.small_batch.kernel import INTERMEDIATE_GROUP

PATHS = ("deep_gemm", "small_batch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128]


class CountedTimer:
    """The real timer, counted. With `swap` the paths get each other's time."""

    def __init__(self) -> None:
        self.calls = 0
        self.swap = False

    def __call__(self, variants: Mapping[Any, Any]) -> dict[Any, float]:
        self.calls += 1
        times = TIME_IN_TURN(variants)
        return dict(zip(times, reversed(times.values()), strict=True)) if self.swap else times


TIME_IN_TURN = graph_timing.time_in_turn


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CountedTimer:
    counted = CountedTimer()
    monkeypatch.setattr(graph_timing, "time_in_turn", counted)
    monkeypatch.setattr(paths, "default_cache_dir", lambda: tmp_path)
    return counted


def make_context(paths: Any = None, **changes: Any) -> mm.MegaMoEContext:
    return mm.MegaMoEContext(make_config(**{**GPU_SHAPE, **changes}), device="cuda", paths=paths)


def need_two_paths(context: mm.MegaMoEContext) -> mm.MegaMoEContext:
    if "warm-up picks" not in context.reason:
        pytest.skip(context.reason)
    return context


def inputs_of(layer: mm.MegaMoE, tokens: int, seed: int = 0) -> Inputs:
    return random_inputs(layer.context.config, tokens, seed=seed, device="cuda")


def recipe(layer: mm.MegaMoE, inputs: Inputs, **options: Any) -> torch.Tensor:
    """The oracle of the path that this number of tokens takes."""
    runtime: Any = layer.context._runtime
    small = layer.context.backend_for(inputs[0].shape[0]) == "small_batch"
    group = INTERMEDIATE_GROUP if small else runtime._base.intermediate_group
    return oracle(layer, inputs, intermediate_group=group, **options)


def bound(tokens: int) -> float:
    return 0.03 if tokens < 8 else 0.02


@pytest.fixture(params=[False, True], ids=["faster", "slower"])
def chosen(request: pytest.FixtureRequest, timer: CountedTimer) -> Iterator[list[mm.MegaMoE]]:
    """Four layers, warm; once with the measured choice and once with its opposite.

    So every bucket that the small-batch kernel takes runs on both paths.
    """
    timer.swap = request.param
    with need_two_paths(make_context()) as context:
        layers = [make_layer(context, seed=seed) for seed in range(4)]
        context.warmup(BUCKETS)
        yield layers


def test_every_bucket_is_right_eager_compiled_and_captured(chosen: list[mm.MegaMoE]) -> None:
    layer, context = chosen[0], chosen[0].context
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    runner = mm.GraphRunner(compiled, named(inputs_of(layer, 1)), BUCKETS, context)
    runner.capture()
    with torch.no_grad():
        for tokens in (*BUCKETS, 3, 5, 20, 100, 0):
            inputs = inputs_of(layer, tokens, seed=tokens)
            eager = layer(*inputs)
            if tokens:
                assert_close(eager, recipe(layer, inputs), bound(tokens), f"{tokens} tokens")
            assert_same(compiled(*inputs), eager, f"compiled, {tokens} tokens")
            replayed = runner(num_tokens=tokens, **named(inputs))
            assert replayed.shape == eager.shape
            if tokens in BUCKETS:
                assert_same(replayed, eager, f"replay of {tokens}")
            elif tokens:
                assert_close(replayed, eager, 0.03, f"{tokens} tokens, padded")


def test_the_summary_shows_path_and_both_times(chosen: list[mm.MegaMoE]) -> None:
    layer, context = chosen[0], chosen[0].context
    runner = mm.GraphRunner(layer, named(inputs_of(layer, 1)), BUCKETS, context)
    runner.capture()
    most = context._runtime._small.max_tokens  # type: ignore[union-attr]
    assert any(bucket <= most for bucket in BUCKETS)
    for row in runner.summary():
        print(row.bucket, row.decision)
        assert row.decision is not None and row.backend == row.decision.path
        assert row.backend == context.backend_for(row.bucket)
        if row.bucket <= most:
            times = row.decision.microseconds
            assert set(times) == set(PATHS) and all(1 < us < 10_000 for us in times.values())
            assert row.backend == faster(times) and row.decision.reason == "measured"
        else:
            assert row.backend == "deep_gemm" and str(most) in row.decision.reason


def test_special_rows_masks_and_ids_are_alike_on_both_paths(timer: CountedTimer) -> None:
    results = []
    for path in PATHS:
        with need_two_paths(make_context(paths={8: path})) as context:
            layer = make_layer(context)
            context.warmup([8])
            assert context.backend_for(8) == path
            x, ids, scores = inputs_of(layer, 8)
            x[2, 7], x[3, 9] = float("nan"), float("inf")
            ids[4, 0], ids[5, 1], ids[6] = 16, -7, -1
            y = layer(x, ids, scores, num_valid=7)
            count = context.invalid_id_count
            assert [bool(row.isfinite().all()) for row in y] == [1, 1, 0, 0, 1, 1, 1, 1]
            assert not bool(y[6:].any()), "no expert, and beyond num_valid"
            assert layer(x[:0], ids[:0], scores[:0]).shape == (0, 512)
            good = torch.tensor([0, 1, 4, 5], device="cuda")
            results.append((y[good], count, int(context.launch_count)))
    (mega, *counts), (small, *others) = results
    assert counts == others
    assert_close(small, mega, 0.03)
    assert timer.calls == 0, "pinned"


def test_a_second_context_reads_the_choice_and_does_not_measure(timer: CountedTimer) -> None:
    with need_two_paths(make_context()) as first:
        layer = make_layer(first)
        first.warmup(BUCKETS)
        most = first._runtime._small.max_tokens  # type: ignore[union-attr]
        assert timer.calls == sum(bucket <= most for bucket in BUCKETS) > 0
        taken = [first.backend_for(tokens) for tokens in range(385)]
        decision = first.decision_for(1)
    measured = timer.calls
    with make_context() as second:
        layer = make_layer(second)
        second.warmup(BUCKETS)
        assert timer.calls == measured
        assert [second.backend_for(tokens) for tokens in range(385)] == taken
        again = second.decision_for(1)
        assert again is not None and decision is not None and again.reason == "stored"
        assert again.microseconds == decision.microseconds
        inputs = inputs_of(layer, 8)
        assert_close(layer(*inputs), recipe(layer, inputs), bound(8))
    with make_context(top_k=3) as other:
        layer = make_layer(other)
        other.warmup([1])
        assert timer.calls == measured + 1 and layer.loaded


def test_measuring_takes_less_than_a_second_per_bucket_and_leaves_no_trace(
    timer: CountedTimer,
) -> None:
    with need_two_paths(make_context()) as context:
        layers = [make_layer(context, seed=seed) for seed in range(2)]
        runtime: Any = context._runtime
        runtime.warmup(BUCKETS, context._any_weights, context.launch_count)
        torch.cuda.synchronize()
        state, level = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
        count, start = int(context.launch_count), time.perf_counter()
        context.warmup(BUCKETS)
        seconds = time.perf_counter() - start
        assert seconds < len(BUCKETS), seconds
        assert torch.equal(torch.cuda.get_rng_state(), state)
        # A process's first capture keeps a few bytes for the generator.
        assert torch.cuda.memory_allocated() < level + 2**16
        assert int(context.launch_count) > count and int(context.num_valid) == ALL_VALID
        assert context.invalid_id_count == 0 and layers[0].loaded
        print(f"{seconds / timer.calls:.3f} s per bucket")


def test_warm_up_inside_a_capture_is_refused(timer: CountedTimer) -> None:
    with need_two_paths(make_context()) as context:
        layer = make_layer(context)
        context.warmup([1])
        inputs, stream = inputs_of(layer, 1), torch.cuda.Stream()
        want, graph = layer(*inputs), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            with refuses(mm.MegaMoEError, "warmup", "outside of captures"):
                context.warmup([2])
            y = layer(*inputs)
        graph.replay()
        assert_same(y, want)


def test_a_cold_capture_is_refused_on_either_path(chosen: list[mm.MegaMoE]) -> None:
    layer = chosen[0]
    for tokens in (3, 100):
        inputs, stream = inputs_of(layer, tokens), torch.cuda.Stream()
        with (
            refuses(mm.NotWarmedUp, f"{tokens} tokens"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        ):
            layer(*inputs)
        torch.cuda.synchronize()
        assert_close(layer(*inputs), recipe(layer, inputs), bound(tokens))


def test_cpp_takes_what_the_mega_kernel_takes_and_nothing_else(chosen: list[mm.MegaMoE]) -> None:
    layer, context = chosen[0], chosen[0].context
    native = context._runtime.native  # type: ignore[union-attr]
    if native is None:
        pytest.skip("this wheel's binding has no C interface")
    for tokens in (*BUCKETS, 3, 3, 200, 200):
        inputs, before = inputs_of(layer, tokens), native.launches
        layer(*inputs)
        by_cpp = native.launches - before
        assert by_cpp <= (context.backend_for(tokens) == "deep_gemm"), tokens
        if tokens in BUCKETS:
            assert by_cpp == (context.backend_for(tokens) == "deep_gemm"), tokens


def test_launches_on_the_current_stream_and_no_synchronization(chosen: list[mm.MegaMoE]) -> None:
    """Behind slow work on a side stream that makes the inputs."""
    layer = chosen[0]
    for tokens in (1, 32):
        x, ids, weights = inputs_of(layer, tokens)
        want, stream, late = layer(x, ids, weights), torch.cuda.Stream(), torch.zeros_like(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late.copy_(x)
                y = layer(late, ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query()
        stream.synchronize()
        assert_same(y, want)


def test_opcheck_and_reduce_overhead(chosen: list[mm.MegaMoE]) -> None:
    layer = chosen[0]
    for tokens in (0, 1, 64):
        torch.library.opcheck(
            fused_moe, op_arguments(layer, inputs_of(layer, tokens), as_bytes=True)
        )
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, mode="reduce-overhead")
    with torch.no_grad():
        for tokens in (8, 32, 1, 128, 8, 8):
            inputs = inputs_of(layer, tokens)
            assert_same(compiled(*inputs).clone(), layer(*inputs), f"{tokens} tokens")


def test_random_buckets_on_four_layers_with_eager_calls_between(chosen: list[mm.MegaMoE]) -> None:
    """Both kernels in one stream, in any order: neither disturbs the other."""

    def step(hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        for layer in chosen:
            hidden_states = hidden_states + layer(hidden_states, topk_ids, topk_weights)
        return hidden_states

    context = chosen[0].context
    runner = mm.GraphRunner(step, named(inputs_of(chosen[0], 1)), BUCKETS, context)
    runner.capture()
    batches = {tokens: named(inputs_of(chosen[0], tokens, seed=7)) for tokens in BUCKETS}
    with torch.no_grad():
        wants = {tokens: step(**batch) for tokens, batch in batches.items()}
        choice, count = random.Random(0), int(context.launch_count)
        for turn in range(300):
            tokens = choice.choice(BUCKETS)
            y = runner(num_tokens=tokens, **batches[tokens])
            assert torch.equal(y, wants[tokens]), (turn, tokens)
            if turn % 10 == 0:
                assert torch.equal(step(**batches[tokens]), wants[tokens]), (turn, tokens)
        assert int(context.launch_count) == count + 4 * (300 + 30)


def test_the_timer_measures_what_the_gpu_does() -> None:
    times = TIME_IN_TURN(
        {
            "one": [lambda: torch.cuda._sleep(100_000)] * 4,
            "three": [lambda: torch.cuda._sleep(300_000)] * 2,
        }
    )
    assert 2.5 < times["three"] / times["one"] < 3.5, times
    assert 20 < times["one"] < 1000, times
