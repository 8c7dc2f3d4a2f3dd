"""The C++ kernel of the op, on CPU tensors: mocks stand where the CUDA kernels would.

One child process takes the CPU key for the C++ kernel and runs every check that is named below;
this process keeps the Python kernel.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    RankPool,
    assert_one_sentence,
    assert_same,
    make_config,
    make_layer,
    op_arguments,
    oracle,
    outcome,
    random_inputs,
)
from native_mocks import (
    CONFIG,
    FIXED,
    STREAM,
    MockRuntime,
    SmallBatchMock,
    install,
    strided,
    wrong_calls,
)
from torch import Tensor
from torch.library import opcheck

import megamoe_compile as mm
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.deep_gemm import native as fused_moe_native
from megamoe_compile.custom_ops.library import fused_moe
from megamoe_compile.custom_ops.paths.choice import ChoiceStore, PathChoice
from megamoe_compile.custom_ops.paths.measured import MeasuredRuntime

COUNTS = (0, 1, 7, 64)
SOURCES = ["deep_gemm/fused_moe.cpp"]


def redirect(layer: mm.MegaMoE, context_id: int) -> None:
    """Let the layer launch what is entered under this id, eagerly and in graphs."""
    layer._context_id = context_id
    layer._handle = torch.empty(context_id, 0, dtype=torch.int8)


class Setup:
    """A layer whose context launches through C++, and the same layer on the Python kernel."""

    def __init__(self, **changes: Any) -> None:
        install()
        self.context = mm.MegaMoEContext(make_config(**changes), device="cpu")
        self.layer = make_layer(self.context)
        self.config = self.context.config
        shape = tuple(self.layer.w13.shape)
        self.runtime = MockRuntime(
            self.context._runtime, shape, self.config.top_k, self.config.max_tokens_per_rank
        )
        self.native = self.runtime.native
        self.id = library.register_runtime(self.runtime, shape, self.native)
        self.python_constants = (self.layer._context_id, *self.layer._constants)
        redirect(self.layer, self.id)

    def warm(self, *counts: int) -> None:
        for tokens in counts:
            self.layer(*random_inputs(self.config, tokens))
        self.runtime.python_launches = 0

    def python(self, inputs: Any, **options: Any) -> Tensor:
        """The result of the Python kernel with the reference runtime."""
        arguments = op_arguments(self.layer, inputs, **options)
        return library._fused_moe(*arguments[:11], *self.python_constants)

    def done(self) -> None:
        assert not self.runtime.failures, "\n".join(self.runtime.failures)


def what_the_kernels_get() -> None:
    s = Setup()
    s.warm(7)
    for ids, weights, variant in (
        (torch.int32, torch.float32, 0),
        (torch.int32, torch.bfloat16, 1),
        (torch.int64, torch.float32, 2),
        (torch.int64, torch.bfloat16, 3),
    ):
        inputs = strided(random_inputs(s.config, 7, ids_dtype=ids, weights_dtype=weights))
        valid = torch.tensor([5], dtype=torch.int32)
        y = s.layer(*inputs, num_valid=valid)
        got = s.runtime.staged
        assert got is not None
        assert (got.config, got.stream, got.variant) == (CONFIG, STREAM, variant)
        for mine, given in zip((got.x, got.ids, got.weights), inputs, strict=True):
            assert mine.data_ptr() == given.data_ptr() and mine.stride() == given.stride()
        assert got.num_valid.data_ptr() == valid.data_ptr()
        assert got.launch_count.data_ptr() == s.layer.launch_count.data_ptr()
        layer = s.layer
        tensors = (y, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
        codes = ((4, 16), (10, 8), (2, 32), (10, 8), (2, 32))
        for view, t, code in zip(s.runtime.views, tensors, codes, strict=True):
            assert view.data == t.data_ptr() and (view.code, view.bits, view.lanes) == (*code, 1)
            assert (view.ndim, view.byte_offset) == (t.dim(), 0)
            assert (view.device_type, view.device_id) == (1, 0)  # DLPack's CPU
    none, integer, negative, true, real, text = s.runtime.fixed
    assert len(FIXED) == 6
    assert none == (0, 0, bytes(8))
    assert integer == (1, 0, (3).to_bytes(8, "little"))
    assert negative == (1, 0, (-(2**40)).to_bytes(8, "little", signed=True))
    assert true == (2, 0, (1).to_bytes(8, "little"))
    assert real == (3, 0, bytes(ctypes.c_double(2.5)))
    assert text == (11, 6, b"swiglu\0\0")
    s.done()


def results_are_those_of_the_python_kernel() -> None:
    s = Setup(num_shared_experts=1, routed_scaling_factor=1.5, swiglu_limit=1.0)
    s.warm(*COUNTS)
    calls = 0
    for tokens in COUNTS:
        for shape in (tuple, strided):
            for ids in (torch.int32, torch.int64):
                inputs = shape(random_inputs(s.config, tokens, ids_dtype=ids))
                for valid in (None, 0, tokens // 2):
                    y = s.layer(*inputs, num_valid=valid)
                    calls += 1
                    assert_same(y, oracle(s.layer, inputs, num_valid=valid))
                    assert y.is_contiguous() and y.shape == inputs[0].shape
    assert (s.native.launches, s.runtime.python_launches) == (calls, 0)
    with torch.inference_mode():
        y = s.layer(*inputs)
    assert y.is_inference() and s.native.launches == calls + 1
    assert int(s.layer.launch_count) == calls + 1 + len(COUNTS)
    assert_same(y, s.python(inputs))
    s.done()


def a_first_launch_is_pythons() -> None:
    s = Setup()
    for tokens in (5, 5, 6, 5, 6):
        s.layer(*random_inputs(s.config, tokens))
    assert (s.runtime.python_launches, s.native.launches) == (2, 3)
    s.native.warm(-1)
    s.native.warm(10**6)  # neither is a number of tokens of this context
    s.done()


def what_the_fast_path_leaves_to_python() -> None:
    s = Setup()
    s.warm(3)
    inputs = random_inputs(s.config, 3)
    assert_same(fused_moe(*op_arguments(s.layer, inputs, as_bytes=True)), s.python(inputs))
    assert (s.runtime.python_launches, s.native.launches) == (1, 0)
    before = int(s.layer.launch_count)
    for what, call in wrong_calls(s.layer, inputs).items():
        got = outcome(lambda call=call: fused_moe(*call))
        assert got and got == outcome(lambda call=call: library._fused_moe(*call)), what
        assert_one_sentence(got)
    too_many = random_inputs(s.config, 65)
    assert outcome(lambda: s.layer(*too_many)).startswith("CapacityError: tokens on this rank")
    assert (s.native.launches, int(s.layer.launch_count)) == (0, before)
    s.layer(*inputs)
    assert s.native.launches == 1
    s.done()


def a_single_column_may_have_any_stride() -> None:
    s = Setup(top_k=1)
    s.warm(3)
    x, ids, weights = random_inputs(s.config, 3)
    other = (x, torch.cat([ids, ids], 1)[:, ::2], torch.cat([weights, weights], 1)[:, ::2])
    assert other[1].stride() == (2, 2)
    assert_same(s.layer(*other), s.layer(x, ids, weights))
    s.done()


def a_closed_context_is_refused_by_python() -> None:
    s = Setup()
    s.warm(3)
    inputs = random_inputs(s.config, 3)
    s.layer(*inputs)
    assert s.native.launches == 1
    s.native.leave()
    s.native.leave()
    assert s.native.launches == -1
    s.layer(*inputs)  # the runtime lives: the Python kernel still serves it
    assert s.runtime.python_launches == 1
    s.done()
    arguments, native = op_arguments(s.layer, inputs), s.native
    del s.runtime, s.native
    gc.collect()
    got = outcome(lambda: fused_moe(*arguments))
    assert got.startswith("ContextClosed: ") and native.launches == -1
    assert got == outcome(lambda: library._fused_moe(*arguments))


def a_runtime_that_dies_leaves_the_table() -> None:
    s = Setup()
    s.warm(3)
    arguments, native = op_arguments(s.layer, random_inputs(s.config, 3)), s.native
    assert native.launches == 0
    del s.runtime, s.native
    gc.collect()
    assert native.launches == -1
    assert outcome(lambda: fused_moe(*arguments)).startswith("ContextClosed: ")


def errors_of_the_kernels() -> None:
    s = Setup()
    s.warm(3)
    inputs = random_inputs(s.config, 3)
    s.runtime.call_error = -1
    got = outcome(lambda: s.layer(*inputs))
    assert got.startswith("RuntimeError: mega kernel launch: expected success, got ValueError: ")
    assert "said no. An" in got, got  # cut at its length
    assert_one_sentence(got)
    assert len(s.runtime.released) == 1
    s.runtime.call_error = 0
    s.runtime.stage_error = 700  # nothing is launched: the Python kernel repeats and reports
    s.layer(*inputs)
    assert (s.native.launches, s.runtime.python_launches) == (0, 1)
    s.runtime.stage_error = 0
    s.runtime.result = 0xABC
    s.layer(*inputs)
    assert s.native.launches == 1 and s.runtime.released[1:] == [0xABC]
    s.done()


def passes_opcheck() -> None:
    s = Setup()
    s.warm(0, 3)
    for tokens in (0, 3):
        inputs = random_inputs(s.config, tokens)
        not_schema = (
            "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
        )  # fmt: skip
        opcheck(fused_moe, op_arguments(s.layer, inputs), test_utils=not_schema)
        opcheck(fused_moe, op_arguments(s.layer, inputs, as_bytes=True))
    assert s.native.launches > 0
    s.done()


def compiles_to_one_graph() -> None:
    s = Setup()
    s.warm(*COUNTS, 9)

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        s.layer(x, ids, weights)  # the result is dropped, the launch is not
        return s.layer(x + 1, ids, weights) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (7, 9, 1, 0, 64, 7):
        inputs = random_inputs(s.config, tokens)
        with torch.no_grad():
            before = s.native.launches
            assert_same(compiled(*inputs), step(*inputs))
            assert s.native.launches == before + 4
    s.native.leave()
    del s.runtime, s.native
    gc.collect()
    assert outcome(lambda: compiled(*inputs)).startswith("ContextClosed: ")


def threads_share_the_op() -> None:
    """Two contexts, three threads on each; a call's two launches stay together."""
    setups = [Setup(), Setup(top_k=1)]
    for s in setups:
        s.warm(3, 4)
        s.runtime.order.clear()
    wrong: list[str] = []

    def work(s: Setup, seed: int) -> None:
        for turn in range(20):
            inputs = random_inputs(s.config, 3 + turn % 2, seed=seed)
            try:
                assert_same(s.layer(*inputs), oracle(s.layer, inputs))
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(s, seed)) for seed in range(3) for s in setups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    for s in setups:
        assert s.native.launches == 60 and s.runtime.order == ["stage", "mega"] * 60
        s.done()


