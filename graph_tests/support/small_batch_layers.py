"""Layers of one SmallBatch for its tests: on the GPU, or as csrc/small_batch compiled for the CPU.

Without a GPU csrc/small_batch is compiled with g++, and every CUDA thread is a fiber (cpu_gpu.hpp
says what that checks and what not).
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, relative_error
from torch import Tensor

from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.reference.recipe import (
    interleave_gate_up,
    moe_reference,
    quantize_blocks,
)
from megamoe_compile.custom_ops.small_batch.kernel import INTERMEDIATE_GROUP, SmallBatch, Tuning

SUPPORT = Path(__file__).resolve().parent
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_sm90 = pytest.mark.skipif(not SM90, reason="needs an SM90 GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_sm90])]
# Beside the recipe: fp32 sums in another order, and the matrix units' own sums of 128 products. A
# sum that lands on the other side of a rounding step of the intermediate moves it by one step.
TOLERANCE = 0.01
VARIANTS = 9  # kVariants, each in two flavours


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int = 256
    intermediate: int = 256
    experts: int = 8
    top_k: int = 2
    limit: float | None = 10.0
    alpha: float = 1.0
    beta: float = 0.0
    bias: float | None = None  # standard deviation of the biases
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    num_valid: int | None = None
    shared: int = 0
    scaling: float = 1.0
    layout: str = "dense"  # dense | strided | odd (rows not 16-byte aligned)
    routing: str = "random"  # or one (expert 1 has slot 0), same (all slots), holes, none (all -1)
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{name}={value}".replace("torch.", "")
            for name, value in asdict(self).items()
            if name == "tokens" or value != getattr(DEFAULT, name)
        ]
        return "-".join(changed)


DEFAULT = Case(0)


@functools.lru_cache(maxsize=8)
def weights_of(experts: int, hidden: int, intermediate: int, device: str) -> tuple[Tensor, ...]:
    """Prepared w13, w13_scale, w2, w2_scale."""
    generator = torch.Generator(device).manual_seed(experts)
    random = functools.partial(torch.randn, generator=generator, device=device)
    parts: list[tuple[Tensor, ...]] = []
    for _ in range(experts):
        q13, s13 = quantize_blocks(random(2 * intermediate, hidden) * hidden**-0.5)
        q2, s2 = quantize_blocks(random(hidden, intermediate) * intermediate**-0.5)
        q13 = interleave_gate_up(q13.view(torch.uint8)).view(q13.dtype)
        parts.append((q13, s13, q2, s2))
    return tuple(
        torch.stack([t.view(torch.uint8) for t in ts]).view(ts[0].dtype)
        if ts[0].dtype is torch.float8_e4m3fn
        else torch.stack(ts)
        for ts in zip(*parts, strict=True)
    )


def biases_of(case: Case, device: str) -> tuple[Tensor, ...]:
    """Prepared w13_bias and w2_bias, or nothing."""
    if case.bias is None:
        return ()
    experts = case.experts + case.shared
    generator = torch.Generator().manual_seed(case.seed + experts)
    gate_up = torch.randn(experts, 2, case.intermediate // 8, 8, generator=generator)
    down = torch.randn(experts, case.hidden, generator=generator)
    prepared = gate_up.transpose(1, 2).reshape(experts, 2 * case.intermediate)
    return tuple((case.bias * bias).to(device) for bias in (prepared, down))


@dataclass
class Layer:
    """A case's kernels, inputs and weights."""

    case: Case
    device: str
    op: SmallBatch
    x: Tensor
    ids: Tensor
    routing: Tensor
    num_valid: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    launch_count: Tensor
    invalid_count: Tensor
    library: ctypes.CDLL | None

    def __call__(self, y: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        """Poisoned output, one call, synchronized."""
        x = self.x[rows]
        if y is None:
            y = torch.full(x.shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        for name, workspace in self.op._workspaces.items():
            if name != "counters":
                workspace.view(torch.uint8).fill_(0xFF)  # NaN of each type
        self.launch(y, rows)
        self.synchronize()
        return y

    def launch(self, y: Tensor, rows: slice = slice(None)) -> None:
        stream = 0 if self.device == "cpu" else torch.cuda.current_stream().cuda_stream
        self.op(
            self.x[rows],
            self.ids[rows],
            self.routing[rows],
            self.num_valid,
            self.launch_count,
            *self.weights,
            y,
            stream,
            *self.biases,
        )

    def synchronize(self) -> None:
        if self.library is not None:
            self.library.emulator_synchronize()
        else:
            torch.cuda.synchronize()

    def reference(self, *, recipe: bool = True) -> Tensor:
        return moe_reference(
            self.x,
            self.ids,
            self.routing,
            *self.weights,
            *self.biases,
            num_valid=int(self.num_valid),
            swiglu_limit=self.case.limit,
            swiglu_alpha=self.case.alpha,
            swiglu_beta=self.case.beta,
            routed_scaling_factor=self.case.scaling,
            num_shared_experts=self.case.shared,
            **(dict(intermediate_group=INTERMEDIATE_GROUP) if recipe else dict(quantize=False)),
        )


def make_inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.seed * 1009 + case.tokens)
    tokens, hidden = case.tokens, case.hidden
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device)
    if case.layout == "strided":
        x = torch.cat([x, x], dim=1)[:, :hidden]
    elif case.layout == "odd":
        wide = torch.zeros(tokens, hidden + 3, dtype=x.dtype, device=device)
        wide[:, 1 : hidden + 1] = x
        x = wide[:, 1 : hidden + 1]
    scores = torch.rand(tokens, case.experts, generator=generator)
    routing, ids = scores.topk(case.top_k, dim=-1)
    if case.routing == "one":
        ids[:, 0] = 1
        ids[:, 1:] = -1
    elif case.routing == "same":
        ids[:] = 1
    elif case.routing == "holes":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    elif case.routing == "none":
        ids[:] = -1
    valid = tokens if case.num_valid is None else case.num_valid
    return (
        x,
        ids.to(device, case.ids),
        (routing / max(case.top_k, 1)).to(device, case.weights),
        torch.tensor([valid], dtype=torch.int32, device=device),
    )


