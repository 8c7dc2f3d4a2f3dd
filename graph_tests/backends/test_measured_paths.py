"""The measured choice between two paths, on a CPU: fakes compute, and times are injected."""

from __future__ import annotations

import gc
import inspect
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    SMALL,
    RankPool,
    assert_close,
    assert_one_sentence,
    assert_same,
    make_config,
    make_layer,
    named,
    no_launch,
    op_arguments,
    oracle,
    outcome,
    random_inputs,
    refuses,
)
from path_fakes import FakeSmallBatch, Machine, make_context, paths_of, stored_file

import megamoe_compile as mm
from megamoe_compile.commands.decode.report import BucketReport, DecodeReport, Parity
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops.cuda import stream as current_stream
from megamoe_compile.custom_ops.library import fused_moe
from megamoe_compile.custom_ops.paths import measured
from megamoe_compile.custom_ops.paths.choice import Decision, PathChoice, faster
from megamoe_compile.custom_ops.small_batch.kernel import SmallBatch

PATHS = ("deep_gemm", "small_batch")

SHAPE = make_config()


# -- the choice -----------------------------------------------------------------------------------


def test_before_warm_up_every_call_takes_the_mega_kernel(machine: Machine) -> None:
    with make_context() as context:
        layer = make_layer(context)
        for tokens in (0, 1, 8, 64):
            launched = machine.launches_of(lambda n=tokens: layer(*random_inputs(SHAPE, n)))
            assert launched == [("deep_gemm", tokens)]
            assert context.backend_for(tokens) == "deep_gemm"
            assert context.decision_for(tokens) is None
        assert machine.timed == []
        assert context.backend == "deep_gemm"
        assert context.reason == "an SM90 GPU; warm-up picks it or small_batch per bucket, by time"


def test_the_faster_path_per_bucket_and_the_next_bucket_for_counts_between(
    machine: Machine,
) -> None:
    with make_context() as context:
        layer = make_layer(context)
        context.warmup([1, 4, 8, 32])
        assert machine.timed == [1, 4, 8, 32]
        expected = {0: "s", 1: "s", 2: "s", 3: "s", 4: "s", 5: "d", 8: "d", 9: "d", 33: "d"}
        for tokens, letter in {**expected, 64: "d"}.items():
            launched = machine.launches_of(lambda n=tokens: layer(*random_inputs(SHAPE, n)))
            assert [path[0] for path, rows in launched if rows == tokens] == [letter], tokens
            assert paths_of(context, tokens) == letter
            assert context.intermediate_group_for(tokens) == (64 if letter == "s" else 128)
        decision = context.decision_for(3)
        assert decision == Decision(
            4, "small_batch", "measured", {"deep_gemm": 100.0, "small_batch": 90.0}
        )
        assert str(decision) == "small_batch (measured: deep_gemm 100.0 us, small_batch 90.0 us)"
        assert context.decision_for(33) is None


def test_a_slow_bucket_below_a_fast_one(machine: Machine) -> None:
    machine.times = {2: (10, 20), 8: (20, 10), 16: (10, 20)}
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([8, 2, 16])
        assert paths_of(context, *range(18)) == "ddd" + "ssssss" + "d" * 9


@pytest.mark.parametrize(
    ("small", "winner"),
    [(98.9, "small_batch"), (99.0, "deep_gemm"), (99.5, "deep_gemm"), (101.0, "deep_gemm")],
)
def test_a_tie_within_one_percent_goes_to_the_mega_kernel(small: float, winner: str) -> None:
    assert faster({"deep_gemm": 100.0, "small_batch": small}) == winner


def test_what_the_small_kernel_cannot_take_is_not_timed(machine: Machine) -> None:
    machine.max_tokens = 4
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([4, 8])
        assert machine.timed == [4]
        assert ("small_batch", 8) not in machine.launched
        decision = context.decision_for(8)
        assert decision is not None and decision.path == "deep_gemm"
        assert decision.reason == "small_batch takes at most 4 tokens"
        assert decision.microseconds == {}


def test_a_bucket_is_decided_once(machine: Machine) -> None:
    """Graphs that are captured keep their path, so eager calls do too."""
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1, 8])
        machine.times = dict.fromkeys(machine.times, (2.0, 1.0))
        context.warmup([1, 4, 8])
        assert machine.timed == [1, 8, 4]
        assert paths_of(context, 1, 4, 8) == "ssd"


def test_both_paths_are_warmed_for_every_bucket(machine: Machine) -> None:
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1, 4, 8])
        for path in ("deep_gemm", "small_batch"):
            assert {rows for name, rows in machine.launched if name == path} >= {0, 1, 4, 8}


