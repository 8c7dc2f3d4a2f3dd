"""The columns of `megamoe bench`: the same model and step with four kinds of experts.

hf-eager     transformers' implementation "eager", a loop over experts, in bf16, nothing compiled
hf           its fastest implementation of those that run here, in bf16, compiled and captured
chain        FP8 experts as separate kernels (custom_ops/unfused/chain.py), compiled and captured
megamoe      `engines.transformers.prepare`, compiled, captured by the GraphRunner

Attention, static cache and the order of a step are the same in all columns; Inductor compiles all
but the first in its default mode. The megamoe column alone has the routers of `fuse_routers`,
unless `Options.fuse_routers` is off. On a CPU nothing is captured, and a column's call is its
compiled step. What is timed and what is profiled is in bench_passes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...capture.runner import GraphRunner
from ...config import Backend
from ...custom_ops.cuda.graph_fills import instantiator
from ...custom_ops.cuda.timing import capture
from ...engines.transformers.activation import swiglu_limit
from ...engines.transformers.experts import find_experts
from ...engines.transformers.routers import FUSED, fuse_routers
from ...errors import BackendUnavailable, mismatch
from .models import Source, model_without_experts, set_bf16_experts, set_fp8_experts
from .results import ColumnResult
from .step import BenchStep

COLUMNS = ("hf-eager", "hf", "chain", "megamoe")
HF_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # that need no kernel from elsewhere
LEFT_BEHIND = 1e9  # bytes allocated before a column begins; cuBLAS keeps some per stream
TOKEN_SETS = 64
Step = Callable[[Tensor], object]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What all columns share."""

    source: Source
    device: torch.device
    batches: tuple[int, ...]  # ascending
    buckets: tuple[int, ...]  # of the GraphRunner; all batches among them
    context_length: int
    steps: int
    budget_s: float  # of one timing
    attention: str
    backend: Backend
    seed: int
    fuse_routers: bool = True  # of the megamoe column
    keep: Callable[[ColumnResult], None] = lambda result: None  # called after every cell

    def tokens(self, batch: int) -> Tensor:
        """Random tokens, int64 [N, B], the same for all columns."""
        generator = torch.Generator().manual_seed(self.seed + batch)
        vocabulary = self.source.config.get_text_config().vocab_size
        drawn = torch.randint(vocabulary, (TOKEN_SETS, batch), generator=generator)
        return drawn.to(self.device)

    def position(self) -> Tensor:
        """The last one of the cache: a step attends to the whole context."""
        return torch.tensor([self.context_length - 1], device=self.device)


@dataclasses.dataclass(frozen=True)
class Run:
    """A column at one batch size, ready: `call(tokens)` is one step of int64 [B] tokens."""

    implementation: str
    call: Step
    compile_s: float | None = None
    capture_s: float | None = None
    memory: tuple[Tensor, ...] = ()  # what a graph reads by address, and nobody else may hold


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's model, built; `ready` compiles and captures it for a batch size."""

    step: BenchStep
    implementations: tuple[str, ...]  # of the experts; with several, the fastest counts
    weight_bytes: int  # of one weight of an expert
    ready: Callable[[int, str], Run]  # of a batch size and an implementation


@contextlib.contextmanager
def built_column(name: str, options: Options, say: Say, result: ColumnResult) -> Iterator[Column]:
    """Build the column's model, and say in `result` how it went. Its memory is freed by
    `free_memory` once the caller has dropped the column.

    Raises:
        BackendUnavailable: the column cannot run here. Anything that a kernel or a compiler raises.
    """
    if options.device.type == "cuda":
        left = torch.cuda.memory_allocated(options.device)
        if left > LEFT_BEHIND:
            result.notes.append(f"{left / 1e9:.1f} GB were allocated before this column began")
        torch.cuda.reset_peak_memory_stats(options.device)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # One code of a layer is compiled once per batch size and implementation.
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        model = model_without_experts(options.source, options.device, options.attention)
        build = {"hf-eager": _hf_eager, "hf": _hf_best, "chain": _chain, "megamoe": _megamoe}[name]
        yield build(model, options, say, result, start, stack)


# -- columns ---------------------------------------------------------------------------------------


