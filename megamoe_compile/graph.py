"""GraphRunner: one captured graph per bucket of tokens, and the rules that keep replay right."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .context import ALL_VALID, MegaMoEContext
from .custom_ops.errors import CapacityError, MegaMoEError, NotWarmedUp, mismatch

Rows = Literal["tokens", "requests"]
T = TypeVar("T")

TIMED_REPLAYS = 5  # the same on every rank: launches must stay equal


@dataclasses.dataclass
class BucketSummary:
    """One row of `GraphRunner.summary()`; seconds, bytes and microseconds as the names say."""

    bucket: int
    path: str  # "cuda_graph" or, on a CPU, "compiled"
    backend: str
    capture_seconds: float
    graph_bytes: int
    replay_microseconds: float
    replays: int = 0


@dataclasses.dataclass
class _Captured:
    run: Callable[[], Any]  # returns the output tree: of the graph, or of this run on a CPU
    summary: BucketSummary


@dataclasses.dataclass(frozen=True)
class _Input:
    """What a call of some number of tokens passes for one input, and where it is copied."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    target: Tensor


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
        context: the step's context. With several ranks every rank makes the same calls.
        rows: per input, what dimension 0 counts: "tokens" (the default), "requests" (tokens /
            width), or None for an input of fixed shape.
        width: tokens of one request, 1 + draft tokens under speculative decoding.
        above: what a call above the largest bucket does: "raise", or "eager".
        module: its parameters and buffers are watched for moves, besides the context's layers;
            default: `step`, where it is a module.

    Raises:
        ValueError: bad buckets or examples.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        example_inputs: Mapping[str, Tensor],
        buckets: Sequence[int],
        context: MegaMoEContext,
        *,
        rows: Mapping[str, Rows | None] | None = None,
        width: int = 1,
        above: Literal["raise", "eager"] = "raise",
        module: nn.Module | None = None,
    ) -> None:
        self.step = step
        self.context = context
        self.width = width
        self.above = above
        self.buckets = _checked_buckets(buckets, width, context.config.max_tokens_per_rank)
        self._rows = {name: (rows or {}).get(name, "tokens") for name in example_inputs}
        if unknown := set(rows or {}) - set(example_inputs):
            raise ValueError(
                mismatch("rows", f"names of {sorted(example_inputs)}", sorted(unknown), "Rename.")
            )
        if above not in ("raise", "eager"):
            raise ValueError(mismatch("above", "'raise' or 'eager'", repr(above), "Pick one."))
        with torch.inference_mode(False):
            self._static = {
                name: self._static_buffer(name, example)
                for name, example in example_inputs.items()
            }
        self._module = module if module is not None else step if isinstance(
            step, nn.Module
        ) else None
        self._captured: dict[int, _Captured] = {}
        self._watched: list[tuple[str, dict[str, Any], str]] = []
        self._addresses: list[int] = []
        self._inputs: dict[int, list[_Input]] = {}  # per number of tokens, made once each
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
                    f"example_inputs[{name!r}]", "at least one row", list(example.shape),
                    "Give valid rows, or rows={name: None} for an input of fixed shape.",
                )
            )
        count = self._count(name, self.buckets[-1])
        repeated = torch.arange(count, device=example.device) % example.shape[0]
        return example.detach().index_select(0, repeated).contiguous()

    # -- capture --------------------------------------------------------------------------------

    def capture(self, progress: bool | None = None) -> None:
        """Warm up and capture every bucket, the largest first. Collective; runs the step.

        Args:
            progress: show a bar; default: on rank 0 of an interactive terminal.
        """
        self.context.check_open()
        self.context.warmup(self.buckets)
        compiled_before = _compiled_graphs()
        pool = torch.cuda.graph_pool_handle() if self._on_cuda else None
        if progress is None:
            progress = self.context.rank == 0 and sys.stderr.isatty()
        for bucket in _bar(list(reversed(self.buckets)), progress):
            self._captured[bucket] = self._capture_bucket(bucket, pool)
        self.graphs_compiled = _compiled_graphs() - compiled_before
        self._watched = list(self._tensors_to_watch())
        self._addresses = [owner[key].data_ptr() for _, owner, key in self._watched]

    def _capture_bucket(self, bucket: int, pool: Any) -> _Captured:
        start = time.perf_counter()
        free_before = torch.cuda.mem_get_info(self.context.device)[0] if self._on_cuda else 0
        views = {name: self._view(name, bucket) for name in self._static}

        def run_step() -> Any:
            return self.step(**views)

        with torch.no_grad():
            self.context.num_valid.fill_(bucket)
            run = self._capture_cuda(run_step, pool) if self._on_cuda else self._run_cpu(run_step)
        seconds = time.perf_counter() - start
        used = free_before - torch.cuda.mem_get_info(self.context.device)[0] if self._on_cuda else 0
        summary = BucketSummary(
            bucket,
            "cuda_graph" if self._on_cuda else "compiled",
            self.context.backend_for(bucket),
            seconds,
            max(used, 0),
            self._time(run, bucket),
        )
        return _Captured(run, summary)

    def _capture_cuda(self, run_step: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        # Warm up on the stream that captures: lazily made state belongs to a stream.
        stream = torch.cuda.Stream(self.context.device)
        stream.wait_stream(torch.cuda.current_stream(self.context.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run_step()
        torch.cuda.current_stream(self.context.device).wait_stream(stream)
        self.context.barrier()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.compiler.set_stance("fail_on_recompile"),
            torch.cuda.graph(graph, pool=pool, stream=stream),
        ):
            output = run_step()
            # The last node gives eager calls their rows back, at no host cost.
            self.context.num_valid.fill_(ALL_VALID)
        self.context.barrier()

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def _run_cpu(self, run_step: Callable[[], Any]) -> Callable[[], Any]:
        run_step()

        def run() -> Any:
            with torch.compiler.set_stance("fail_on_recompile"):
                output = run_step()
            self.context.num_valid.fill_(ALL_VALID)
            return output

        return run

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

    def _tensors_to_watch(self) -> Iterable[tuple[str, dict[str, Any], str]]:
        modules: dict[str, nn.Module] = {
            f"MegaMoE[{layer.index}]": layer for layer in self.context.layers
        }
        if self._module is not None:
            modules.update(
                (name.replace("_orig_mod.", "").removeprefix("_orig_mod") or "step", child)
                for name, child in self._module.named_modules()
            )
        seen: set[tuple[int, str]] = set()
        for name, module in modules.items():
            for owner in (module._parameters, module._buffers):
                for key, tensor in owner.items():
                    if tensor is not None and (id(owner), key) not in seen:
                        seen.add((id(owner), key))
                        yield f"{name}.{key}", owner, key

    # -- replay ---------------------------------------------------------------------------------

    def bucket_for(self, num_tokens: int) -> int | None:
        """The smallest bucket that holds num_tokens (the smallest of all for 0), or None."""
        at = bisect.bisect_left(self.buckets, num_tokens)
        return self.buckets[at] if at < len(self.buckets) else None

    def __call__(self, *, num_tokens: int, bucket: int | None = None, **inputs: Tensor) -> Any:
        """Run the step for num_tokens real tokens.

        Args:
            num_tokens: real tokens, 0 included: an idle rank takes part and routes nothing.
            bucket: replay this bucket. Required with several ranks, where all must agree.
            inputs: each with as many rows as num_tokens (or requests) says.

        Returns:
            The output tree of the step; tensors with one row per token or request of the bucket
            are cut to the real ones. All are copies: the next call does not overwrite them.

        Raises:
            NotWarmedUp: before capture(). CapacityError: more tokens than the largest bucket and
            above="raise". MegaMoEError: a captured tensor moved. ValueError: inputs.
        """
        self.context.check_open()
        if not self._captured:
            raise NotWarmedUp(
                mismatch("capture()", "called before the first step", "not called", "Call it.")
            )
        expected = self._inputs.get(num_tokens) or self._expect(num_tokens)
        self._check_inputs(expected, inputs, num_tokens)
        bucket = self._pick(num_tokens, bucket)
        if bucket is None:
            return self.step(**inputs)
        self._check_addresses()
        captured = self._captured[bucket]
        with torch.no_grad():
            torch._foreach_copy_(
                [it.target for it in expected], [inputs[it.name] for it in expected], True
            )
            self.context.num_valid.fill_(num_tokens)
            output = captured.run()
            captured.summary.replays += 1
            if type(output) is Tensor:
                return self._real_rows(output, bucket, num_tokens)
            return pytree.tree_map_only(
                Tensor, lambda t: self._real_rows(t, bucket, num_tokens), output
            )

    def _pick(self, num_tokens: int, bucket: int | None) -> int | None:
        if bucket is not None:
            if bucket not in self._captured or bucket < num_tokens:
                raise ValueError(
                    mismatch(
                        "bucket", f"one of {self.buckets} that holds {num_tokens} tokens", bucket,
                        "Pick it with bucket_for(), from the largest count of all ranks.",
                    )
                )
            return bucket
        if self.context.world_size > 1:
            raise ValueError(
                mismatch(
                    "bucket", f"the one that all {self.context.world_size} ranks replay", None,
                    "Agree on the largest count of all ranks and pass bucket_for(it).",
                )
            )
        bucket = self.bucket_for(num_tokens)
        if bucket is None and self.above == "raise":
            raise CapacityError(
                mismatch(
                    "num_tokens", f"at most {self.buckets[-1]}, the largest bucket", num_tokens,
                    "Add a bucket, split the batch, or construct with above='eager'.",
                )
            )
        return bucket

    def _expect(self, num_tokens: int) -> list[_Input]:
        """What the inputs of a call of num_tokens tokens must be; kept for the next such call."""
        if num_tokens < 0 or num_tokens % self.width:
            raise ValueError(
                mismatch(
                    "num_tokens", f"a multiple of the width {self.width}, at least 0", num_tokens,
                    "Count requests x width.",
                )
            )
        expected = []
        for name, static in self._static.items():
            shape, target = static.shape, static
            if self._rows[name] is not None:
                count = self._count(name, num_tokens)
                shape, target = torch.Size((count, *static.shape[1:])), static[:count]
            expected.append(_Input(name, shape, static.dtype, target))
        if num_tokens <= self.buckets[-1]:
            self._inputs[num_tokens] = expected
        return expected

    def _check_inputs(
        self, expected: list[_Input], inputs: Mapping[str, Tensor], num_tokens: int
    ) -> None:
        if inputs.keys() != self._static.keys():
            raise ValueError(
                mismatch("inputs", sorted(self._static), sorted(inputs), "Pass exactly these.")
            )
        for it in expected:
            value = inputs[it.name]
            if value.shape != it.shape or value.dtype is not it.dtype:
                raise ValueError(
                    mismatch(
                        f"input {it.name!r}",
                        f"{it.dtype} {list(it.shape)}",
                        f"{value.dtype} {list(value.shape)}",
                        f"num_tokens is {num_tokens}, width {self.width}.",
                    )
                )

    def _check_addresses(self) -> None:
        try:
            if [owner[key].data_ptr() for _, owner, key in self._watched] == self._addresses:
                return
        except (AttributeError, KeyError):
            pass  # one is gone; the search below names it
        for (name, owner, key), address in zip(self._watched, self._addresses, strict=True):
            tensor = owner.get(key)
            if tensor is None or tensor.data_ptr() != address:
                raise MegaMoEError(
                    mismatch(
                        f"address of {name}",
                        "the captured one",
                        "another",
                        "It was replaced after capture(): write into the old storage "
                        "(load_weights does), or capture again.",
                    )
                )

    def _view(self, name: str, bucket: int) -> Tensor:
        static = self._static[name]
        return static if self._rows[name] is None else static[: self._count(name, bucket)]

    def _real_rows(self, t: Tensor, bucket: int, num_tokens: int) -> Tensor:
        if t.dim() and t.shape[0] == bucket:
            t = t[:num_tokens]
        elif t.dim() and t.shape[0] == bucket // self.width:
            t = t[: num_tokens // self.width]
        return t.clone()

    def summary(self) -> list[BucketSummary]:
        """Per captured bucket, ascending: path, backend, capture cost, memory, replay time."""
        return [self._captured[bucket].summary for bucket in sorted(self._captured)]


def _checked_buckets(buckets: Sequence[int], width: int, capacity: int) -> list[int]:
    if width < 1:
        raise ValueError(mismatch("width", "at least 1", width, "It counts tokens of a request."))
    buckets = list(buckets)
    ascending = all(a < b for a, b in itertools.pairwise(buckets))
    if not buckets or buckets[0] < 1 or not ascending or any(b % width for b in buckets):
        raise ValueError(
            mismatch(
                "buckets",
                f"an ascending list of numbers of tokens, multiples of the width {width}",
                buckets,
                "Sort it and drop doubles; buckets are requests x width.",
            )
        )
    if buckets[-1] > capacity:
        raise CapacityError(
            mismatch(
                "largest bucket",
                f"at most {capacity} (max_tokens_per_rank)",
                buckets[-1],
                f"Set max_tokens_per_rank to {buckets[-1]} or more, or drop the bucket.",
            )
        )
    return buckets


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _bar(items: list[T], show: bool) -> Iterable[T]:
    if not show:
        return items
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is a courtesy, not a dependency
        return items
    bar: Iterable[T] = tqdm(items, desc="capture", unit="bucket")
    return bar
