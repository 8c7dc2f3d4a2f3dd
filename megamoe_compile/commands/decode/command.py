"""`megamoe decode`: decode a MoE model through compiled, captured steps, and check every token.

Requests arrive, decode greedily and leave, so that the batch rises, falls, runs empty and fits no
bucket. Each step runs twice on the same inputs, with a KV cache of its own each: through
torch.compile and the GraphRunner, padded to a bucket, and eagerly on exactly the active requests.

On one rank both use the same model and experts, so a difference is one of compiling, capturing or
padding. On several ranks attention is data-parallel: each rank has its own requests, cache and copy
of the attention weights, and a share of the experts. Rank 0 then has all experts once more, and
runs all ranks' requests eagerly by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...capture.contexts import AnyContext
from ...capture.one_graph import compile_one_graph
from ...capture.runner import GraphRunner
from ...config import Backend
from ...errors import mismatch
from ...models.hf_config import moe_shape
from ...parallel.step_plan import StepPlan
from ..arguments import positive, run_device
from .batch import Batch, rank_sizes
from .model import load_model, random_model
from .ranks import number_of_ranks, run_ranks
from .report import BucketReport, DecodeReport, Parity, StepTimes
from .slot_cache import DecodeStep, SlotCache

BUCKETS = (1, 2, 4, 8)
TOLERANCE = 0.05
TIMEOUT = 900.0


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the captured steps are compared with: a prepared model, and its context of one rank."""

    model: nn.Module
    context: AnyContext


