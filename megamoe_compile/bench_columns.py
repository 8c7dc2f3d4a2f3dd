"""The columns of `megamoe bench`: the same model and step with four kinds of experts.

hf-eager     transformers' implementation "eager", a loop over experts, in bf16, nothing compiled
hf           its fastest implementation of those that run here, in bf16, compiled and captured
chain        FP8 experts as separate kernels (custom_ops/unfused_chain.py), compiled and captured
megamoe      `integrations.transformers.prepare`, compiled, captured by the GraphRunner

Attention, static cache and the order of a step are the same in all columns; Inductor compiles all
but the first in its default mode. The megamoe column alone has the routers of `fuse_routers`,
unless `Options.fuse_routers` is off. On a CPU nothing is captured, and a column times its compiled
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .bench_measure import (
    KernelShare,
    StepTime,
    host_microseconds,
    kernel_share,
    percent,
    start_profiler,
    step_bytes,
    time_steps,
)
from .bench_models import (
    Source,
    counting_experts,
    experts_shape,
    model_without_experts,
    set_bf16_experts,
    set_fp8_experts,
)
from .bench_step import BenchStep
from .config import Backend
from .custom_ops.errors import BackendUnavailable, mismatch
from .graph import GraphRunner
from .integrations.hf_experts import find_experts, is_experts, swiglu_limit
from .integrations.routers import FUSED, fuse_routers

COLUMNS = ("hf-eager", "hf", "chain", "megamoe")
HF_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # that need no kernel from elsewhere
# Its cost grows with every (token, expert) pair: once so many times slower than the best, it is not
# tried at larger batches. The others may lose at one token and win at eight.
PER_PAIR, HOPELESS = "batched_mm", 1.3
LEFT_BEHIND = 1e9  # bytes allocated before a column begins; cuBLAS keeps some per stream
TOKEN_SETS = 64
SAMPLED_STEPS = 3  # for the number of touched experts
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
    profile: bool = True  # on CUDA
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


@dataclasses.dataclass
class Cell:
    """One column at one batch size."""

    batch: int
    implementation: str
    time: StepTime
    tokens_per_s: float
    gigabytes: float  # read per step, at least
    gigabytes_per_s: float
    touched_experts: float  # per MoE layer and step
    compile_s: float | None
    capture_s: float | None
    peak_bytes: int | None = None  # allocated by torch while this cell was made, weights included
    host_us: float | None = None
    share: KernelShare | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ColumnResult:
    name: str
    cells: list[Cell] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None
    build_s: float | None = None
    build_peak_bytes: int | None = None
    buckets: list[int] = dataclasses.field(default_factory=list)  # captured together
    capture_s: float | None = None  # of all these buckets, after warm-up


def run_column(name: str, options: Options, say: Say, result: ColumnResult) -> None:
    """Build the column's model, and fill `result` cell by cell: it holds what came before a fault.

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
        run = {
            "hf-eager": _hf_eager,
            "hf": _hf_best,
            "chain": _chain,
            "megamoe": _megamoe,
        }[name]
        run(model, options, say, result, start, stack)


def free_memory(device: torch.device) -> None:
    """Drop compiled code and cached memory of a column that is done."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


# -- columns ---------------------------------------------------------------------------------------


def _hf_eager(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> None:
    set_bf16_experts(model, options.source, options.device)
    cast(Any, model).set_experts_implementation("eager")
    step = _built(model, options, say, result, start)
    for batch in options.batches:
        _reset_peak(options.device)
        touched = _touched(step, options, batch)
        run = _eager(step, options)
        _add(_cell(step, options, batch, "eager", run, touched, 2), options, say, result)


def _hf_best(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> None:
    set_bf16_experts(model, options.source, options.device)
    step = _built(model, options, say, result, start)
    candidates = list(HF_IMPLEMENTATIONS)
    result.notes.append("deepgemm and sonicmoe of transformers need kernels from its hub: not run")
    for batch in options.batches:
        cells, notes = [], []
        for name in list(candidates):
            cast(Any, model).set_experts_implementation(name)
            try:
                cell = _compiled_cell(step, options, batch, name, 2, say)
            except Exception as error:
                notes.append(f"{name}: {_short(error)}")
                say(f"  batch {batch}: {notes[-1]}")
                continue
            cells.append(cell)
            notes.append(f"{name}: {cell.time.median:.3f} ms")
            say(f"  candidate: {_line(cell).strip()}")
        if not cells:
            raise BackendUnavailable(
                mismatch(
                    "experts implementations of transformers",
                    f"one of {HF_IMPLEMENTATIONS} that runs",
                    "; ".join(notes),
                    "See the errors.",
                )
            )
        best = min(cells, key=lambda cell: cell.time.median)
        best.notes = notes
        _add(best, options, say, result)
        if any(
            cell.implementation == PER_PAIR and cell.time.median > HOPELESS * best.time.median
            for cell in cells
        ):
            candidates.remove(PER_PAIR)
            result.notes.append(f"{PER_PAIR} not tried above batch {batch}")


def _chain(
    model: nn.Module,
    options: Options,
    say: Say,
    result: ColumnResult,
    start: float,
    stack: contextlib.ExitStack,
) -> None:
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
    for batch in options.batches:
        _add(_compiled_cell(step, options, batch, "chain", 1, say), options, say, result)


def register_chain() -> str:
    """Register the unfused chain as an experts implementation of transformers; returns its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from .custom_ops import unfused_chain  # noqa: F401 - defines the op

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
) -> None:
    from .integrations.transformers import prepare

    set_fp8_experts(model, options.source, options.device)
    context = stack.enter_context(
        prepare(model, max_tokens_per_rank=options.buckets[-1], backend=options.backend)
    )
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
    touched = {batch: _touched(step, options, batch) for batch in options.batches}
    step.compile()
    compile_s: dict[int, float] = {}
    position = options.position()
    for bucket in options.buckets:
        began = time.perf_counter()
        step(options.tokens(bucket)[0], position)
        _synchronize(options.device)
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
    for batch in options.batches:

        def run(tokens: Tensor, batch: int = batch) -> object:
            return runner(num_tokens=batch, input_ids=tokens, position=position)

        cell = _cell(step, options, batch, captures[batch].backend, run, touched[batch], 1)
        cell.compile_s, cell.capture_s = compile_s[batch], captures[batch].capture_seconds
        _profile(cell, run, options)
        _add(cell, options, say, result)


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
    _synchronize(options.device)
    result.build_s = time.perf_counter() - start
    say(f"  built in {result.build_s:.1f} s")
    step = BenchStep(model, options.buckets[-1], options.context_length)
    step(options.tokens(1)[0], options.position())
    result.build_peak_bytes = _peak(options.device)
    _reset_peak(options.device)
    return step


