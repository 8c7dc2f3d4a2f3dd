"""The pre-dispatch kernels against `stage`, bit for bit.

The Triton twin runs on CPU under Triton's interpreter. TRITON_INTERPRET takes effect when triton
is imported, and would reach every Triton test of this process: so one child process, which is
started with the variable set, runs all interpreted cases (`interpreter` below).
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import outcome, refuses
from kernel_mocks import MockKernels, assert_interface
from torch import Tensor

from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.errors import BackendUnavailable, CapacityError
from megamoe_compile.custom_ops.reference.recipe import stage
from megamoe_compile.custom_ops.staging.pre_dispatch import (
    PreDispatch,
    Routing,
    StagingBuffer,
    TritonPreDispatch,
)
from megamoe_compile.custom_ops.staging.rows import check_rows

SOURCES = ["staging/pre_dispatch.cu"]
CAPACITY_MARGIN = 3  # rows of the buffer behind the last token
EXPERTS, LOCAL, RANK = 16, 4, 2
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, topk_ids, topk_weights, num_valid
VIEWS = ("x", "scale", "ids", "weights")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an SM90 GPU",
)


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    top_k: int = 6
    shared: int = 0
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    num_valid: int | None = None  # None: all
    layout: str = "dense"  # dense | strided | odd (base and stride 2-byte aligned)
    scaling: float = 1.0

    def __str__(self) -> str:
        return "-".join(
            str(value).removeprefix("torch.")
            for value in asdict(self).values()
            if value is not None
        )

    @property
    def routing(self) -> Routing:
        return Routing(EXPERTS, LOCAL, self.shared, RANK, self.scaling)

    @property
    def valid_rows(self) -> int:
        return self.tokens if self.num_valid is None else min(self.tokens, max(self.num_valid, 0))


def _grid() -> list[Case]:
    """T x H x K x S in full; the other axes cycle with coprime periods."""
    dtypes = list(itertools.product((torch.int32, torch.int64), (torch.float32, torch.bfloat16)))
    cases = []
    for index, (tokens, hidden, top_k, shared) in enumerate(
        itertools.product((0, 1, 7, 33), (128, 384, 1024), (1, 6, 8), (0, 1))
    ):
        ids, weights = dtypes[(index // 2) % 4]
        cases.append(
            Case(
                tokens,
                hidden,
                top_k,
                shared,
                ids,
                weights,
                num_valid=(None, tokens // 2, 0, tokens + 5, -1)[index % 5],
                layout=("dense", "strided", "odd")[index % 3],
                scaling=(1.0, 2.5, 1.1)[index // 4 % 3],
            )
        )
    return cases


GRID = _grid()
LARGE = [
    Case(5, 7168, 8, 1, num_valid=4),
    Case(3, 16384, 8, layout="odd"),
    Case(1100, 4096, 6, num_valid=1000, weights=torch.bfloat16),  # more than one wave of blocks
    Case(70, 128, 32, 32),
]


def _hostile_rows(x: Tensor) -> None:
    """Put the values that break quantizers into the first groups of the first rows of x [T, H]."""
    tokens, hidden = x.shape
    bf16_max = torch.finfo(torch.bfloat16).max
    near_limit = torch.tensor([447.0, 448.0, 449.0, 464.0, 465.0, 1e4, -449.0])
    fills: list[Callable[[Tensor], object]] = [
        lambda group: group.zero_(),
        lambda group: group.fill_(-0.0),
        lambda group: group.mul_(1e-30),
        lambda group: group.mul_(1e-38),
        lambda group: group.fill_(1e-40),  # a subnormal
        lambda group: group[:7].copy_(near_limit),
        lambda group: (group[:7].copy_(near_limit), group[7:8].fill_(bf16_max)),
        lambda group: (group.clamp_(-1, 1), group[3:4].fill_(448.0)),
        lambda group: group[5:6].fill_(float("inf")),
        lambda group: group[6:7].fill_(float("-inf")),
        lambda group: group[9:11].fill_(float("nan")),
        lambda group: group.fill_(float("nan")),
        lambda group: (group[0:1].fill_(float("nan")), group[1:2].fill_(float("inf"))),
    ]
    groups = hidden // 128
    # Every row keeps at least its last group, where it has two, as an undisturbed neighbour.
    places = [(row, g) for row in range(1, tokens) for g in range(max(groups - 1, 1))]
    for fill, (row, g) in zip(fills, places, strict=False):
        fill(x[row, g * 128 : (g + 1) * 128])


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(case.tokens * 1000003 + case.hidden + case.top_k)
    tokens, hidden, top_k = case.tokens, case.hidden, case.top_k
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    _hostile_rows(x)
    ids = torch.randint(EXPERTS, (tokens, top_k), generator=generator).to(case.ids)
    weights = torch.randn(tokens, top_k, generator=generator).to(case.weights)
    wrong = [-1, EXPERTS, -2, EXPERTS + 7, -(2**31)]
    if case.ids == torch.int64:
        wrong += [2**40, -(2**40), 2**32, 2**32 + 3]  # some would pass after truncation to 32 bits
    for index, value in enumerate(wrong[: ids.numel()]):
        ids.view(-1)[index * 2 % ids.numel()] = value
    num_valid = torch.tensor([tokens if case.num_valid is None else case.num_valid])
    if case.layout != "dense":
        pad = 8 if case.layout == "strided" else 1
        x = _inside_wider(x, pad)
        ids = _inside_wider(ids, 1)
        weights = _inside_wider(weights, 3)
    return _to(x, device), _to(ids, device), _to(weights, device), num_valid.int().to(device)


def _inside_wider(t: Tensor, pad: int) -> Tensor:
    """The same values as a column slice of a tensor with `pad` more columns on either side."""
    wide = t.new_full((t.shape[0], t.shape[1] + 2 * pad), 7)
    wide[:, pad:-pad] = t
    return wide[:, pad:-pad]


def _to(t: Tensor, device: str) -> Tensor:
    """`t` on `device` with its strides and its offset in the storage."""
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return storage.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def poisoned_buffer(case: Case, device: str = "cpu") -> StagingBuffer:
    rows, slots = case.tokens + CAPACITY_MARGIN, case.top_k + case.shared
    return StagingBuffer(
        torch.full((rows, case.hidden), 0x5B, dtype=torch.uint8, device=device).view(
            torch.float8_e4m3fn
        ),
        torch.full((rows, case.hidden // 128), 12345.0, device=device),
        torch.full((rows, slots), -777, dtype=torch.int64, device=device),
        torch.full((rows, slots), -55.0, device=device),
    )


def expected_buffer(case: Case) -> tuple[StagingBuffer, int]:
    """The poisoned buffer after a launch, and the number of invalid ids."""
    q, scale, ids, weights, num_invalid = stage(*make_inputs(case), **asdict(case.routing))
    buffer = poisoned_buffer(case)
    rows = case.valid_rows
    buffer.x.view(torch.uint8)[:rows] = q.view(torch.uint8)[:rows]
    buffer.scale[:rows] = scale[:rows]
    buffer.ids[: case.tokens] = ids
    buffer.weights[: case.tokens] = weights
    return buffer, int(num_invalid)


def _bits(name: str, t: Tensor) -> Tensor:
    if name == "x":
        code = t.view(torch.uint8)
        return torch.where(code & 0x7F == 0x7F, 0x7F, code)  # hardware drops the sign of a NaN
    return t.view(torch.int32) if t.dtype == torch.float32 else t


def assert_same(got: StagingBuffer, expected: StagingBuffer) -> None:
    for name in VIEWS:
        a, b = (_bits(name, getattr(side, name).cpu()) for side in (got, expected))
        if not torch.equal(a, b):
            (row, column) = (int(i) for i in (a != b).nonzero()[0])
            raise AssertionError(
                f"{name}[{row}, {column}]: got {a[row, column]}, expected {b[row, column]}; "
                f"{int((a != b).sum())} of {a.numel()} differ"
            )


def check_twin(case: Case, device: str = "cpu") -> None:
    """Launch the Triton twin twice, and compare everything it may and may not write."""
    buffer = poisoned_buffer(case, device)
    invalid = torch.zeros(1, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    launcher = TritonPreDispatch(buffer, case.routing, invalid)
    for _ in range(2):
        launcher(*make_inputs(case, device), count)
    expected, num_invalid = expected_buffer(case)
    assert_same(buffer, expected)
    assert (int(count), int(invalid)) == (2, 2 * num_invalid)


@needs_triton
@pytest.mark.parametrize("case", GRID, ids=str)
def test_twin_matches_reference(interpreter: ProcessPoolExecutor, case: Case) -> None:
    interpreter.submit(check_twin, case).result()


def _check_e4m3_codes() -> None:
    """Every bf16 value against torch's own cast, in groups whose scale is 1."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= 448.0]
    rows = values[: values.numel() // 127 * 127].view(-1, 127)
    x = torch.cat([rows, rows.new_full((rows.shape[0], 1), 448.0)], dim=1)
    case = Case(x.shape[0], 128, top_k=1)
    buffer, zero = poisoned_buffer(case), torch.zeros(1, dtype=torch.int32)
    _, ids, weights, num_valid = make_inputs(case)
    TritonPreDispatch(buffer, case.routing, zero)(x, ids, weights, num_valid, zero.clone())
    assert torch.equal(buffer.scale[: x.shape[0]], torch.ones(x.shape[0], 1))
    got = buffer.x[: x.shape[0]].view(torch.uint8)
    assert torch.equal(got, x.float().to(torch.float8_e4m3fn).view(torch.uint8))


@needs_triton
def test_twin_encodes_every_bf16(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(_check_e4m3_codes).result()


@needs_triton
@pytest.mark.parametrize("arch", [80, 90])
def test_twin_compiles(arch: int) -> None:
    """The twin builds for SM80, which has no e4m3 conversion, and divides exactly."""
    import triton
    from triton.backends.compiler import GPUTarget

    from megamoe_compile.custom_ops.staging.pre_dispatch_triton import pre_dispatch_kernel

    pointers = {"x": "bf16", "ids": "i32", "weights": "fp32", "num_valid": "i32"}
    pointers |= {"launch_count": "i32", "invalid_count": "i32", "buf_x": "u8"}
    pointers |= {"buf_scale": "fp32", "buf_ids": "i64", "buf_weights": "fp32"}
    signature = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()}
    signature |= {"x_stride": "i64", "ids_stride": "i64", "weights_stride": "i64"}
    signature |= {"num_tokens": "i32", "num_rows": "i32", "routed_scaling_factor": "fp32"}
    constants = {"HIDDEN": 4096, "TOP_K": 6, "NUM_EXPERTS": 256, "NUM_LOCAL": 32, "NUM_SHARED": 1}
    constants |= {"FIRST_SHARED": 32, "ALIGNED": True, "GROUPS": 8, "SLOTS": 8}
    constants |= {"X_STRIDE": 4096, "SCALE_STRIDE": 32, "IDS_STRIDE": 7, "WEIGHTS_STRIDE": 7}
    source = triton.compiler.ASTSource(
        pre_dispatch_kernel,
        {name: signature.get(name, "constexpr") for name in pre_dispatch_kernel.arg_names},
        constants,
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "div.full.f32" not in ptx
    assert "fma." not in ptx
    assert "ld.global.v4" in ptx  # 16-byte loads


def test_bad_inputs_are_named() -> None:
    case = Case(4, 256, top_k=2)
    good = make_inputs(case)
    buffer = poisoned_buffer(case)
    limits = buffer.limits(case.top_k)
    check_rows(*good[:3], *limits)
    x, ids, weights, _ = good
    for bad, message in (
        ((x[:, :128], ids, weights), r"x\.shape.*expected \(4, 256\), got \(4, 128\)"),
        ((x.float(), ids, weights), r"x\.dtype"),
        ((x, ids[:3], weights), r"topk_ids\.shape"),
        ((x, ids.to(torch.int16), weights), r"topk_ids\.dtype"),
        ((x, ids, weights.T.contiguous().T), r"topk_weights\.stride"),
    ):
        with pytest.raises(ValueError, match=message):
            check_rows(*bad, *limits)
    many = make_inputs(replace(case, tokens=8))
    with pytest.raises(CapacityError, match="at most 7, got 8"):
        check_rows(*many[:3], *limits)
    with pytest.raises(CapacityError, match=r"at most 7, got 8\. Call another\."):
        check_rows(*many[:3], *limits, cure="Call another.")
    single = Case(4, 256, top_k=1)
    x, ids, weights, _ = make_inputs(single)
    column = ids.expand(4, 2)[:, ::2]  # one column has no stride to speak of
    check_rows(x, column, weights, *poisoned_buffer(single).limits(1))
    with pytest.raises(ValueError, match="contiguous"):
        StagingBuffer(buffer.x, buffer.scale, buffer.ids[::2], buffer.weights)


def test_a_failed_launch_is_named() -> None:
    """What is wrong with the inputs where the library refuses them, and else the error."""
    case = Case(4, 256, top_k=2)
    x, ids, weights, num_valid = make_inputs(case)
    zero, returned = torch.zeros(1, dtype=torch.int32), [0]
    calls: list[tuple[Any, ...]] = []

    def launch(*args: Any) -> int:
        calls.append(args)
        return 1 if args[-2] < 0 else returned[0]

    library: Any = MockKernels("pre_dispatch", launch)
    launcher = PreDispatch(poisoned_buffer(case), case.routing, zero, library=library)
    assert library.configs == [launcher._config_address]
    launcher(x, ids, weights, num_valid, zero, 99)
    assert calls[0][0] == launcher._config_address and calls[0][-3:] == (4, 2, 99)
    with pytest.raises(ValueError, match=r"topk_ids\.dtype"):
        launcher(x, ids.short(), weights, num_valid, zero, 99)
    returned[0] = 700
    got = outcome(lambda: launcher(x, ids, weights, num_valid, zero, 99))
    assert got.startswith("RuntimeError: call of pre_dispatch: expected success, got CUDA error ")
    refusing: Any = MockKernels("pre_dispatch", launch, refusal=209)
    with refuses(BackendUnavailable, "pre_dispatch kernels on cpu", "SM90", 'backend="triton"'):
        PreDispatch(poisoned_buffer(case), case.routing, zero, library=refusing)


def _nvcc_or_skip() -> None:
    try:
        cuda_build.find_nvcc()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_cuda_kernel_builds_without_spills(tmp_path: Path) -> None:
    _nvcc_or_skip()
    library = cuda_build.build("pre_dispatch", SOURCES, cache_dir=tmp_path)
    report = cuda_build.resource_report(library)
    assert len(report) == 8  # two id types, two weight types, two alignments
    for kernel in report:
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
        assert kernel.registers <= 32, kernel  # more would cost resident blocks
    built = library.stat().st_mtime_ns
    assert cuda_build.build("pre_dispatch", SOURCES, cache_dir=tmp_path) == library
    assert library.stat().st_mtime_ns == built
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".log", ".so"]
    assert_interface(library, "pre_dispatch")


def test_build_failures_say_what_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "broken.cu").write_text("this is no C++\n")
    monkeypatch.setattr(cuda_build, "CSRC", sources)
    fake = tmp_path / "home" / "bin" / "nvcc"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "line 1: no C++"\nexit 2\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    with pytest.raises(BackendUnavailable, match=r"(?s)exit status 0, got 2.*line 1: no C\+\+"):
        cuda_build.build("broken", ["broken.cu"], cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BackendUnavailable, match="set CUDA_HOME"):
        cuda_build.find_nvcc()