def test_nothing_is_timed_without_loaded_weights(machine: Machine) -> None:
    """Zeros would time faster than what the layers will hold."""
    with make_context() as context:
        context.warmup([1])
        assert machine.timed == [] and paths_of(context, 1) == "d"
        layer = make_layer(context)
        context.warmup([1])
        assert machine.timed == [1] and paths_of(context, 1) == "s"
        assert layer.loaded


def test_timed_calls_use_the_layers_in_turn_and_fresh_inputs(machine: Machine) -> None:
    with make_context() as context:
        layers = [make_layer(context, seed=seed) for seed in range(3)]
        context.warmup([4])
        mega, small = machine.calls["deep_gemm"], machine.calls["small_batch"]
        assert len(mega) == len(small) == measured.CALLS
        for number, (one, other) in enumerate(zip(mega, small, strict=True)):
            layer = layers[number % 3]
            (call,) = one.args
            assert other.args[0] is call
            for name in ("w13", "w13_scale", "w2", "w2_scale"):
                assert getattr(call.weights, name) is getattr(layer, name)
            x, ids, weights = call[:3]
            assert x.shape == (4, 128) and x.dtype is torch.bfloat16 and bool(x.any())
            assert int(ids.min()) >= 0 and int(ids.max()) < 4
            assert all(len(set(row)) == 2 for row in ids.tolist()), "distinct in a row"
            assert weights.dtype is torch.float32 and int(call.num_valid) == 4
        rows = torch.stack([timed.args[0].x for timed in mega])
        ids = torch.stack([timed.args[0].topk_ids for timed in mega])
        assert not (rows[0] == rows[1]).all() and not (ids[0] == ids[1]).all()


def test_a_warm_up_leaves_the_callers_state_alone(machine: Machine) -> None:
    """Every launch is counted, timed ones too; the mask and the random state stay."""
    with make_context() as context:
        machine.kept.append(make_layer(context))
        before = torch.get_rng_state()
        del machine.launched[:]
        context.warmup([1, 4])
        assert int(context.launch_count) == len(machine.launched)
        assert len(machine.launched) == 3 + 3 + 2 * 2 * measured.CALLS
        assert int(context.num_valid) == ALL_VALID
        assert context.invalid_id_count == 0
        assert torch.equal(torch.get_rng_state(), before)


# -- calls ----------------------------------------------------------------------------------------