def _add(cell: Cell, options: Options, say: Say, result: ColumnResult) -> None:
    result.cells.append(cell)
    say(_line(cell))
    options.keep(result)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _eager(step: BenchStep, options: Options) -> Step:
    position = options.position()
    return lambda tokens: step(tokens, position)


def _compiled_cell(
    step: BenchStep, options: Options, batch: int, name: str, weight_bytes: int, say: Say
) -> Cell:
    """Compile the step for one batch size, capture it by hand on CUDA, and measure."""
    torch._dynamo.reset()
    _reset_peak(options.device)
    touched = _touched(step, options, batch)
    step.compile()
    static, position = options.tokens(batch)[0].clone(), options.position()
    began = time.perf_counter()
    step(static, position)
    _synchronize(options.device)
    compile_s = time.perf_counter() - began
    say(f"  batch {batch}, {name}: compiled in {compile_s:.1f} s")
    if options.device.type != "cuda":
        cell = _cell(step, options, batch, name, _eager(step, options), touched, weight_bytes)
        cell.compile_s = compile_s
        return cell
    began = time.perf_counter()
    graph = _capture(lambda: step(static, position))
    capture_s = time.perf_counter() - began

    def replay(tokens: Tensor) -> None:
        static.copy_(tokens)
        graph.replay()

    cell = _cell(step, options, batch, name, replay, touched, weight_bytes)
    cell.compile_s, cell.capture_s = compile_s, capture_s
    _profile(cell, replay, options)
    return cell


def _capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Its outputs stay in the graph's pool: nobody reads them between replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        torch.cuda.graph(graph, stream=stream),
    ):
        call()
    torch.cuda.synchronize()
    return graph


def _touched(step: BenchStep, options: Options, batch: int) -> float:
    """Experts that one step touches, summed over its layers; by eager steps on the timed tokens."""
    tokens, position = options.tokens(batch), options.position()
    with torch.compiler.set_stance("force_eager"), counting_experts(step.model) as counts:
        for index in range(SAMPLED_STEPS):
            step(tokens[index], position)
    return sum(counts) / SAMPLED_STEPS


def _cell(
    step: BenchStep,
    options: Options,
    batch: int,
    implementation: str,
    run: Step,
    touched: float,
    weight_bytes: int,
) -> Cell:
    layers = sum(map(is_experts, step.model.modules()))
    _, hidden, intermediate = experts_shape(options.source.config)
    expert = 3 * hidden * intermediate * weight_bytes
    measured = time_steps(run, options.tokens(batch), options.steps, options.budget_s)
    read = step_bytes(step, batch, touched, expert)
    return Cell(
        batch,
        implementation,
        measured,
        tokens_per_s=batch / measured.median * 1e3,
        gigabytes=read / 1e9,
        gigabytes_per_s=read / 1e6 / measured.median,
        touched_experts=touched / layers,
        compile_s=None,
        capture_s=None,
        peak_bytes=_peak(options.device),
    )


def _profile(cell: Cell, run: Step, options: Options) -> None:
    if options.device.type == "cuda":
        tokens = options.tokens(cell.batch)
        cell.host_us = host_microseconds(run, tokens)
        if options.profile:
            cell.share = kernel_share(run, tokens)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(cell: Cell) -> str:
    share = "" if cell.share is None else f", MoE {percent(cell.share)} of kernel time"
    return (
        f"  batch {cell.batch}, {cell.implementation}: {cell.time.median:.3f} ms "
        f"(+-{cell.time.spread:.3f}), {cell.tokens_per_s:.1f} tokens/s{share}"
    )


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def run_columns(names: Sequence[str], options: Options, say: Say) -> Iterator[ColumnResult]:
    """Run columns one after another; each is yielded as it ends, failed ones with their error."""
    if options.profile and options.device.type == "cuda":
        start_profiler()
    for name in names:
        say(f"column {name}")
        result = ColumnResult(name)
        try:
            run_column(name, options, say, result)
        except Exception as error:  # one column's fault must not take the others' results
            result.error = _short(error)
            say(f"  failed: {result.error}")
        try:
            free_memory(options.device)
        except Exception as error:  # a CUDA error that stays: the results so far are still good
            result.error = result.error or _short(error)
        yield result