def leaving_waits_for_a_call() -> None:
    s = Setup()
    s.warm(3)
    entered, go = threading.Event(), threading.Event()
    s.runtime.in_mega = lambda: (entered.set(), go.wait(30))
    inputs = random_inputs(s.config, 3)
    results: list[Tensor] = []
    call = threading.Thread(target=lambda: results.append(s.layer(*inputs)))
    call.start()
    assert entered.wait(30)
    leave = threading.Thread(target=s.native.leave)
    leave.start()
    time.sleep(0.2)
    assert leave.is_alive() and not results
    go.set()
    for thread in (call, leave):
        thread.join(30)
        assert not thread.is_alive()
    assert_same(results[0], oracle(s.layer, inputs))
    s.done()


def counts_of_the_small_batch_path_stay_in_python() -> None:
    """The C++ kernel launches the mega kernel only, and asks no table."""
    s = Setup()
    small, measured_as = SmallBatchMock(s.runtime), {1: "small_batch", 7: "deep_gemm"}
    times = {"small_batch": (2.0, 1.0), "deep_gemm": (1.0, 2.0)}
    choice = PathChoice("deep_gemm", s.config.max_tokens_per_rank, {})
    runtime = MeasuredRuntime(
        s.runtime,
        small,
        choice,
        ChoiceStore("deep_gemm", {}, Path(tempfile.mkdtemp()) / "paths"),
        num_experts=s.config.num_experts,
        top_k=s.config.top_k,
        timer=lambda calls: dict(
            zip(calls, times[measured_as[calls["deep_gemm"][0].args[0].x.shape[0]]], strict=True)
        ),
    )
    id = library.register_runtime(runtime, tuple(s.layer.w13.shape), runtime.native)
    redirect(s.layer, id)
    layer = s.layer
    weights = layer.prepared

    def launches(tokens: int) -> tuple[int, int, int]:
        """From C++, from Python on the mega kernel, on the small-batch path."""
        inputs = random_inputs(s.config, tokens)
        s.runtime.python_launches = small.launches = 0
        before = s.native.launches
        assert_same(layer(*inputs), oracle(layer, inputs))
        return s.native.launches - before, s.runtime.python_launches, small.launches

    # Before warm-up: a count's second launch is C++'s, whatever is decided later.
    assert [launches(1), launches(1)] == [(0, 1, 0), (1, 0, 0)]
    runtime.warmup([1, 7], lambda: weights, layer.launch_count)
    runtime.measure([1, 7], [weights], layer.launch_count)
    assert launches(1) == launches(0) == (0, 0, 1)
    assert launches(7) == (1, 0, 0)
    assert [launches(5), launches(5)] == [(0, 1, 0), (1, 0, 0)], "warm by its own first launch"
    runtime.warmup([1, 7], lambda: weights, layer.launch_count)
    assert launches(1) == (0, 0, 1) and launches(7) == launches(5) == (1, 0, 0)
    runtime.native.leave()
    runtime.measure([1, 7], [weights], layer.launch_count)
    assert s.native.launches == -1, "a closed context does not come back"
    s.done()