class Device:
    """One CUDA launcher with its poisoned buffer and counters."""

    def __init__(self, case: Case, *, pdl: bool = True, early_trigger: bool = False) -> None:
        self.case = case
        self.buffer = poisoned_buffer(case, "cuda")
        self.invalid = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.count = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.launcher = PreDispatch(
            self.buffer, case.routing, self.invalid, pdl=pdl, early_trigger=early_trigger
        )

    def launch(self, inputs: Inputs) -> None:
        self.launcher(*inputs, self.count, torch.cuda.current_stream().cuda_stream)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("case", GRID + LARGE, ids=str)
def test_cuda_matches_reference(case: Case) -> None:
    expected, num_invalid = expected_buffer(case)
    inputs = make_inputs(case, "cuda")
    for pdl, early_trigger in ((True, False), (True, True), (False, False)):
        device = Device(case, pdl=pdl, early_trigger=early_trigger)
        device.launch(inputs)
        assert_same(device.buffer, expected)
        assert (int(device.count), int(device.invalid)) == (1, num_invalid)


@pytest.mark.gpu
@needs_sm90
@needs_triton
@pytest.mark.parametrize("case", GRID[::9] + LARGE, ids=str)
def test_twin_matches_reference_on_gpu(case: Case) -> None:
    check_twin(case, "cuda")


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_every_launch_counts_once(tokens: int) -> None:
    device = Device(Case(tokens, 4096), early_trigger=True)
    inputs = make_inputs(device.case, "cuda")
    for _ in range(1000):
        device.launch(inputs)
    assert int(device.count) == 1000
    expected, num_invalid = expected_buffer(device.case)
    assert_same(device.buffer, expected)
    assert int(device.invalid) == 1000 * num_invalid


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("early_trigger", [False, True])
def test_waits_for_its_predecessor(early_trigger: bool) -> None:
    """Each launch reads what the kernel or copy just before it wrote, eager and replayed."""
    case = Case(64, 4096)
    devices = [Device(case, early_trigger=early_trigger) for _ in range(8)]
    x, ids, weights, num_valid = make_inputs(case, "cuda")
    steps = [torch.full_like(x, float(2**i)) for i in range(8)]

    def run() -> None:
        for i, device in enumerate(devices):
            x.fill_(float(2**i)) if i % 2 else x.copy_(steps[i])
            device.launch((x, ids, weights, num_valid))

    def check() -> None:
        for i, device in enumerate(devices):
            scale = device.buffer.scale[: case.tokens]
            assert torch.equal(scale.cpu(), torch.full(scale.shape, float(2**i)) / 448.0)
            device.buffer.scale.zero_()

    run()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        check()
    assert all(int(device.count) == 21 for device in devices)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_replay_equals_eager(tokens: int) -> None:
    """New inputs and a new num_valid reach a captured launch; eager still works afterwards."""
    case = Case(tokens, 1024, num_valid=tokens)
    device = Device(case)
    inputs = make_inputs(case, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first launch of this launcher: nothing loads lazily
        device.launch(inputs)
    assert int(device.count) == 0
    for launches, num_valid in enumerate((tokens, tokens // 2, 0), start=1):
        inputs[3].fill_(num_valid)
        poison = poisoned_buffer(case)
        for view in VIEWS:
            getattr(device.buffer, view).copy_(getattr(poison, view))
        graph.replay()
        assert_same(device.buffer, expected_buffer(replace(case, num_valid=num_valid))[0])
        assert int(device.count) == launches
    device.launch(inputs)
    assert int(device.count) == 4


@pytest.mark.gpu
@needs_sm90
def test_cuda_launcher_rejects() -> None:
    device = Device(Case(4, 256, top_k=2))
    x, ids, weights, num_valid = make_inputs(device.case, "cuda")
    with pytest.raises(ValueError, match=r"topk_ids\.dtype"):
        device.launch((x, ids.short(), weights, num_valid))
    with pytest.raises(ValueError, match=r"x\.shape"):
        device.launch((x[:, :128], ids, weights, num_valid))
    with pytest.raises(CapacityError):
        device.launch(make_inputs(replace(device.case, tokens=8), "cuda"))
    device.launch((x, ids, weights, num_valid))  # a refused launch leaves no error behind
    assert int(device.count) == 1
