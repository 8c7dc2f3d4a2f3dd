"""`megamoe decode`: decode a MoE model through compiled, captured steps, and check every token.

Requests arrive, decode greedily and leave, so that the batch rises, falls, runs empty and fits no
bucket. Each step runs twice on the same inputs, with a KV cache of its own each: through
torch.compile and the GraphRunner, padded to a bucket, and eagerly on exactly the active requests.
Both use the same model and experts, so a difference is one of compiling, capturing or padding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from .config import Backend
from .context import MegaMoEContext
from .custom_ops.errors import mismatch
from .decode_batch import Batch, batch_sizes
from .decode_report import BucketReport, DecodeReport, Parity
from .graph import GraphRunner
from .hf_config import moe_shape
from .one_graph import compile_one_graph
from .slot_cache import DecodeStep, SlotCache

BUCKETS = (1, 2, 4, 8)
TOLERANCE = 0.05


def decode(
    model: nn.Module,
    context: MegaMoEContext,
    *,
    steps: int = 64,
    buckets: Sequence[int] = BUCKETS,
    seed: int = 0,
    max_length: int = 64,
    tolerance: float = TOLERANCE,
) -> DecodeReport:
    """Decode `steps` steps twice, captured and eager, and compare.

    Args:
        model: a causal language model of transformers on the context's device, prepared for
            `context`.
        context: of one rank. Its capacity is at least the largest bucket.
        buckets: ascending numbers of tokens, one token per request.
        seed: of the requests and their prompts.
        max_length: positions of a KV slot; a request that has filled its slot leaves.
        tolerance: bound of a row's largest logit difference, relative to its largest logit. The
            compiled step rounds where eager does, so on a CPU nearly all logits are equal.

    Raises:
        ValueError: steps, buckets, max_length, or a model whose attention isn't full.
    """
    if steps < 1 or max_length < 1:
        raise ValueError(
            mismatch("steps and max_length", "at least 1", (steps, max_length), "Raise them.")
        )
    device, most = context.device, max(buckets, default=1)
    captured, eager = (
        DecodeStep(model, SlotCache(most, max_length), context.num_valid) for _ in range(2)
    )
    one = torch.zeros(1, dtype=torch.int64, device=device)
    example = {"input_ids": one, "positions": one, "slots": one}
    with torch.no_grad():
        for step in (captured, eager):
            step(**example)  # allocates its cache, before anything is compiled
        runner = GraphRunner(
            _compile(captured, context, list(example)),
            example,
            buckets,
            context,
            rows={"slots": "requests"},
            module=captured,
        )
        start = time.perf_counter()
        runner.capture()
        capture_seconds = time.perf_counter() - start

        parity = Parity(tolerance)
        batch = Batch(most, max_length, _text_config(model).vocab_size, seed)
        timed: dict[int, list[tuple[int, float]]] = {bucket: [] for bucket in runner.buckets}
        for number, size in enumerate(batch_sizes(steps, runner.buckets, seed)):
            batch.resize(size)
            inputs = batch.inputs(device)
            bucket = cast(int, runner.bucket_for(size))
            output, seconds = _timed(runner, size, inputs)
            timed[bucket].append((size, seconds))
            if size:
                parity.compare(f"step {number}, bucket {bucket}", output, eager(**inputs))
            batch.advance(output[1])

    reports = [BucketReport(s.bucket, s.path, s.backend) for s in runner.summary()]
    for report in reports:
        pairs = timed[report.bucket]
        report.fill([size for size, _ in pairs], [seconds for _, seconds in pairs])
    busy = sum(seconds for pairs in timed.values() for size, seconds in pairs if size)
    return DecodeReport(
        parity=parity.holds,
        max_relative_error=parity.max_relative_error,
        tolerance=tolerance,
        first_fault=parity.first_fault,
        tokens=parity.tokens,
        decided_tokens=parity.decided,
        steps=steps,
        backend=context.backend,
        reason=context.reason,
        device=str(device),
        graphs_compiled=runner.graphs_compiled,
        capture_seconds=capture_seconds,
        tokens_per_second=parity.tokens / busy if busy else 0.0,
        buckets=reports,
    )


def _compile(step: DecodeStep, context: MegaMoEContext, inputs: Sequence[str]) -> Any:
    """One graph for all buckets, rounding to bf16 where eager does.

    Left to itself the compiler keeps fp32 between fused operations. That is more exact, but it
    turns near ties of the router and of FP8 codes the other way, and a check of captured against
    eager steps would have to allow for that, hence for real faults of that size.
    """
    return compile_one_graph(step, context, inputs, options={"emulate_precision_casts": True})


def _timed(
    runner: GraphRunner, size: int, inputs: dict[str, Tensor]
) -> tuple[tuple[Tensor, Tensor], float]:
    device = runner.context.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    output = cast(Any, runner)(num_tokens=size, **inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return output, time.perf_counter() - start


def _text_config(model: nn.Module) -> Any:
    return cast(Any, model).config.get_text_config()


# -- models ----------------------------------------------------------------------------------------


def random_model(seed: int = 0) -> nn.Module:
    """A small Qwen3-MoE in bf16 with random weights: 2 layers, hidden 256, 16 experts, top-4."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = cast(Any, Qwen3MoeConfig)(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(Any, Qwen3MoeForCausalLM)._from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                # Logits of standard deviation 4. A trained router is peaked too; the default, 0.3,
                # weighs all experts alike, so that a tie turned by one rounding changes a lot.
                nn.init.normal_(weight, std=4 * config.hidden_size**-0.5)
    return cast(nn.Module, model.eval())


def load_model(directory: Path) -> nn.Module:
    """A local checkpoint, on the CPU, in bf16 or with its fine-grained FP8 experts.

    Raises:
        ValueError: not the directory of a MoE model that the kernels compute.
    """
    moe_shape(directory)  # the better message
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, local_files_only=True
        )
    except OSError as error:
        raise ValueError(
            mismatch("model", f"a checkpoint in {directory}", error, "Download it first.")
        ) from error
    return cast(nn.Module, model.eval())


# -- command line ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe decode`."""
    parser.add_argument("--steps", type=_positive, default=64, help="decode steps (default: 64)")
    parser.add_argument(
        "--buckets",
        type=_buckets,
        default=list(BUCKETS),
        metavar="N,N,...",
        help="ascending batch sizes to capture (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="local checkpoint of a MoE model (default: a small random Qwen3-MoE)",
    )
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda (default: cuda where there is one)"
    )
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--max-length", type=_positive, default=64, help="positions per request (default: 64)"
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
    from .integrations.transformers import prepare

    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = random_model(args.seed) if args.model is None else load_model(args.model)
        context = prepare(
            model,
            max_tokens_per_rank=max(args.buckets),
            device=device,
            backend=args.backend,
        )
        with context:
            report = decode(
                model.to(device),
                context,
                steps=args.steps,
                buckets=args.buckets,
                seed=args.seed,
                max_length=args.max_length,
                tolerance=args.tolerance,
            )
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    name = "random Qwen3-MoE" if args.model is None else str(args.model)
    if args.json:
        print(json.dumps({"model": name, **report.as_dict()}))
    else:
        print(f"model {name}; backend {report.backend} on {report.device}: {report.reason}")
        print(report.table())
        print(report.verdict())
    return 0 if report.parity else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {number}")
    return number


def _buckets(text: str) -> list[int]:
    buckets = [_positive(part) for part in text.split(",")]
    if buckets != sorted(set(buckets)):
        raise argparse.ArgumentTypeError(f"expected ascending numbers, got {text}")
    return buckets


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a device like cpu or cuda:0, got {text}") from (
            error
        )