def test_paths_agree_within_tolerance_and_have_the_same_rules(machine: Machine) -> None:
    config = dict(swiglu_limit=1.0, routed_scaling_factor=1.5, num_shared_experts=1)
    machine.max_tokens = 64
    contexts = [make_context(**config, paths={64: path}) for path in PATHS]
    layers = [make_layer(context) for context in contexts]
    for tokens in (0, 1, 7, 64):
        x, ids, weights = random_inputs(contexts[0].config, tokens)
        for valid in (None, 0, tokens // 2):
            mega, small = (layer(x, ids, weights, num_valid=valid) for layer in layers)
            assert_same(mega, oracle(layers[0], (x, ids, weights), num_valid=valid))
            assert_close(small, mega, 0.03)
            assert valid is None or not bool(small[valid:].any())
    assert not torch.equal(mega, small), "the fakes tell the paths apart"
    bad = random_inputs(contexts[0].config, 3)
    bad[1][0, 0] = 99
    for layer in layers:
        layer(*bad)
        assert layer.context.invalid_id_count == 1, "both paths share the counter"
        layer.context.close()


def test_eager_compiled_and_replayed_calls_take_the_same_path(machine: Machine) -> None:
    with make_context() as context, torch.no_grad():
        layer = make_layer(context)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        example = named(random_inputs(SHAPE, 1))
        runner = mm.GraphRunner(compiled, example, [1, 4, 8], context)
        runner.capture()
        for tokens in (1, 3, 4, 5, 8, 2):
            inputs = random_inputs(SHAPE, tokens, seed=tokens)
            replayed: list[Any] = []
            launched = machine.launches_of(
                lambda i=inputs, t=tokens, r=replayed: r.append(runner(num_tokens=t, **named(i)))
            )
            assert launched == [(context.backend_for(tokens), runner.bucket_for(tokens))]
            for call in (layer, compiled):
                got: list[Any] = []
                launched = machine.launches_of(lambda c=call, i=inputs, g=got: g.append(c(*i)))
                assert launched == [(context.backend_for(tokens), tokens)]
                assert_same(got[0], replayed[0], f"{tokens} tokens")


def test_chunks_look_their_path_up_by_their_own_rows(machine: Machine) -> None:
    machine.times = {8: (2, 1)}
    with make_context(max_tokens_per_rank=8, over_capacity="chunk") as context:
        layer = make_layer(context)
        context.warmup([8])
        inputs = random_inputs(SHAPE, 19)
        launched = machine.launches_of(lambda: layer(*inputs))
        assert launched == [("small_batch", 8), ("small_batch", 8), ("small_batch", 3)]


def test_a_cold_capture_is_refused_on_either_path(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "refuse_cold_capture", current_stream.refuse_cold_capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with make_context() as context:
        layer = make_layer(context)
        context.warmup([1, 4])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert paths_of(context, 3, 4) == "ss"
        layer(*random_inputs(SHAPE, 4))
        with no_launch(context), refuses(mm.NotWarmedUp, "3 tokens", "[0, 1, 4]", "warmup([3,"):
            layer(*random_inputs(SHAPE, 3))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        layer(*random_inputs(SHAPE, 3))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        layer(*random_inputs(SHAPE, 3))


def test_another_current_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 7 + i, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    stream = current_stream.CurrentStream(torch.device("cuda", 1))
    with refuses(mm.MegaMoEError, "current CUDA device: expected cuda:1, got 0"):
        stream()
    current = 1
    assert stream() == 8


def test_strided_weights_never_reach_the_small_kernel(machine: Machine) -> None:
    with make_context(paths={4: "small_batch"}) as context:
        layer = make_layer(context)
        arguments = list(op_arguments(layer, random_inputs(SHAPE, 3)))
        for at in (3, 4, 5, 6):
            wrong = list(arguments)
            t = wrong[at].view(torch.uint8) if wrong[at].element_size() == 1 else wrong[at]
            wide = t.repeat(1, 1, 2).view(wrong[at].dtype)
            wrong[at] = wide[:, :, : wrong[at].shape[2]]
            if wrong[at].is_contiguous():
                continue  # a single column of scales
            with no_launch(context), refuses(ValueError, ".stride()", "contiguous"):
                fused_moe(*wrong)


def test_closing_closes_the_mega_kernel_and_frees_both(machine: Machine) -> None:
    context = make_context()
    layer = make_layer(context)
    context.warmup([1, 8])
    runtime: Any = context._runtime
    mega = runtime._base
    alive = [weakref.ref(o) for o in (runtime, runtime._small)]
    machine.calls = {}
    del runtime
    context.close()
    gc.collect()
    assert mega.closed and [ref() for ref in alive] == [None, None]
    assert paths_of(context, 1, 8) == "sd", "what it took, for a report"
    with refuses(mm.ContextClosed):
        layer(*random_inputs(SHAPE, 1))
    with refuses(mm.ContextClosed):
        context.warmup([4])


# -- pins -----------------------------------------------------------------------------------------


def test_a_pinned_bucket_is_not_measured(machine: Machine, tmp_path: Path) -> None:
    with make_context(paths={1: "deep_gemm", 8: "small_batch"}) as context:
        layer = make_layer(context)
        assert paths_of(context, 0, 1, 2, 8, 9) == "ddssd", "before warm-up too"
        assert machine.launches_of(lambda: layer(*random_inputs(SHAPE, 5))) == [("small_batch", 5)]
        context.warmup([1, 4, 8, 32])
        assert machine.timed == [4, 32]
        assert paths_of(context, 1, 4, 8, 32) == "dssd"
        assert context.decision_for(8) == Decision(8, "small_batch", "pinned")
        assert str(context.decision_for(8)) == "small_batch (pinned)"
    assert list(json.loads(stored_file(tmp_path).read_text())["microseconds"]) == ["4", "32"]


def test_a_pin_overrides_what_is_stored(machine: Machine) -> None:
    for paths, expected in ((None, "s"), ({1: "deep_gemm"}, "d"), (None, "s")):
        with make_context(paths=paths) as context:
            machine.kept.append(make_layer(context))
            context.warmup([1])
            assert paths_of(context, 1) == expected
    assert machine.timed == [1]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({0: "deep_gemm"}, ("bucket of paths", "from 1 to 64", "got 0")),
        ({65: "deep_gemm"}, ("from 1 to 64 (max_tokens_per_rank)", "65")),
        ({1.0: "deep_gemm"}, ("bucket of paths", "1.0")),
        ({True: "deep_gemm"}, ("bucket of paths", "True")),
        ({"1": "deep_gemm"}, ("bucket of paths", "'1'")),
        ({8: "triton"}, ("paths[8]", "'deep_gemm' or 'small_batch'", "'triton'")),
        ({8: None}, ("paths[8]", "None")),
        ([8], ("paths", "a dict", "[8]")),
        ({33: "small_batch"}, ("pinned to small_batch", "at most 32", "33")),
    ],
)
def test_wrong_pins_are_refused(machine: Machine, paths: Any, words: tuple[str, ...]) -> None:
    with refuses(ValueError, *words):
        make_context(paths=paths)