def _hf_eager(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> Column:
    set_bf16_experts(model, options.source, options.device)
    cast(Any, model).set_experts_implementation("eager")
    step = _built(model, options, say, result, start)
    call = _with_position(step, options)

    def ready(batch: int, implementation: str) -> Run:
        reset_peak(options.device)
        return Run(implementation, call)

    return Column(step, ("eager",), 2, ready)


def _hf_best(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> Column:
    set_bf16_experts(model, options.source, options.device)
    cast(Any, model).set_experts_implementation(HF_IMPLEMENTATIONS[0])
    step = _built(model, options, say, result, start)
    result.notes.append("deepgemm and sonicmoe of transformers need kernels from its hub: not run")

    def ready(batch: int, implementation: str) -> Run:
        cast(Any, model).set_experts_implementation(implementation)
        return _captured(step, options, batch, implementation, say)

    return Column(step, HF_IMPLEMENTATIONS, 2, ready)


def _chain(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> Column:
    if options.device.type != "cuda":
        raise BackendUnavailable(
            mismatch("device of the chain", "cuda", options.device, "Leave the column out.")
        )
    name = register_chain()
    set_fp8_experts(model, options.source, options.device)
    for prefix, module in find_experts(model).items():
        module.config._experts_implementation = name
        module.megamoe_bench_limit = swiglu_limit(module, prefix)
    step = _built(model, options, say, result, start)
    return Column(
        step,
        ("chain",),
        1,
        lambda batch, implementation: _captured(step, options, batch, implementation, say),
    )


def register_chain() -> str:
    """Register the unfused chain as an experts implementation of transformers; returns its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from ...custom_ops.unfused import chain as unfused_chain  # noqa: F401 - defines the op

    def forward(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return cast(
            Tensor,
            torch.ops.megamoe_bench.unfused_moe(
                x,
                ids,
                weights,
                module.gate_up_proj,
                module.gate_up_proj_scale_inv,
                module.down_proj,
                module.down_proj_scale_inv,
                module.megamoe_bench_limit,
            ),
        )

    ALL_EXPERTS_FUNCTIONS.register("megamoe_bench_chain", forward)
    return "megamoe_bench_chain"


def _megamoe(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> Column:
    """All buckets are compiled and captured at once: one GraphRunner serves all batch sizes."""
    from ...engines.transformers.model import prepare

    set_fp8_experts(model, options.source, options.device)
    context = prepare(model, max_tokens_per_rank=options.buckets[-1], backend=options.backend)
    stack.callback(context.close)
    routers = fuse_routers(model) if options.fuse_routers else {}
    step = _built(model, options, say, result, start)
    result.notes.append(f"backend {context.backend}: {context.reason}")
    result.notes.append(_router_note(routers))
    result.notes.append(
        f"{context.buffer_bytes / 1e9:.2f} GB of the peak are the buffers of the context"
    )
    began = time.perf_counter()
    context.warmup(options.buckets)
    result.notes.append(f"kernels warm in {time.perf_counter() - began:.1f} s, not in compile s")
    say(f"  {result.notes[-1]}")
    step.compile()
    compile_s: dict[int, float] = {}
    position = options.position()
    for bucket in options.buckets:
        began = time.perf_counter()
        step(options.tokens(bucket)[0], position)
        synchronize(options.device)
        compile_s[bucket] = time.perf_counter() - began
        say(f"  batch {bucket}: compiled in {compile_s[bucket]:.1f} s")
    runner = GraphRunner(
        step,
        {"input_ids": options.tokens(options.buckets[-1])[0], "position": position},
        options.buckets,
        context,
        rows={"position": None},
        copy_outputs=False,
    )
    began = time.perf_counter()
    runner.capture(progress=False)
    result.capture_s = time.perf_counter() - began
    result.buckets = list(options.buckets)
    say(f"  captured {len(options.buckets)} buckets in {result.capture_s:.1f} s")
    captures = {summary.bucket: summary for summary in runner.summary()}

    def ready(batch: int, implementation: str) -> Run:
        def call(tokens: Tensor) -> object:
            return runner(num_tokens=batch, input_ids=tokens, position=position)

        made = captures[batch]
        return Run(made.backend, call, compile_s[batch], made.capture_seconds)

    return Column(step, ("megamoe",), 1, ready)


def _router_note(routers: Mapping[str, str]) -> str:
    """What `fuse_routers` did, in words for the table."""
    fused = sum(why == FUSED for why in routers.values())
    others = sorted({why for why in routers.values() if why != FUSED})
    if not fused:
        return "routers as in all columns" + "".join(f"; {why}" for why in others)
    return (
        f"{fused} of {len(routers)} routers are one kernel after their GEMM, in this column only: "
        "the others have what Inductor makes of transformers' routers (compare: --no-fuse-routers)"
        + "".join(f"; the rest: {why}" for why in others)
    )


# -- steps -----------------------------------------------------------------------------------------


def _built(
    model: nn.Module, options: Options, say: Say, result: ColumnResult, start: float
) -> BenchStep:
    """The step, with its cache allocated by one eager call."""
    synchronize(options.device)
    result.build_s = time.perf_counter() - start
    say(f"  built in {result.build_s:.1f} s")
    step = BenchStep(model, options.buckets[-1], options.context_length)
    step(options.tokens(1)[0], options.position())
    result.build_peak_bytes = peak_bytes(options.device)
    reset_peak(options.device)
    return step


def _with_position(step: BenchStep, options: Options) -> Step:
    position = options.position()
    return lambda tokens: step(tokens, position)


def _captured(step: BenchStep, options: Options, batch: int, name: str, say: Say) -> Run:
    """Compile the step for one batch size, and capture it by hand on CUDA."""
    torch._dynamo.reset()
    reset_peak(options.device)
    step.compile()
    static, position = options.tokens(batch)[0].clone(), options.position()
    began = time.perf_counter()
    step(static, position)
    synchronize(options.device)
    compile_s = time.perf_counter() - began
    say(f"  batch {batch}, {name}: compiled in {compile_s:.1f} s")
    if options.device.type != "cuda":
        return Run(name, _with_position(step, options), compile_s)
    began = time.perf_counter()
    with torch.compiler.set_stance("fail_on_recompile"):
        # Its outputs stay in the graph's pool: nobody reads them between replays.
        # Its fills become kernels, as the GraphRunner's do: only the experts should differ.
        graph = capture([lambda: step(static, position)], instantiator(options.device))
    synchronize(options.device)

    def replay(tokens: Tensor) -> None:
        static.copy_(tokens)
        graph.replay()

    return Run(name, replay, compile_s, time.perf_counter() - began, (static, position))


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch has allocated there since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
