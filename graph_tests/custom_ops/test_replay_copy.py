"""What a replay writes first: the copies of its inputs and the number of real tokens."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, make_config, make_layer, named, outcome, random_inputs
from kernel_mocks import MockKernels, assert_interface
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile.capture.outputs import GraphOutputs
from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.cuda import replay_copy
from megamoe_compile.custom_ops.cuda.replay_copy import (
    MAX_RANGES,
    CudaInputCopier,
    TorchInputCopier,
    input_copier,
)

DTYPES = (torch.bfloat16, torch.int32, torch.int64, torch.float32, torch.uint8)


class MockLibrary(MockKernels):
    """The kernel's library, for CPU tensors."""

    def __init__(self) -> None:
        super().__init__("replay_copy", self._copy)
        self.launches = 0
        self.error = 0

    def _copy(self, at: int, stream: int) -> int:
        assert stream == 77
        if self.error:
            return self.error
        self.launches += 1
        request = replay_copy._Request.from_address(at)
        for place in range(request.count):
            size = request.bytes[place]
            if size:
                ctypes.memmove(request.targets[place], request.sources[place], size)
        ctypes.c_int32.from_address(request.num_valid).value = request.value
        return 0


@pytest.fixture
def mock() -> tuple[CudaInputCopier, MockLibrary]:
    """A CUDA copier that takes CPU tensors, whose device index is -1."""
    library: Any = MockLibrary()
    copier = CudaInputCopier(torch.zeros(1, dtype=torch.int32), library)
    assert library.configs == [None]
    copier._current_device = lambda: -1
    copier._current_stream = lambda index: 77
    return copier, library