def test_pins_need_two_paths(machine: Machine) -> None:
    only = dict(backend="deep_gemm")
    with refuses(ValueError, "paths[8]", "expected 'deep_gemm', got", "backend='auto'"):
        make_context(**only, paths={8: "small_batch"})
    with make_context(**only, paths={8: "deep_gemm"}) as context:
        assert context.reason == "an SM90 GPU" and context.decision_for(8) is None


@pytest.mark.parametrize("path", PATHS)
def test_the_reference_has_no_paths_to_pin(path: Any) -> None:
    with refuses(ValueError, "paths[8]", "expected no entry", "backend='auto'"):
        make_context(paths={8: path})
    with make_context(paths={}) as context:
        assert context.backend_for(8) == "reference" and context.decision_for(8) is None


# -- one path only --------------------------------------------------------------------------------


def _no_compiler(machine: Machine) -> None:
    machine.small_batch_error = mm.BackendUnavailable("nvcc: expected one, got none. Install it.")


def _no_geometry(machine: Machine) -> None:
    machine.small_batch_error = ValueError("top_k: expected 64, got 65. Use another backend.")


def _no_tokens(machine: Machine) -> None:
    machine.max_tokens = 0


ALONE = [
    (_no_compiler, "Install it."),
    (_no_geometry, "top_k: expected 64"),
    (_no_tokens, "does not take this geometry"),
]


@pytest.mark.parametrize(("change", "words"), ALONE)
def test_without_the_small_kernel_the_reason_says_so(
    machine: Machine, change: Callable[[Machine], None], words: str
) -> None:
    change(machine)
    with make_context() as context:
        layer = make_layer(context)
        context.warmup([1])
        assert machine.timed == [] and context.decision_for(1) is None
        assert machine.launches_of(lambda: layer(*random_inputs(SHAPE, 1))) == [("deep_gemm", 1)]
        assert "every call takes it, without small_batch: " in context.reason
        assert words in context.reason
    with refuses(mm.BackendUnavailable, "paths[8]", "small_batch", words):
        make_context(paths={8: "small_batch"})


def test_an_error_of_another_kind_is_not_swallowed(machine: Machine) -> None:
    machine.small_batch_error = RuntimeError("out of memory")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        make_context()


def test_free_sms_stay_free(machine: Machine) -> None:
    with make_context(num_sms=64) as context:
        assert "num_sms=64" in context.reason and context.decision_for(1) is None
    assert machine.small_batch_options == {}


def test_deep_gemm_asked_for_is_the_mega_kernel_alone(machine: Machine) -> None:
    with make_context(backend="deep_gemm") as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
        assert machine.timed == [] and paths_of(context, 1) == "d"
        assert machine.small_batch_options == {} and context.reason == "an SM90 GPU"


def test_the_small_kernel_gets_the_geometry_of_the_layer(machine: Machine) -> None:
    with make_context(num_shared_experts=1, swiglu_limit=7.0, routed_scaling_factor=2.5) as context:
        options = dict(machine.small_batch_options)
        assert options.pop("invalid_count") is context._runtime.invalid_count  # type: ignore[union-attr]
        assert options == dict(
            hidden_size=128,
            intermediate_size=256,  # padded, as the mega kernel needs it
            num_experts=4,
            num_shared_experts=1,
            top_k=2,
            capacity=64,
            swiglu_limit=7.0,
            swiglu_alpha=1.0,
            swiglu_beta=0.0,
            expert_bias=False,
            routed_scaling_factor=2.5,
            device=torch.device("cpu"),
        )
        assert context.buffer_bytes == FakeSmallBatch.workspace_bytes  # the fake mega has none


