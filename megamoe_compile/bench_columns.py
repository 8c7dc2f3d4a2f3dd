"""The columns of `megamoe bench`: the same model and step with four kinds of experts.

hf-eager     transformers as it is: its default experts, in bf16, nothing compiled
hf           its fastest implementation of those that run here, in bf16, compiled and captured
chain        FP8 experts as separate kernels (custom_ops/unfused_chain.py), compiled and captured
megamoe      `integrations.transformers.prepare`, compiled, captured by the GraphRunner

On a CPU nothing is captured, and a column times its compiled step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
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
    model_without_experts,
    set_bf16_experts,
    set_fp8_experts,
)
from .bench_step import BenchStep
from .config import Backend
from .custom_ops.errors import BackendUnavailable, mismatch
from .graph import GraphRunner

COLUMNS = ("hf-eager", "hf", "chain", "megamoe")
HF_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # that need no kernel from elsewhere
HOPELESS = 1.3  # times slower than the best at a smaller batch: not tried at larger ones
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
    peak_bytes: int | None = None
    buckets: list[int] = dataclasses.field(default_factory=list)  # captured together
    capture_s: float | None = None  # of all these buckets, after warm-up


def run_column(name: str, options: Options, say: Say, result: ColumnResult) -> None:
    """Build the column's model, and fill `result` cell by cell: it holds what came before a fault.

    Raises:
        BackendUnavailable: the column cannot run here. Anything that a kernel or a compiler raises.
    """
    cuda = options.device.type == "cuda"
    if cuda:
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
        try:
            run(model, options, say, result, start, stack)
        finally:
            if cuda:
                result.peak_bytes = torch.cuda.max_memory_allocated(options.device)


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
        touched = _touched(step, options, batch)
        run = _eager(step, options)
        cell = _cell(step, options, batch, "eager", run, touched, 2)
        result.cells.append(cell)
        say(_line(cell))


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
                candidates.remove(name)
                continue
            cells.append(cell)
            notes.append(f"{name}: {cell.time.median:.3f} ms")
            say(_line(cell))
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
        result.cells.append(best)
        slow = [c for c in cells if c.time.median > HOPELESS * best.time.median]
        for cell in slow:
            candidates.remove(cell.implementation)


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
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            cast(Any, module).config._experts_implementation = name
    step = _built(model, options, say, result, start)
    for batch in options.batches:
        cell = _compiled_cell(step, options, batch, "chain", 1, say)
        result.cells.append(cell)
        say(_line(cell))


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
                None,
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
    from .integrations.routers import fuse_routers
    from .integrations.transformers import prepare

    set_fp8_experts(model, options.source, options.device)
    context = stack.enter_context(
        prepare(model, max_tokens_per_rank=options.buckets[-1], backend=options.backend)
    )
    routers = sorted(set(fuse_routers(model).values()))
    step = _built(model, options, say, result, start)
    result.notes.append(f"backend {context.backend}: {context.reason}")
    result.notes.append(f"routers: {', '.join(routers)}")
    result.notes.append(f"buffers of the context: {context.buffer_bytes} bytes")
    began = time.perf_counter()
    context.warmup(options.buckets)
    say(f"  kernels warm in {time.perf_counter() - began:.1f} s")
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
        result.cells.append(cell)
        say(_line(cell))


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
    return step


def _eager(step: BenchStep, options: Options) -> Step:
    position = options.position()
    return lambda tokens: step(tokens, position)


def _compiled_cell(
    step: BenchStep, options: Options, batch: int, name: str, weight_bytes: int, say: Say
) -> Cell:
    """Compile the step for one batch size, capture it by hand on CUDA, and measure."""
    torch._dynamo.reset()
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
    config = options.source.config.get_text_config()
    layers = sum(
        hasattr(m, "is_transposed") and hasattr(m, "has_gate") for m in step.model.modules()
    )
    expert = 3 * config.hidden_size * config.moe_intermediate_size * weight_bytes
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
        free_memory(options.device)
        yield result