def make_tensors(device: str = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((7, 128), (7, 3), (0, 5), (7,), (1, 1))
    return [
        torch.randint(0, 100, shape, generator=generator).to(device, dtype)
        for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]


def check(copier: TorchInputCopier, sources: list[Tensor], tokens: int = 7) -> None:
    """All targets and num_valid are what they should be."""
    targets = [torch.full_like(source, 101) for source in sources]
    write = copier.prepare([target.data for target in targets], tokens)
    with torch.no_grad():
        write(sources)
        for target, source in zip(targets, sources, strict=True):
            assert_same(target, source)
        assert int(copier.num_valid) == tokens
        for target in targets:
            target.fill_(5)
        copier.num_valid.fill_(-1)
        write(None)
    assert int(copier.num_valid) == tokens and all(bool((t == 5).all()) for t in targets)


def test_torch_copies_anything() -> None:
    copier = TorchInputCopier(torch.zeros(1, dtype=torch.int32))
    check(copier, make_tensors())
    check(copier, [make_tensors()[0].T, torch.zeros(3, requires_grad=True)])
    assert type(input_copier(copier.num_valid)) is TorchInputCopier


def test_one_launch_copies_contiguous_tensors(mock: tuple[CudaInputCopier, MockLibrary]) -> None:
    copier, library = mock
    for count in (0, 1, 5):
        check(copier, make_tensors()[:count])
    assert library.launches == 3
    check(copier, make_tensors()[:1] * MAX_RANGES)
    assert library.launches == 4


def test_a_prepared_write_reads_each_calls_own_sources(
    mock: tuple[CudaInputCopier, MockLibrary],
) -> None:
    copier, library = mock
    targets = make_tensors()
    writes = {tokens: copier.prepare(targets, tokens) for tokens in (3, 4)}
    for seed, tokens in enumerate((3, 4, 3, 3, 4)):
        sources = make_tensors(seed=seed)
        writes[tokens](sources)
        for target, source in zip(targets, sources, strict=True):
            assert_same(target, source)
        assert int(copier.num_valid) == tokens
    assert library.launches == 5


def test_what_the_kernel_does_not_take_goes_to_torch(
    mock: tuple[CudaInputCopier, MockLibrary],
) -> None:
    copier, library = mock
    first = make_tensors()[0]
    for sources in (
        [first, first.T.contiguous().T],
        [first[:, ::2]],
        [nn.Parameter(first, requires_grad=False)],
        [first] * (MAX_RANGES + 1),
    ):
        check(copier, sources)
    assert library.launches == 0
    transposed = torch.zeros(128, 7, dtype=torch.bfloat16).T
    copier.prepare([transposed], 2)([first])  # a target that is not contiguous
    assert_same(transposed, first)
    copier._current_device = lambda: 1  # a launch would go to another device
    check(copier, make_tensors())
    assert library.launches == 0


def test_a_failed_launch_is_reported(mock: tuple[CudaInputCopier, MockLibrary]) -> None:
    copier, library = mock
    library.error = 700
    tensors = make_tensors()
    got = outcome(lambda: copier.prepare(tensors, 7)(tensors))
    assert got.startswith("RuntimeError: call of replay_copy: expected success, got CUDA error 700")
    assert "(made up). An earlier kernel may have failed" in got


def test_the_kernel_builds_without_spills(tmp_path: Path) -> None:
    reason = outcome(cuda_build.find_nvcc)
    if reason:
        pytest.skip(reason)
    for arch in ("80", "90"):
        library = cuda_build.build("replay_copy", ["cuda/replay_copy.cu"], arch, tmp_path)
        (kernel,) = cuda_build.resource_report(library)
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
        assert_interface(library, "replay_copy")
    assert ctypes.sizeof(replay_copy._Request) == 24 * MAX_RANGES + 16  # asserted there too


# -- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_outputs_are_cut_by_what_their_rows_count(static: bool, copy: bool) -> None:
    def step(bucket: int) -> Any:
        rows = torch.arange(bucket).repeat(2, 1).T.contiguous()
        fixed = torch.arange(4)
        return {"tokens": rows, "rest": (rows[: bucket // 2] * 2, fixed, None, "text")}

    made = {bucket: step(bucket) for bucket in (4, 8)}
    outputs = GraphOutputs(made, 2, copy=copy, static=static)
    for bucket, tokens in ((4, 2), (8, 6), (8, 0), (4, 2)):
        got = outputs.real(bucket, made[bucket], tokens)
        assert list(got) == ["tokens", "rest"]
        assert_same(got["tokens"], made[bucket]["tokens"][:tokens])
        half, fixed, *others = got["rest"]
        assert_same(half, made[bucket]["rest"][0][: tokens // 2])
        assert_same(fixed, torch.arange(4))  # as many rows as the first bucket, in every bucket
        assert others == [None, "text"]
        storages = {t.untyped_storage().data_ptr() for t in (got["tokens"], half, fixed)}
        own = {made[bucket]["tokens"].untyped_storage().data_ptr()}
        assert (storages & own == set()) == copy
        # One object of every call, or another each time.
        if not static:
            made[bucket] = step(bucket)
    alone = GraphOutputs({4: torch.ones(4, 2)}, 1, copy=copy, static=static)
    assert alone.real(4, torch.ones(4, 2), 3).shape == (3, 2)


def test_a_runner_that_hands_out_views_saves_the_copies() -> None:
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        layer = make_layer(context)
        kept = torch.zeros(8, 128, dtype=torch.bfloat16)

        def step(**inputs: Tensor) -> Tensor:
            y: Tensor = layer(**inputs)
            return kept[: y.shape[0]].copy_(y)

        def call(seed: int, **options: Any) -> tuple[Tensor, Tensor]:
            runner = mm.GraphRunner(step, batch(8), [8], context, **options)
            runner.capture(progress=False)
            return runner(num_tokens=5, **batch(5, seed)), runner(num_tokens=3, **batch(3, seed))

        def batch(tokens: int, seed: int = 0) -> dict[str, Tensor]:
            return named(random_inputs(context.config, tokens, seed=seed))

        first, second = call(1)
        assert first.data_ptr() != kept.data_ptr() != second.data_ptr()
        assert_same(first, layer(*batch(5, 1).values()))
        first, second = call(1, copy_outputs=False)
        assert first.data_ptr() == second.data_ptr() == kept.data_ptr()
        assert_same(second, layer(*batch(3, 1).values()))
        assert_same(first[:3], second)  # overwritten


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_random_ranges() -> None:
    """Any size and alignment, many blocks, every number of ranges, on a side stream too."""
    copier = input_copier(torch.zeros(1, dtype=torch.int32, device="cuda"))
    assert type(copier) is CudaInputCopier
    generator = torch.Generator().manual_seed(0)

    def pick(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for turn in range(200):
        sources, targets, wants = [], [], []
        for _ in range(pick(MAX_RANGES + 1)):
            size = (pick(40), pick(9000), pick(3_000_000))[pick(3)]
            offsets = (pick(17), pick(17)) if pick(2) else (4 * pick(4),) * 2
            source, target = (
                torch.randint(0, 255, (size + 64,), device="cuda").to(torch.uint8) for _ in range(2)
            )
            want = target.clone()
            want[offsets[1] : offsets[1] + size] = source[offsets[0] : offsets[0] + size]
            sources.append(source[offsets[0] : offsets[0] + size])
            targets.append((target, target[offsets[1] : offsets[1] + size]))
            wants.append(want)
        write = copier.prepare([view for _, view in targets], turn)
        stream = streams[turn % 2]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            write(sources)
        torch.cuda.synchronize()
        for (whole, _), want in zip(targets, wants, strict=True):
            assert torch.equal(whole, want)
        assert int(copier.num_valid) == turn


@pytest.mark.gpu
def test_gpu_takes_what_the_kernel_does_not() -> None:
    copier = input_copier(torch.zeros(1, dtype=torch.int32, device="cuda"))
    for device in ("cuda", "cpu"):
        check(copier, make_tensors(device))
    check(copier, [make_tensors("cuda")[0].T])


@pytest.mark.gpu
def test_gpu_is_one_launch() -> None:
    copier = input_copier(torch.zeros(1, dtype=torch.int32, device="cuda"))
    sources = make_tensors("cuda")
    write = copier.prepare([torch.empty_like(source) for source in sources], 7)
    write(sources)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            write(sources)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(names) == 3 and all("replay_copy" in name for name in names), names


@pytest.mark.gpu
def test_gpu_views_are_overwritten_and_copies_are_not() -> None:
    config = make_config(hidden_size=512, intermediate_size=256, num_experts=8)
    with mm.MegaMoEContext(config, device="cuda") as context:
        layer = make_layer(context)
        calls = [
            named(random_inputs(config, tokens, seed=tokens, device="cuda"))
            for tokens in (5, 8, 0, 3)
        ]
        for copy, mixed in itertools.product((True, False), (True, False)):
            runner = mm.GraphRunner(layer, calls[1], [8], context, copy_outputs=copy)
            runner.capture(progress=False)
            for call in calls:
                if mixed:  # one input that the kernel does not take
                    call = {**call, "topk_ids": call["topk_ids"].cpu()}
                tokens = call["hidden_states"].shape[0]
                y = runner(num_tokens=tokens, **call)
                again = runner(num_tokens=tokens, **call)
                assert y.shape[0] == tokens and torch.equal(y, again)
                assert copy or tokens == 0 or y.data_ptr() == again.data_ptr()
            first = runner(num_tokens=5, **calls[0])
            before = first.clone()
            runner(num_tokens=8, **calls[1])
            assert torch.equal(first, before) == copy