def is_installed_once() -> None:
    library = install()
    assert fused_moe_native.install("CPU") is library
    fused_moe_native.install.cache_clear()  # as importlib.reload does
    install()
    assert "CPU" in outcome(lambda: fused_moe_native.install("CUDA"))


CHECKS: list[Callable[[], None]] = [
    what_the_kernels_get,
    results_are_those_of_the_python_kernel,
    a_first_launch_is_pythons,
    what_the_fast_path_leaves_to_python,
    a_single_column_may_have_any_stride,
    a_closed_context_is_refused_by_python,
    a_runtime_that_dies_leaves_the_table,
    errors_of_the_kernels,
    passes_opcheck,
    compiles_to_one_graph,
    threads_share_the_op,
    leaving_waits_for_a_call,
    counts_of_the_small_batch_path_stay_in_python,
    is_installed_once,
]


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    reason = outcome(cuda_build.find_cxx)
    if reason:
        pytest.skip(reason)
    cuda_build.build_extension("fused_moe", SOURCES)  # outside of a check's time limit
    pool = RankPool(1, tmp_path_factory.mktemp("native"))
    yield pool
    pool.close()


def _run(rank: int, world_size: int, name: str) -> None:
    globals()[name]()


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_native(child: RankPool, name: str) -> None:
    child.run(_run, name, timeout=120)