def decode(
    model: nn.Module,
    context: AnyContext,
    *,
    steps: int = 64,
    buckets: Sequence[int] = BUCKETS,
    width: int = 1,
    seed: int = 0,
    max_length: int = 64,
    tolerance: float = TOLERANCE,
    reference: Reference | None = None,
) -> DecodeReport:
    """Decode `steps` steps twice, captured and eager, and compare. Collective.

    Args:
        model: a causal language model of transformers on the context's device, prepared for
            `context`.
        context: its capacity is at least the largest bucket. Several ranks need a group that does
            collectives of CPU tensors.
        buckets: ascending numbers of tokens of a rank, requests x width.
        width: tokens that a request feeds per step: the last one and width - 1 drafts of what
            follows, of which it keeps those that the model would have chosen.
        seed: of the requests and their prompts.
        max_length: tokens of a request, after which it leaves.
        tolerance: bound of a row's largest logit difference, relative to its largest logit. The
            compiled step rounds where eager does, so on a CPU nearly all logits are equal.
        reference: rank 0 of several needs it: the same weights, with a capacity for all ranks.

    Returns:
        The report of all ranks, the same on each.

    Raises:
        ValueError: steps, buckets, max_length, or a model whose attention isn't full.
    """
    if steps < 1 or max_length < 1:
        raise ValueError(
            mismatch("steps and max_length", "at least 1", (steps, max_length), "Raise them.")
        )
    rank, ranks, device = context.rank, context.world_size, context.device
    most, positions = max(buckets, default=1) // width, max_length + width - 1
    captured = DecodeStep(model, SlotCache(most, positions), context.num_valid, width)
    compared = Reference(model, context) if ranks == 1 else reference
    eager = None
    if rank == 0:
        assert compared is not None
        cache = SlotCache(ranks * most, positions)
        eager = DecodeStep(compared.model, cache, compared.context.num_valid, width)
    tokens = torch.zeros(1, width, dtype=torch.int64, device=device)
    example = {"input_ids": tokens, "positions": tokens, "slots": tokens[:, 0]}
    with torch.no_grad():
        context.warmup(list(buckets))
        for step in (captured, eager):
            if step is not None:
                step(**example)  # allocates its cache, before anything is compiled
        runner = GraphRunner(
            _compile(captured, context, list(example)),
            example,
            buckets,
            context,
            rows=dict.fromkeys(example, "requests"),
            width=width,
            module=captured,
        )
        start = time.perf_counter()
        runner.capture()
        capture_seconds = time.perf_counter() - start

        parity = Parity(tolerance)
        batch = Batch(most, max_length, _text_config(model).vocab_size, seed + rank, width)
        times: dict[int, list[StepTimes]] = {bucket: [] for bucket in runner.buckets}
        requests = [bucket // width for bucket in runner.buckets]
        for number, sizes in enumerate(rank_sizes(steps, requests, ranks, seed)):
            batch.resize(sizes[rank])
            inputs = batch.inputs(device)
            plan = StepPlan.agree(sizes[rank] * width, context.group, runner.buckets, width)
            bucket = cast(int, plan.bucket)
            output, seconds = _timed(runner, plan, inputs)
            kept = batch.advance(output[1])
            done = _to_rank_0(context, _Done(inputs, output, seconds, kept))
            times[bucket].append(
                StepTimes(
                    plan.tokens_per_rank, sum(d.kept for d in done), max(d.seconds for d in done)
                )
            )
            if eager is not None and not plan.all_idle:
                expected = _run_all(eager, done, most, device)
                for of_rank, (got, want) in enumerate(zip(done, expected, strict=True)):
                    if got.output[1].numel():
                        where = f"step {number}, bucket {bucket}"
                        where += f", rank {of_rank}" if ranks > 1 else ""
                        parity.compare(where, got.output, want)

    report = DecodeReport.of(
        [BucketReport(s.bucket, s.path, s.backend, s.decision) for s in runner.summary()],
        times,
        parity,
        steps=steps,
        ranks=ranks,
        width=width,
        backend=context.backend,
        reason=context.reason,
        device=str(device),
        graphs_compiled=runner.graphs_compiled,
        capture_seconds=capture_seconds,
    )
    reports: list[Any] = [report]
    if context.group is not None:
        dist.broadcast_object_list(reports, group_src=0, group=context.group)
    return cast(DecodeReport, reports[0])


@dataclasses.dataclass(frozen=True)
class _Done:
    """One rank's step."""

    inputs: dict[str, Tensor]
    output: tuple[Tensor, Tensor]
    seconds: float
    kept: int


def _to_rank_0(context: AnyContext, done: _Done) -> list[_Done]:
    """All ranks' steps, on the CPU where there are several; on other ranks the own one."""
    if context.group is None:
        return [done]
    on_cpu = dataclasses.replace(
        done,
        inputs={name: tensor.cpu() for name, tensor in done.inputs.items()},
        output=(done.output[0].cpu(), done.output[1].cpu()),
    )
    everyone: list[Any] | None = [None] * context.world_size if context.rank == 0 else None
    dist.gather_object(on_cpu, everyone, group=context.group, group_dst=0)
    return everyone or [on_cpu]


def _run_all(
    eager: DecodeStep, done: list[_Done], slots_per_rank: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The eager step of all ranks' requests in one batch -> (logits, tokens) per rank."""
    columns = [dict(it.inputs) for it in done]
    for rank, column in enumerate(columns):
        column["slots"] = column["slots"] + rank * slots_per_rank
    joined = {name: torch.cat([c[name] for c in columns]).to(device) for name in columns[0]}
    logits, tokens = eager(**joined)
    counts = [it.output[1].numel() for it in done]
    home = done[0].output[0].device
    return list(zip(logits.to(home).split(counts), tokens.to(home).split(counts), strict=True))


def _compile(step: DecodeStep, context: AnyContext, inputs: Sequence[str]) -> Any:
    """One graph for all buckets, rounding to bf16 where eager does.

    Left to itself the compiler keeps fp32 between fused operations. That is more exact, but it
    turns near ties of the router and of FP8 codes the other way, and a check of captured against
    eager steps would have to allow for that, hence for real faults of that size.
    """
    return compile_one_graph(step, context, inputs, options={"emulate_precision_casts": True})


def _timed(
    runner: GraphRunner, plan: StepPlan, inputs: dict[str, Tensor]
) -> tuple[tuple[Tensor, Tensor], float]:
    device = runner.context.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    output = cast(Any, runner)(plan=plan, **inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return output, time.perf_counter() - start


def _text_config(model: nn.Module) -> Any:
    return cast(Any, model).config.get_text_config()


# -- command line ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe decode`."""
    parser.add_argument("--steps", type=positive, default=64, help="decode steps (default: 64)")
    parser.add_argument(
        "--buckets",
        type=_buckets,
        default=list(BUCKETS),
        metavar="N,N,...",
        help="ascending numbers of requests of a rank to capture (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--width",
        type=positive,
        default=1,
        help="tokens of a request per step, 1 + drafts (default: 1)",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        help="processes, each with its own requests and a share of the experts: started here, or "
        "joined under torchrun (default: what torchrun started, else 1)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=TIMEOUT,
        help=f"seconds after which several ranks are ended (default: {TIMEOUT:g})",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="local checkpoint of a MoE model (default: a small random Qwen3-MoE)",
    )
    parser.add_argument(
        "--device", type=run_device, help="cpu or cuda (default: cuda where there is one)"
    )
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--max-length", type=positive, default=64, help="positions per request (default: 64)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="bound of a logit difference, relative to the row's largest logit "
        f"(default: {TOLERANCE})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and requests (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 on parity, 1 without it.

    Raises:
        argparse.ArgumentError: a model that cannot be decoded.
    """
    try:
        if args.model is not None:
            moe_shape(args.model)  # no rank is started for a directory without a model
        ranks = number_of_ranks(args.ranks)
        rank, report = run_ranks(decode_rank, (args,), ranks, args.timeout)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    name = "random Qwen3-MoE" if args.model is None else str(args.model)
    if rank == 0 and args.json:
        print(json.dumps({"model": name, **report.as_dict()}))
    elif rank == 0:
        print(f"model {name}; backend {report.backend} on {report.device}: {report.reason}")
        print(report.table())
        print(report.verdict())
    return 0 if report.parity else 1


def decode_rank(
    args: argparse.Namespace, local_rank: int, group: dist.ProcessGroup | None
) -> DecodeReport:
    """`decode` as the arguments say, on one rank of `group`."""
    from ...engines.transformers.checkpoint import has_separate_experts, load_checkpoint
    from ...engines.transformers.model import prepare

    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None and group is not None:
        # Ranks that share a GPU are allowed or refused by the context, with the reason.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    buckets = [requests * args.width for requests in args.buckets]

    streamed = args.model is not None and has_separate_experts(args.model)

    def prepared(capacity: int, group: dist.ProcessGroup | None) -> Reference:
        if streamed:
            model, context = load_checkpoint(
                args.model,
                device=device,
                max_tokens_per_rank=capacity,
                group=group,
                backend=args.backend,
            )
            closing.callback(context.close)
            return Reference(model, context)
        model = random_model(args.seed) if args.model is None else load_model(args.model)
        context = prepare(
            model, max_tokens_per_rank=capacity, group=group, device=device, backend=args.backend
        )
        closing.callback(context.close)
        return Reference(model.to(device), context)

    with contextlib.ExitStack() as closing:
        mine, whole = prepared(buckets[-1], group), None
        ranks = mine.context.world_size
        if ranks > 1 and mine.context.rank == 0:
            whole = prepared(ranks * buckets[-1], None)
        return decode(
            mine.model,
            mine.context,
            steps=args.steps,
            buckets=buckets,
            width=args.width,
            seed=args.seed,
            max_length=args.max_length,
            tolerance=args.tolerance,
            reference=whole,
        )


def _buckets(text: str) -> list[int]:
    buckets = [positive(part) for part in text.split(",")]
    if buckets != sorted(set(buckets)):
        raise argparse.ArgumentTypeError(f"expected ascending numbers, got {text}")
    return buckets