def ranks_have_one_path(rank: int, world_size: int, cache: str) -> list[str]:
    """What several ranks say of their paths."""
    machine = Machine()
    with pytest.MonkeyPatch.context() as patch:
        machine.install(patch, Path(cache))
        config = make_config(num_experts=4)

        def make(paths: Any) -> mm.MegaMoEContext:
            return mm.MegaMoEContext(config, dist.group.WORLD, "cpu", paths=paths)

        with make({8: "deep_gemm"}) as context:
            layer = make_layer(context)
            context.warmup([1, 8])
            layer(*random_inputs(config, 1))
            said = [context.reason, *(context.backend_for(n) for n in (0, 1, 64))]
        said += [outcome(lambda: make({8: "small_batch"})), outcome(lambda: make({8 + rank: "x"}))]
        assert machine.timed == [] and {path for path, _ in machine.launched} == {"deep_gemm"}
        return said


@pytest.mark.multirank
def test_several_ranks_take_the_mega_kernel(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    first, second = ranks(2).run(ranks_have_one_path, str(tmp_path))
    assert first == second
    reason, *backends, refused, different = first
    assert reason == "an SM90 GPU; over several ranks every call takes deep_gemm"
    assert backends == ["deep_gemm"] * 3
    assert_one_sentence(refused, "ValueError: paths[8]", "backend='auto' on one rank")
    assert_one_sentence(different, "ValueError: paths of rank 1", "{8: 'x'}", "{9: 'x'}")


# -- what is shown --------------------------------------------------------------------------------


def test_the_summary_shows_the_choice_and_both_times(machine: Machine) -> None:
    with make_context(paths={32: "deep_gemm"}) as context:
        example = named(random_inputs(SHAPE, 1))
        runner = mm.GraphRunner(make_layer(context), example, [1, 8, 32], context)
        runner.capture()
        rows = runner.summary()
    assert [row.backend for row in rows] == ["small_batch", "deep_gemm", "deep_gemm"]
    assert [str(row.decision) for row in rows] == [
        "small_batch (measured: deep_gemm 60.0 us, small_batch 40.0 us)",
        "deep_gemm (measured: deep_gemm 150.0 us, small_batch 160.5 us)",
        "deep_gemm (pinned)",
    ]
    assert "small_batch': 40.0" in repr(rows[0])
    reports = [BucketReport(row.bucket, row.path, row.backend, row.decision) for row in rows]
    report = decode_report(reports)
    table = report.table().splitlines()
    assert table[0].index("backend") == table[1].index("small_batch")
    assert len({len(line) for line in table[:4]}) == 1, "columns stay in line"
    assert table[4] == "bucket 1, one layer: " + str(rows[0].decision)
    assert table[6] == "bucket 32, one layer: deep_gemm (pinned)"
    written = json.loads(json.dumps(report.as_dict()))["buckets"][0]["decision"]
    assert written == {
        "bucket": 1,
        "path": "small_batch",
        "reason": "measured",
        "microseconds": {"deep_gemm": 60.0, "small_batch": 40.0},
    }


def decode_report(buckets: list[BucketReport]) -> DecodeReport:
    return DecodeReport.of(
        buckets,
        {bucket.bucket: [] for bucket in buckets},
        Parity(0.05),
        steps=0,
        ranks=1,
        width=1,
        backend="deep_gemm",
        reason="",
        device="cpu",
        graphs_compiled=1,
        capture_seconds=1.0,
    )


# -- the table ------------------------------------------------------------------------------------


def test_the_table_is_the_rule(machine: Machine) -> None:
    """Random decisions in random order, against the rule written out."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        choice = PathChoice("deep_gemm", 40, {})
        decided: dict[int, Any] = {}
        for bucket in torch.randperm(40, generator=generator)[:6].tolist():
            path = PATHS[int(torch.randint(2, (1,), generator=generator))]
            choice.decide(Decision(bucket + 1, path, "measured"))
            decided[bucket + 1] = path
            for rows in range(41):
                holding = min((b for b in decided if b >= rows), default=None)
                want = "deep_gemm" if holding is None else decided[holding]
                assert choice.path_for(rows) == want
                found = choice.decision_for(rows)
                assert (found and found.bucket) == holding
        assert choice.undecided([0, 3, 3, 40]) == [b for b in (3, 40) if b not in decided]


def test_the_fake_has_the_interface_of_the_kernel() -> None:
    """Or the tests above would show nothing of the real one."""
    fake = list(inspect.signature(FakeSmallBatch.__call__).parameters)
    real = list(inspect.signature(SmallBatch.__call__).parameters)
    assert real[: len(fake)] == fake
    options = set(inspect.signature(SmallBatch.__init__).parameters)
    assert {*SMALL} - {"max_tokens_per_rank"} < options
    assert {"num_shared_experts", "capacity", "swiglu_limit", "routed_scaling_factor"} < options
    assert {"swiglu_alpha", "swiglu_beta", "expert_bias"} < options
    assert {"device", "invalid_count"} < options