# -- without the child ----------------------------------------------------------------------------


def test_no_compiler_and_a_failed_build_have_their_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    got = outcome(lambda: cuda_build.build_extension("x", SOURCES, tmp_path / "cache"))
    assert got.startswith("BackendUnavailable: C++ compiler: ") and "set CXX" in got
    fake = tmp_path / "cxx"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no C++20"\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    got = outcome(lambda: cuda_build.build_extension("x", SOURCES, tmp_path / "cache"))
    assert "exit status 0, got 3" in got and "no C++20" in got and torch.__version__ in got
    assert not list((tmp_path / "cache").iterdir())


def test_with_the_real_tvm_ffi() -> None:
    """A function object of tvm-ffi, called through the addresses that C++ gets."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    got: list[Any] = []

    def function(*args: Any) -> None:
        got[:] = args
        if args[0] == "fail":
            raise ValueError("as asked")

    numbers = tvm_ffi.convert([128, 128, 128])
    fixed = (None, numbers, 7, "swiglu", 2.5, True)
    call = fused_moe_native.TvmCall(tvm_ffi.convert(function), fixed)
    call(*range(5))
    from_python = list(got)
    c = call.in_c()
    signature = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )
    Any11 = fused_moe_native.TvmAny * 11
    of = fused_moe_native.TvmAny.of

    def from_c(first: Any) -> int:
        arguments = Any11(of(first), *map(of, range(1, 5)), *c.arguments)
        result = of(None)
        invoke = signature(c.call)
        return invoke(c.function, ctypes.addressof(arguments), 11, ctypes.addressof(result))

    assert from_c(0) == 0
    assert list(map(repr, got)) == list(map(repr, from_python))
    assert from_c("fail") != 0
    error = ctypes.c_void_p()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c.take_error)(ctypes.addressof(error))
    texts = (ctypes.c_size_t * 4).from_address(error.value + 24)  # behind the object's header
    assert ctypes.string_at(texts[0], texts[1]) == b"ValueError"
    assert ctypes.string_at(texts[2], texts[3]) == b"as asked"
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(c.release)(error.value) == 0


def test_what_has_no_form_in_c_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    got = outcome(lambda: fused_moe_native.TvmAny.of("eight by"))
    assert got.startswith("ValueError: string: expected at most 7 bytes, got eight by")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # a torch without CUDA
    got = outcome(fused_moe_native.current_stream_address)
    assert got.startswith("BackendUnavailable: aoti_torch_get_current_cuda_stream: ")
    assert_one_sentence(got)
