"""GraphRunner: one captured graph per bucket of tokens, and the rules that keep replay right."""

from __future__ import annotations

import bisect
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..context import ALL_VALID
from ..custom_ops.cuda.capture import capture
from ..custom_ops.cuda.graph_fills import instantiator
from ..custom_ops.cuda.replay_copy import Write, input_copier
from ..errors import CapacityError, NotWarmedUp, as_int, is_int, mismatch
from ..parallel.agreement import agreed, check_group, check_same
from ..parallel.step_plan import StepPlan
from ..parallel.step_settings import check_buckets
from .contexts import AnyContext
from .outputs import GraphOutputs
from .report import BucketSummary, compiled_graphs, progress_bar
from .watched import WatchedTensors, builds_native_check

Rows = Literal["tokens", "requests"]

TIMED_REPLAYS = 5  # the same on every rank: launches must stay equal


@dataclasses.dataclass
class _Captured:
    run: Callable[[], Any]  # returns the output tree: of the graph, or of this run on a CPU
    summary: BucketSummary


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What a call of some number of tokens passes, where it is copied, and what copies it."""

    shapes: dict[str, tuple[torch.Size, torch.dtype]]
    targets: dict[str, Tensor]
    write: Write


class GraphRunner:
    """Runs `step` from static buffers, once per bucket captured, for any number of tokens.

    A call copies its inputs into static buffers, writes the number of real tokens on the device,
    replays the smallest bucket that holds them, and hands out copies of the real rows. Nothing on
    that way waits for the device. On a CPU there is nothing to capture: the (compiled) step runs
    on the same static buffers, so that every other rule is the same.

    Args:
        step: called as step(**inputs); for CUDA, eager or compiled in default mode (not
            reduce-overhead, which captures on its own). Its outputs are tensors in any container.
        example_inputs: one example per input, valid data: it fills the static buffers, and warm-up
            and capture run on it (a step that writes a KV cache writes it there).
        buckets: ascending numbers of tokens.
        context: the step's context, or MegaMoEContexts where its layers have several geometries.
            With several ranks every rank makes the same calls.
        rows: per input, what dimension 0 counts: "tokens" (the default), "requests" (tokens /
            width), or None for an input of fixed shape.
        width: tokens of one request, 1 + draft tokens under speculative decoding.
        above: what a call above the largest bucket does: "raise", or "eager".
        copy_outputs: False hands out views of the graph's own outputs and saves a copy per output.
            The next call overwrites them, whatever its bucket: use them before it, on the stream
            of the calls.
        module: its parameters and buffers are watched for moves, besides the context's layers;
            default: `step`, where it is a module.
        with_plan: call step(plan=..., **inputs), for `dp_gather` and the like inside it. Sizes in
            a captured graph are fixed, so there it is `StepPlan.of_bucket`, in max_len mode.
        verify: a group of the context's ranks that does collectives of CPU tensors. Every call
            first exchanges over it how this rank's own checks went, and its plan: one rank's bad
            input is then the same error on every rank, and none waits. Costs one exchange a step.

    Raises:
        ValueError: bad buckets or examples.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        example_inputs: Mapping[str, Tensor],
        buckets: Sequence[int],
        context: AnyContext,
        *,
        rows: Mapping[str, Rows | None] | None = None,
        width: int = 1,
        above: Literal["raise", "eager"] = "raise",
        module: nn.Module | None = None,
        copy_outputs: bool = True,
        with_plan: bool = False,
        verify: dist.ProcessGroup | None = None,
    ) -> None:
        check_group(verify, context.world_size)
        self.step = step
        self.with_plan = with_plan
        self.verify = verify
        self.context = context
        self.width = as_int("width", width, "at least 1", 1)
        self.above = above
        self.buckets = check_buckets(buckets, self.width, context.max_tokens_per_rank)
        self._rows = {name: (rows or {}).get(name, "tokens") for name in example_inputs}
        if unknown := set(rows or {}) - set(example_inputs):
            raise ValueError(
                mismatch("rows", f"names of {sorted(example_inputs)}", sorted(unknown), "Rename.")
            )
        kinds = ("tokens", "requests", None)
        if unknown := {name for name, kind in self._rows.items() if kind not in kinds}:
            raise ValueError(
                mismatch("rows", kinds, {n: self._rows[n] for n in unknown}, "One per input.")
            )
        if reserved := {"num_tokens", "bucket", "plan"} & set(example_inputs):
            raise ValueError(
                mismatch(
                    "example_inputs",
                    "names that are not the runner's own",
                    sorted(reserved),
                    "Rename the argument of the step.",
                )
            )
        if above not in ("raise", "eager"):
            raise ValueError(mismatch("above", "'raise' or 'eager'", repr(above), "Pick one."))
        with torch.inference_mode(False):
            self._static = {
                name: self._static_buffer(name, example) for name, example in example_inputs.items()
            }
        self._module = (
            module if module is not None else step if isinstance(step, nn.Module) else None
        )
        self._captured: dict[int, _Captured] = {}
        self._copy_outputs = copy_outputs
        self._outputs: GraphOutputs | None = None
        self._watched = WatchedTensors({})
        self._native_check = builds_native_check(context.device)
        self._copier = input_copier(context.num_valid)
        self._instantiate = instantiator(context.device)
        self._inputs: dict[int, _Inputs] = {}  # per number of tokens, made once each
        self._on_cuda = context.device.type == "cuda"
        self.graphs_compiled = 0

    # -- construction ---------------------------------------------------------------------------

    def _count(self, name: str, tokens: int) -> int:
        return tokens if self._rows[name] == "tokens" else tokens // self.width

    def _static_buffer(self, name: str, example: Tensor) -> Tensor:
        if self._rows[name] is None:
            return example.detach().clone()
        if example.dim() == 0 or example.shape[0] == 0:
            raise ValueError(
                mismatch(
                    f"example_inputs[{name!r}]",
                    "at least one row",
                    list(example.shape),
                    "Give valid rows, or rows={name: None} for an input of fixed shape.",
                )
            )
        count = self._count(name, self.buckets[-1])
        rows = torch.arange(count, dtype=torch.int64, device=example.device)
        return example.detach().index_select(0, rows % example.shape[0]).contiguous()

    # -- capture --------------------------------------------------------------------------------

    def capture(self, progress: bool | None = None) -> None:
        """Warm up and capture every bucket, the largest first. Collective; runs the step.

        Args:
            progress: show a bar; default: on rank 0 of an interactive terminal.
        """
        self.context.check_open()
        check_same(self.context.group, "buckets and width", (self.buckets, self.width))
        self.context.warmup(self.buckets)
        compiled_before = compiled_graphs()
        pool = torch.cuda.graph_pool_handle() if self._on_cuda else None
        if progress is None:
            progress = self.context.rank == 0 and sys.stderr.isatty()
        self._captured = {}  # a capture that fails half-way leaves nothing to replay
        outputs: dict[int, Any] = {}
        captured = {
            bucket: self._capture_bucket(bucket, pool, outputs)
            for bucket in progress_bar(list(reversed(self.buckets)), progress)
        }
        self._outputs = GraphOutputs(
            outputs, self.width, copy=self._copy_outputs, static=self._on_cuda
        )
        self._captured = captured
        self.graphs_compiled = compiled_graphs() - compiled_before
        self._watched = self._watch()

    def _capture_bucket(self, bucket: int, pool: Any, outputs: dict[int, Any]) -> _Captured:
        start = time.perf_counter()
        free_before = torch.cuda.mem_get_info(self.context.device)[0] if self._on_cuda else 0
        views = {name: self._view(name, bucket) for name in self._static}

        plan = StepPlan.of_bucket(bucket, self.context.world_size, self.context.rank, self.width)

        def run_step() -> Any:
            return self._run_step(plan, views)

        with torch.no_grad():
            self.context.num_valid.fill_(bucket)
            try:
                if self._on_cuda:
                    run, output = self._capture_cuda(run_step, pool)
                else:
                    run, output = self._run_cpu(run_step)
            finally:
                self.context.num_valid.fill_(ALL_VALID)
        outputs[bucket] = output
        seconds = time.perf_counter() - start
        used = free_before - torch.cuda.mem_get_info(self.context.device)[0] if self._on_cuda else 0
        summary = BucketSummary(
            bucket,
            "cuda_graph" if self._on_cuda else "compiled",
            self.context.backend_for(bucket),
            seconds,
            max(used, 0),
            self._time(run, bucket),
            decision=self.context.decision_for(bucket),
        )
        return _Captured(run, summary)

    def _capture_cuda(
        self, run_step: Callable[[], Any], pool: Any
    ) -> tuple[Callable[[], Any], Any]:
        graph, output = capture(
            run_step,
            device=self.context.device,
            pool=pool,
            warm_ups=2,
            # The last node gives eager calls their rows back, at no host cost.
            at_end=lambda: self.context.num_valid.fill_(ALL_VALID),
            barrier=self.context.barrier,
            instantiate=self._instantiate,
        )

        def replay() -> Any:
            graph.replay()
            return output

        return replay, output

    def _run_cpu(self, run_step: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        def run() -> Any:
            try:
                with torch.compiler.set_stance("fail_on_recompile"):
                    return run_step()
            finally:
                self.context.num_valid.fill_(ALL_VALID)

        return run, run_step()

    def _time(self, run: Callable[[], Any], bucket: int) -> float:
        times = []
        for _ in range(TIMED_REPLAYS):
            with torch.no_grad():
                self.context.num_valid.fill_(bucket)
                if self._on_cuda:
                    torch.cuda.synchronize(self.context.device)
                start = time.perf_counter()
                run()
                if self._on_cuda:
                    torch.cuda.synchronize(self.context.device)
                times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2] * 1e6

    def _watch(self) -> WatchedTensors:
        modules: dict[str, nn.Module] = {**self.context.named_layers()}
        if self._module is not None:
            modules.update(
                (name.replace("_orig_mod.", "").removeprefix("_orig_mod") or "step", child)
                for name, child in self._module.named_modules()
            )
        return WatchedTensors(modules, native=self._native_check)

    def _run_step(self, plan: StepPlan, inputs: Mapping[str, Tensor]) -> Any:
        with self.context.step(plan):
            return self.step(**inputs, plan=plan) if self.with_plan else self.step(**inputs)

    # -- replay ---------------------------------------------------------------------------------

    def bucket_for(self, num_tokens: int) -> int | None:
        """The smallest bucket that holds num_tokens (the smallest of all for 0), or None."""
        at = bisect.bisect_left(self.buckets, as_int("num_tokens", num_tokens))
        return self.buckets[at] if at < len(self.buckets) else None

    def __call__(
        self,
        *,
        num_tokens: int | None = None,
        bucket: int | None = None,
        plan: StepPlan | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Run the step for this rank's real tokens.

        Args:
            plan: the step as all ranks agree on it, made with the runner's buckets and width. It
                says how many tokens, and whether every rank replays a bucket or runs eagerly.
            num_tokens: without a plan: real tokens, 0 included: an idle rank takes part and
                routes nothing.
            bucket: without a plan: replay this bucket. Required with several ranks, where all
                must agree.
            inputs: each with as many rows as num_tokens (or requests) says. An idle rank may
                leave all of them out.

        Returns:
            The output tree of the step; tensors with one row per token or request in every bucket
            are cut to the real ones. All are copies, which the next call does not overwrite,
            unless copy_outputs is False.

        Raises:
            NotWarmedUp: before capture(). CapacityError: more tokens than the largest bucket and
            above="raise", or an eager step over max_tokens_per_rank. MegaMoEError: a captured
            tensor moved. ValueError: inputs, or a plan of other buckets, ranks or width.
        """
        if self.verify is None:
            num_tokens, bucket, expected = self._ready(plan, num_tokens, bucket, inputs)
        else:
            num_tokens, bucket, expected = agreed(
                self.verify,
                bucket if plan is None else plan.agreed,
                lambda: self._ready(plan, num_tokens, bucket, inputs),
            )
        if bucket is None:
            with torch.no_grad():
                inputs = inputs or expected.targets
                if plan is None and not self.with_plan:
                    return self.step(**inputs)
                return self._run_step(plan or StepPlan.from_counts([num_tokens]), inputs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._replay(bucket, num_tokens, expected, inputs)
        return self._replay(bucket, num_tokens, expected, inputs)

    def _replay(
        self, bucket: int, num_tokens: int, expected: _Inputs, inputs: Mapping[str, Tensor]
    ) -> Any:
        captured, outputs = self._captured[bucket], self._outputs
        assert outputs is not None
        expected.write([inputs[name] for name in expected.shapes] if inputs else None)
        output = captured.run()
        captured.summary.replays += 1
        return outputs.real(bucket, output, num_tokens)

    def _ready(
        self,
        plan: StepPlan | None,
        num_tokens: int | None,
        bucket: int | None,
        inputs: Mapping[str, Tensor],
    ) -> tuple[int, int | None, _Inputs]:
        """Every check of a call, before anything is written or launched."""
        self.context.check_open()
        if not self._captured:
            raise NotWarmedUp(
                mismatch("capture()", "called before the first step", "not called", "Call it.")
            )
        if plan is not None:
            num_tokens, bucket = self._of_plan(plan, num_tokens, bucket)
        elif num_tokens is None:
            raise ValueError(mismatch("plan or num_tokens", "one of them", None, "Pass a plan."))
        num_tokens = as_int("num_tokens", num_tokens)
        expected = self._inputs.get(num_tokens) or self._expect(num_tokens)
        if inputs or num_tokens:
            self._check_inputs(expected, inputs, num_tokens)
        if plan is None:
            bucket = self._pick(num_tokens, bucket)
        if bucket is not None:
            self._watched.check()
        return num_tokens, bucket, expected

    def _of_plan(
        self, plan: StepPlan, num_tokens: int | None, bucket: int | None
    ) -> tuple[int, int | None]:
        given = (
            plan.num_tokens if num_tokens is None else as_int("num_tokens", num_tokens),
            plan.bucket if bucket is None else as_int("bucket", bucket),
        )
        if given != (plan.num_tokens, plan.bucket):
            raise ValueError(
                mismatch(
                    "num_tokens and bucket",
                    f"{(plan.num_tokens, plan.bucket)}, as in the plan",
                    given,
                    "Leave them out: the plan says them.",
                )
            )
        known = plan.bucket is None or plan.bucket in self._captured
        if plan.width != self.width or not known:
            raise ValueError(
                mismatch(
                    "bucket and width of the plan",
                    f"None or one of {self.buckets}, and {self.width}",
                    (plan.bucket, plan.width),
                    "Make it with the runner's buckets and width.",
                )
            )
        self.context.launches_per_call(plan)
        return plan.num_tokens, plan.bucket

    def _pick(self, num_tokens: int, bucket: int | None) -> int | None:
        if bucket is not None:
            if not is_int(bucket) or bucket not in self._captured or bucket < num_tokens:
                raise ValueError(
                    mismatch(
                        "bucket",
                        f"one of {self.buckets} that holds {num_tokens} tokens",
                        repr(bucket),
                        "Pick it with bucket_for(), from the largest count of all ranks.",
                    )
                )
            return int(bucket)
        if self.context.world_size > 1:
            raise ValueError(
                mismatch(
                    "bucket",
                    f"the one that all {self.context.world_size} ranks replay",
                    None,
                    "Pass plan=StepPlan.agree(...), or bucket_for(the largest count of all ranks).",
                )
            )
        bucket = self.bucket_for(num_tokens)
        if bucket is None and self.above == "raise":
            raise CapacityError(
                mismatch(
                    "num_tokens",
                    f"at most {self.buckets[-1]}, the largest bucket",
                    num_tokens,
                    "Add a bucket, split the batch, or construct with above='eager'.",
                )
            )
        return bucket

    def _expect(self, num_tokens: int) -> _Inputs:
        """What the inputs of a call of num_tokens tokens must be; kept for the next such call."""
        if num_tokens < 0 or num_tokens % self.width:
            raise ValueError(
                mismatch(
                    "num_tokens",
                    f"a multiple of the width {self.width}, at least 0",
                    num_tokens,
                    "Count requests x width.",
                )
            )
        shapes, targets = {}, {}
        for name, static in self._static.items():
            shape = static.shape
            if self._rows[name] is not None:
                shape = torch.Size((self._count(name, num_tokens), *shape[1:]))
            shapes[name] = shape, static.dtype
            targets[name] = self._view(name, num_tokens)
        write = self._copier.prepare(list(targets.values()), num_tokens)
        expected = _Inputs(shapes, targets, write)
        if num_tokens <= self.buckets[-1]:
            self._inputs[num_tokens] = expected
        return expected

    def _check_inputs(
        self, expected: _Inputs, inputs: Mapping[str, Tensor], num_tokens: int
    ) -> None:
        if inputs.keys() != self._static.keys():
            raise ValueError(
                mismatch("inputs", sorted(self._static), sorted(inputs), "Pass exactly these.")
            )
        for name, (shape, dtype) in expected.shapes.items():
            value = inputs[name]
            if value.shape != shape or value.dtype is not dtype:
                raise ValueError(
                    mismatch(
                        f"input {name!r}",
                        f"{dtype} {list(shape)}",
                        f"{value.dtype} {list(value.shape)}",
                        f"num_tokens is {num_tokens}, width {self.width}.",
                    )
                )

    def _view(self, name: str, tokens: int) -> Tensor:
        static = self._static[name]
        return static if self._rows[name] is None else static[: self._count(name, tokens)]

    def summary(self) -> list[BucketSummary]:
        """Per captured bucket, ascending: path, backend, capture cost, memory, replay time."""
        return [self._captured[bucket].summary for bucket in sorted(self._captured)]
