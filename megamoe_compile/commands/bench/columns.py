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
from torch import Tensor

from ...capture.runner import GraphRunner
from ...config import Backend
from ...custom_ops.cuda.capture import capture
from ...custom_ops.cuda.graph_fills import instantiator
from ...engines.transformers.activation import swiglu_limit
from ...engines.transformers.experts import find_experts
from ...engines.transformers.routers import FUSED, fuse_routers
from ...errors import BackendUnavailable, mismatch
from .models import Source, model_without_experts, set_bf16_experts, set_fp8_experts
from .results import ColumnResult
from .step import BenchStep

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
        shape = (TOKEN_SETS, batch)
        drawn = torch.randint(
            vocabulary, shape, generator=generator, dtype=torch.int64, device="cpu"
        )
        return drawn.to(self.device)

    def position(self) -> Tensor:
        """The last one of the cache: a step attends to the whole context."""
        return torch.tensor([self.context_length - 1], dtype=torch.int64, device=self.device)


@dataclasses.dataclass(frozen=True)
class Run:
    """A column at one batch size, ready: `call(tokens)` is one step of int64 [B] tokens."""

    implementation: str
    call: Step
    compile_s: float | None = None
    capture_s: float | None = None
    memory: tuple[Tensor, ...] = ()  # what a graph reads by address, and nobody else may hold


class Column:
    """A column's model and step, built. A kind of column says what differs.

    Args:
        result: learns how it went. stack: closes what the column holds open.

    Attributes:
        implementations: of the experts; with several, the fastest counts.
        weight_bytes: of one weight of an expert.

    Raises:
        BackendUnavailable: the column cannot run here. Anything that a kernel raises.
    """

    implementations: tuple[str, ...]
    weight_bytes: int

    def __init__(
        self, options: Options, say: Say, result: ColumnResult, stack: contextlib.ExitStack
    ) -> None:
        start = time.perf_counter()
        self.options, self.say, self.result, self.stack = options, say, result, stack
        self.model: Any = model_without_experts(options.source, options.device, options.attention)
        self.set_experts()
        synchronize(options.device)
        result.build_s = time.perf_counter() - start
        say(f"  built in {result.build_s:.1f} s")
        self.step = BenchStep(self.model, options.buckets[-1], options.context_length)
        self.position = options.position()
        self.step(options.tokens(1)[0], self.position)  # allocates its cache
        result.build_peak_bytes = peak_bytes(options.device)
        reset_peak(options.device)
        self.prepare()

    def set_experts(self) -> None:
        """Give the model its experts."""
        raise NotImplementedError

    def prepare(self) -> None:
        """What all batch sizes share, once the step is built."""

    def ready(self, batch: int, implementation: str) -> Run:
        """Compile and capture for a batch size and one of the implementations."""
        raise NotImplementedError

    def run_step(self, tokens: Tensor) -> object:
        return self.step(tokens, self.position)


class EagerColumn(Column):
    """transformers' loop over experts, nothing compiled."""

    implementations, weight_bytes = ("eager",), 2

    def set_experts(self) -> None:
        set_bf16_experts(self.model, self.options.source, self.options.device)
        self.model.set_experts_implementation("eager")

    def ready(self, batch: int, implementation: str) -> Run:
        reset_peak(self.options.device)
        return Run(implementation, self.run_step)


class CapturedColumn(Column):
    """The step is compiled for each batch size, and captured by hand on CUDA."""

    def prepare(self) -> None:
        # Its fills become kernels, as the GraphRunner's do: only the experts should differ.
        self._instantiate = instantiator(self.options.device)

    def ready(self, batch: int, implementation: str) -> Run:
        options = self.options
        torch._dynamo.reset()
        reset_peak(options.device)
        self.step.compile()
        static = options.tokens(batch)[0].clone()
        began = time.perf_counter()
        self.run_step(static)
        synchronize(options.device)
        compile_s = time.perf_counter() - began
        self.say(f"  batch {batch}, {implementation}: compiled in {compile_s:.1f} s")
        if options.device.type != "cuda":
            return Run(implementation, self.run_step, compile_s)
        began = time.perf_counter()
        with torch.compiler.set_stance("fail_on_recompile"):  # in the warm-up too
            # Its outputs stay in the graph's pool: nobody reads them between replays.
            graph, _ = capture(lambda: self.run_step(static), instantiate=self._instantiate)
        synchronize(options.device)

        def replay(tokens: Tensor) -> None:
            static.copy_(tokens)
            graph.replay()

        return Run(
            implementation,
            replay,
            compile_s,
            time.perf_counter() - began,
            (static, self.position),
        )


