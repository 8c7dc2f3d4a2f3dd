"""Fills of captured graphs become kernels, and the graphs compute what they did."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_config, make_layer, named, outcome, random_inputs
from kernel_mocks import MockKernels, assert_interface
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.cuda import graph_fills
from megamoe_compile.custom_ops.cuda.graph_fills import KernelFills, instantiator
from megamoe_compile.custom_ops.errors import BackendUnavailable

CUDA = torch.device("cuda")  # on a CPU only its name is asked for
MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET


class MockGraph:
    def __init__(self) -> None:
        self.instantiated = 0

    def raw_cuda_graph(self) -> int:
        return 77

    def instantiate(self) -> None:
        self.instantiated += 1


def on_mocks(error: int = 0) -> tuple[KernelFills, Any]:
    def fill(graph: int, replaced: Any) -> int:
        assert graph == 77
        replaced._obj.value = 3
        return error

    library: Any = MockKernels("graph_fills", fill)
    fills = KernelFills(torch.device("cpu"), library)
    assert library.configs == [None]
    return fills, MockGraph()


def test_a_graph_is_changed_and_then_instantiated() -> None:
    fills, graph = on_mocks()
    fills(graph)
    assert fills.replaced == 3 and graph.instantiated == 1


def test_a_refused_change_is_reported_and_nothing_instantiated() -> None:
    fills, graph = on_mocks(error=801)
    got = outcome(lambda: fills(graph))
    assert got.startswith("RuntimeError: call of graph_fills: expected success, got CUDA error 801")
    assert "report it with the versions of torch" in got and graph.instantiated == 0


def test_only_cuda_with_a_compiler_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(graph_fills, "KernelFills", lambda device: made.append(device) or device)
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: Path("nvcc"))
    assert instantiator(torch.device("cpu")) is torch.cuda.CUDAGraph.instantiate and not made
    assert instantiator(CUDA) is CUDA and made == [CUDA]

    def none() -> Path:
        raise BackendUnavailable("no nvcc")

    monkeypatch.setattr(cuda_build, "find_nvcc", none)
    assert instantiator(CUDA) is torch.cuda.CUDAGraph.instantiate and made == [CUDA]


def test_the_kernels_build_without_spills(tmp_path: Path) -> None:
    reason = outcome(cuda_build.find_nvcc)
    if reason:
        pytest.skip(reason)
    for arch in ("80", "90"):
        library = cuda_build.build("graph_fills", ["cuda/graph_fills.cu"], arch, tmp_path)
        kernels = cuda_build.resource_report(library)
        assert len(kernels) == 4
        for kernel in kernels:
            assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
        assert_interface(library, "graph_fills")


# -- on a GPU -------------------------------------------------------------------------------------


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def kinds_of(graph: torch.cuda.CUDAGraph) -> Counter[int]:
    """Nodes of a captured graph, by CUgraphNodeType."""
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver().cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver().cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    kinds: Counter[int] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert driver().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds[kind.value] += 1
    return kinds


@dataclass(frozen=True)
class Fill:
    """`rows` of `width` units of `unit` bytes, `pitch` bytes apart, from `offset` on."""

    unit: int
    value: int
    offset: int
    width: int
    rows: int = 1
    pitch: int = 0

    def launch(self, target: Tensor) -> None:
        """On the current stream, by the driver."""
        name = f"D{8 * self.unit}Async"
        value = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}[self.unit](self.value)
        at = ctypes.c_uint64(target.data_ptr() + self.offset)
        width, stream = ctypes.c_size_t(self.width), torch.cuda.current_stream().cuda_stream
        if self.rows == 1:
            error = getattr(driver(), f"cuMemset{name}")(at, value, width, ctypes.c_void_p(stream))
        else:
            pitch, rows = ctypes.c_size_t(self.pitch), ctypes.c_size_t(self.rows)
            call = getattr(driver(), f"cuMemsetD2{name}")
            error = call(at, pitch, value, width, rows, ctypes.c_void_p(stream))
        assert error == 0

    def apply(self, target: Tensor) -> None:
        """The same on a CPU."""
        unit = torch.tensor(list(self.value.to_bytes(self.unit, "little")), dtype=torch.uint8)
        for row in range(self.rows):
            start = self.offset + row * self.pitch
            target[start : start + self.width * self.unit] = unit.repeat(self.width)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@pytest.mark.gpu
def test_gpu_fills_of_all_kinds_in_order() -> None:
    """Random units, alignments, pitches and sizes, one over the other: the last one shows."""
    fills, size = instantiator(CUDA), 1 << 21
    assert isinstance(fills, KernelFills)
    generator = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def random_fill() -> Fill:
        unit = (1, 2, 4)[pick(0, 3)]
        value = pick(0, 1 << 8 * unit)
        align = (unit, 16)[pick(0, 2)]
        offset = pick(0, size // 4) // align * align
        if pick(0, 2):
            return Fill(unit, value, offset, pick(1, (8, 5000, size // 4 // unit)[pick(0, 3)]))
        width, rows = pick(1, 300), pick(2, 200)
        pitch = (width * unit + pick(0, 200) + align - 1) // align * align
        return Fill(unit, value, offset, width, rows, pitch)

    for _ in range(20):
        chain = [random_fill() for _ in range(24)]
        target = torch.empty(size, dtype=torch.uint8, device="cuda")

        def run(chain: list[Fill] = chain, target: Tensor = target) -> None:
            for fill in chain:
                fill.launch(target)

        graph = captured(run)
        assert kinds_of(graph)[MEMSET] == len(chain)
        fills(graph)
        assert fills.replaced == len(chain) and kinds_of(graph)[MEMSET] == 0
        for poison in (0x55, 0xAA):
            want = torch.full((size,), poison, dtype=torch.uint8)
            for fill in chain:
                fill.apply(want)
            target.fill_(poison)
            graph.replay()
            assert torch.equal(target.cpu(), want), chain


@pytest.mark.gpu
def test_gpu_many_rows() -> None:
    """More rows than a grid has in y."""
    fills, rows = instantiator(CUDA), 70_000
    target = torch.zeros(rows * 8, dtype=torch.uint8, device="cuda")
    fill = Fill(4, 0x01020304, 4, 1, rows, 8)
    graph = captured(lambda: fill.launch(target))
    fills(graph)
    assert kinds_of(graph)[MEMSET] == 0
    target.zero_()
    graph.replay()
    want = torch.tensor([0, 0x01020304], dtype=torch.int32).repeat(rows)
    assert torch.equal(target.view(torch.int32).cpu(), want)


@pytest.mark.gpu
def test_gpu_forks_and_joins_keep_their_order() -> None:
    """A fill with two predecessors and two successors, among large copies that would race."""
    fills, size = instantiator(CUDA), 1 << 24
    x, y, shared = (torch.zeros(size, dtype=torch.int32, device="cuda") for _ in range(3))
    results = [torch.zeros_like(shared) for _ in range(4)]

    def run() -> None:
        first, second = torch.cuda.current_stream(), side
        second.wait_stream(first)
        results[0].copy_(shared)  # reads what the fill then overwrites
        with torch.cuda.stream(second):
            results[1].copy_(shared)
        first.wait_stream(second)
        Fill(4, 5, 0, size).launch(shared)
        second.wait_stream(first)
        results[2].copy_(shared).add_(x)
        with torch.cuda.stream(second):
            results[3].copy_(shared).add_(y)
        first.wait_stream(second)

    side = torch.cuda.Stream()
    graph = captured(run)
    assert kinds_of(graph)[MEMSET] == 1
    fills(graph)
    assert kinds_of(graph)[MEMSET] == 0
    for turn in range(20):
        x.fill_(turn)
        y.fill_(2 * turn)
        shared.fill_(7)
        for result in results:
            result.fill_(-1)
        graph.replay()
        wants = (7, 7, 5 + turn, 5 + 2 * turn)
        for result, want in zip(results, wants, strict=True):
            assert bool((result == want).all()), (turn, want)


@pytest.mark.gpu
def test_gpu_memory_of_the_host_stays_a_fill() -> None:
    fills = instantiator(CUDA)
    assert isinstance(fills, KernelFills)
    target = torch.zeros(64, dtype=torch.uint8).pin_memory()
    graph = captured(lambda: Fill(1, 9, 0, 64).launch(target))
    fills(graph)
    assert fills.replaced == 0 and kinds_of(graph)[MEMSET] == 1
    target.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((target == 9).all())


@pytest.mark.gpu
def test_gpu_runner_replays_kernels_for_fills() -> None:
    config = make_config(hidden_size=512, intermediate_size=256, num_experts=8)
    with mm.MegaMoEContext(config, device="cuda") as context:
        layer = make_layer(context)
        bias = torch.zeros(8, 512, dtype=torch.bfloat16, device="cuda")

        def step(**inputs: Tensor) -> Tensor:
            Fill(2, 0x3F80, 0, bias.numel()).launch(bias)  # ones
            y: Tensor = layer(**inputs) + bias[: inputs["hidden_states"].shape[0]]
            Fill(2, 0x4000, 0, bias.numel()).launch(bias)
            return y

        example = named(random_inputs(config, 8, device="cuda"))
        runner = mm.GraphRunner(step, example, [4, 8], context)
        runner.capture(progress=False)
        assert isinstance(runner._instantiate, KernelFills) and runner._instantiate.replaced == 2
        for seed, tokens in enumerate((3, 8, 1, 0, 5)):
            inputs = named(random_inputs(config, tokens, seed=seed, device="cuda"))
            bias.fill_(float("nan"))
            got = runner(num_tokens=tokens, **inputs)
            assert torch.equal(got, layer(**inputs) + 1)
            assert bool((bias == 2).all())