def make_op(device: str, library: ctypes.CDLL | None, **options: Any) -> SmallBatch:
    """Of a small geometry where `options` says nothing else; five blocks on the emulated GPU."""
    defaults = dict(hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, capacity=1)
    defaults |= dict(tuning=Tuning(num_sms=5 if library is not None else None))
    return SmallBatch(device=torch.device(device), library=library, **{**defaults, **options})


def make_layer(
    case: Case, device: str, library: ctypes.CDLL | None, tuning: Tuning | None = None
) -> Layer:
    count, invalid = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    op = make_op(
        device,
        library,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_experts=case.experts,
        num_shared_experts=case.shared,
        top_k=case.top_k,
        capacity=case.tokens,
        swiglu_limit=case.limit,
        swiglu_alpha=case.alpha,
        swiglu_beta=case.beta,
        expert_bias=case.bias is not None,
        routed_scaling_factor=case.scaling,
        invalid_count=invalid,
        **({} if tuning is None else dict(tuning=tuning)),
    )
    weights = weights_of(case.experts + case.shared, case.hidden, case.intermediate, device)
    inputs = make_inputs(case, device)
    biases = biases_of(case, device)
    return Layer(case, device, op, *inputs, weights, biases, count, invalid, library)


Backend = tuple[str, ctypes.CDLL | None]


@functools.cache
def emulated() -> ctypes.CDLL:
    """csrc/small_batch/small_batch.cu for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    try:
        include = cuda_build.find_nvcc().resolve().parent.parent / "include"
    except BackendUnavailable as error:
        pytest.skip(f"CUDA headers: {error}")
    if not (include / "cuda_fp8.h").exists():
        include = Path("/usr/local/cuda/include")
    if not (include / "cuda_fp8.h").exists():
        pytest.skip(f"CUDA headers are not at {include}")
    folder = Path(tempfile.mkdtemp(prefix="cpu_gpu-"))
    library = folder / "small_batch.so"
    command = ["g++", "-O1", "-std=gnu++20", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-psabi"]
    command.append("-Wl,-Bsymbolic")  # our cuda* functions, not those of a CUDA build of torch
    command += [f"-I{include}", "-o", str(library), str(SUPPORT / "cpu_gpu.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_seed.argtypes = (ctypes.c_uint64,)
    loaded.emulator_variant.argtypes = (ctypes.c_void_p, ctypes.c_int)
    loaded.emulator_is_general.argtypes = (ctypes.c_void_p,)
    shutil.rmtree(folder)  # it stays loaded
    return loaded


def backend_of(device: str) -> Backend:
    if device == "cuda":
        return "cuda", None
    library = emulated()
    library.emulator_seed(7)
    return "cpu", library


def check(layer: Layer, want: Tensor | None = None) -> Tensor:
    """The output of one call, and that it is `want`: the recipe's, if it is left out."""
    y = layer()
    assert bool(y.isfinite().all()), "an element was not written, or is not finite"
    assert relative_error(y, layer.reference() if want is None else want) <= TOLERANCE
    assert int(layer.launch_count) == 1
    assert not layer.op._workspaces["counters"].any(), "counters are left for the next launch"
    skipped = (layer.ids == -1).all(dim=1)
    skipped |= torch.arange(layer.case.tokens, device=y.device) >= layer.num_valid
    if not layer.case.shared:
        assert not y[skipped].any(), "a row without an expert is not zero"
    return y


def variants_of(cases: list[Case]) -> set[int]:
    """Numbers of the variants that take them."""
    library = emulated()
    return {
        library.emulator_variant(make_layer(case, "cpu", library).op._config_address, case.tokens)
        for case in cases
    }


# -- on a GPU --------------------------------------------------------------------------------------


def check_same_bits(layer: Layer, first: Tensor, runs: int = 200) -> None:
    """Launches behind one another give the bits of `first`, each time."""
    results = [torch.full_like(first, float("nan")) for _ in range(runs)]
    for y in results:
        layer.launch(y)
    torch.cuda.synchronize()
    for y in results:
        assert_same(y, first)


def replays_of_a_chain(layer: Layer, case: Case, launches: int = 5) -> Iterator[list[Tensor]]:
    """The outputs of a graph of launches, replayed with other inputs and another num_valid each
    time; what the caller changes in between is seen too."""
    outputs = [torch.empty_like(layer.x) for _ in range(launches)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for y in outputs:
                layer.launch(y)
    for seed, valid in ((1, 8), (2, 3), (3, 0), (4, 8)):
        x, ids, routing, _ = make_inputs(replace(case, seed=seed), "cuda")
        layer.x.copy_(x)
        layer.ids.copy_(ids)
        layer.routing.copy_(routing)
        layer.num_valid.fill_(valid)
        for y in outputs:
            y.fill_(float("nan"))
        before = int(layer.launch_count)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert int(layer.launch_count) == before + launches
        yield outputs