class BestColumn(CapturedColumn):
    """The implementations of transformers that run without a kernel from elsewhere."""

    implementations, weight_bytes = HF_IMPLEMENTATIONS, 2

    def set_experts(self) -> None:
        set_bf16_experts(self.model, self.options.source, self.options.device)
        self.model.set_experts_implementation(self.implementations[0])
        self.result.notes.append(
            "deepgemm and sonicmoe of transformers need kernels from its hub: not run"
        )

    def ready(self, batch: int, implementation: str) -> Run:
        self.model.set_experts_implementation(implementation)
        return super().ready(batch, implementation)


class ChainColumn(CapturedColumn):
    """The unfused FP8 chain."""

    implementations, weight_bytes = ("chain",), 1

    def set_experts(self) -> None:
        device = self.options.device
        if device.type != "cuda":
            raise BackendUnavailable(
                mismatch("device of the chain", "cuda", device, "Leave the column out.")
            )
        name = register_chain()
        set_fp8_experts(self.model, self.options.source, device)
        for prefix, module in find_experts(self.model).items():
            module.config._experts_implementation = name
            module.megamoe_bench_limit = swiglu_limit(module, prefix)


class MegaMoEColumn(Column):
    """All buckets are compiled and captured at once: one GraphRunner serves all batch sizes."""

    implementations, weight_bytes = ("megamoe",), 1

    def set_experts(self) -> None:
        from ...engines.transformers.model import prepare

        options = self.options
        set_fp8_experts(self.model, options.source, options.device)
        self._context = prepare(
            self.model, max_tokens_per_rank=options.buckets[-1], backend=options.backend
        )
        self.stack.callback(self._context.close)
        self._routers = fuse_routers(self.model) if options.fuse_routers else {}

    def prepare(self) -> None:
        options, result, context = self.options, self.result, self._context
        result.notes.append(f"backend {context.backend}: {context.reason}")
        result.notes.append(_router_note(self._routers))
        result.notes.append(
            f"{context.buffer_bytes / 1e9:.2f} GB of the peak are the buffers of the context"
        )
        began = time.perf_counter()
        context.warmup(options.buckets)
        result.notes.append(
            f"kernels warm in {time.perf_counter() - began:.1f} s, not in compile s"
        )
        self.say(f"  {result.notes[-1]}")
        self.step.compile()
        self._compile_s: dict[int, float] = {}
        for bucket in options.buckets:
            began = time.perf_counter()
            self.run_step(options.tokens(bucket)[0])
            synchronize(options.device)
            self._compile_s[bucket] = time.perf_counter() - began
            self.say(f"  batch {bucket}: compiled in {self._compile_s[bucket]:.1f} s")
        self._runner = GraphRunner(
            self.step,
            {"input_ids": options.tokens(options.buckets[-1])[0], "position": self.position},
            options.buckets,
            context,
            rows={"position": None},
            copy_outputs=False,
        )
        began = time.perf_counter()
        self._runner.capture(progress=False)
        result.capture_s = time.perf_counter() - began
        result.buckets = list(options.buckets)
        self.say(f"  captured {len(options.buckets)} buckets in {result.capture_s:.1f} s")
        self._captures = {summary.bucket: summary for summary in self._runner.summary()}

    def ready(self, batch: int, implementation: str) -> Run:
        runner, position, made = self._runner, self.position, self._captures[batch]

        def call(tokens: Tensor) -> object:
            return runner(num_tokens=batch, input_ids=tokens, position=position)

        return Run(made.backend, call, self._compile_s[batch], made.capture_seconds)


KINDS: Mapping[str, type[Column]] = {
    "hf-eager": EagerColumn,
    "hf": BestColumn,
    "chain": ChainColumn,
    "megamoe": MegaMoEColumn,
}


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
    with contextlib.ExitStack() as stack:
        # One code of a layer is compiled once per batch size and implementation.
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield KINDS[name](options, say, result, stack)


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


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch has allocated there since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
