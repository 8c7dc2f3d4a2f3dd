"""`megamoe bench`: decode a whole model with four kinds of experts, in one run.

Each column builds the model with the same weights, decodes with a static KV cache, and frees it.
Results are written after every batch size of a column; a column that fails is reported with its
error. Times come first, profiles of the replays last. `--parity` compares the outputs instead of
the times (see `parity.py`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any, get_args

import torch

from ...config import Backend
from ...errors import mismatch
from ..arguments import positive, run_device
from ..environment import environment
from . import report as bench_report
from .columns import KINDS, Options
from .models import PRESETS, RandomSource, fitting_layers, make_source
from .passes import profile_columns, run_columns
from .results import ColumnResult
from .step import ATTENTION, register_attention

DEFAULT_BATCHES = (1, 8, 32, 64)
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64)
# The more layers, the fewer tokens take the same experts in all of them in both models: with
# Qwen3-30B-A3B on an H200, 58 % in 4 layers. The rest is held to a wide bound only.
PARITY_LAYERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megamoe bench`."""
    parser.add_argument(
        "--model",
        default="qwen3-30b-a3b",
        metavar="PRESET|DIR",
        help=f"random weights of a known shape ({', '.join(PRESETS)}), or the directory of a local "
        "checkpoint (default: qwen3-30b-a3b)",
    )
    parser.add_argument(
        "--layers",
        type=positive,
        help="take only the first N layers (default: all; of a preset, as many as fit in bf16, and "
        f"{PARITY_LAYERS} at the most with --parity)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        nargs="+",
        default=list(DEFAULT_BATCHES),
        metavar="N",
        help="requests decoded at once (default: 1 8 32 64)",
    )
    parser.add_argument(
        "--buckets",
        type=positive,
        nargs="+",
        metavar="N",
        help="more batch sizes that megamoe captures, not timed (default: 1 2 4 8 16 32 48 64 as "
        "far as the largest batch)",
    )
    parser.add_argument(
        "--context",
        type=positive,
        default=1024,
        help="positions that every request attends to (default: 1024)",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        choices=tuple(KINDS),
        default=list(KINDS),
        help="(default: all four)",
    )
    parser.add_argument(
        "--steps", type=positive, help="timed steps of a batch (default: 50; with --parity 256)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds after which the timing of one batch ends early (default: 5)",
    )
    parser.add_argument(
        "--attention",
        default="gemm",
        choices=("gemm", "sdpa"),
        help="of all columns: batched GEMMs without repeated keys, or the one of transformers "
        "(default: gemm)",
    )
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="profile a few replays on CUDA, for the share of the MoE blocks (default: yes)",
    )
    parser.add_argument(
        "--fuse-routers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="in the megamoe column, one kernel for a router's softmax and top-k (default: yes)",
    )
    parser.add_argument("--device", type=run_device, help="(default: cuda where there is one)")
    parser.add_argument(
        "--backend",
        choices=get_args(Backend),
        default="auto",
        help="of the megamoe column (default: auto)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    parser.add_argument(
        "--parity",
        action="store_true",
        help="compare logits and greedy tokens with the bf16 model and with the FP8 recipe over "
        "--steps steps of changing batch sizes, and time nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="write PATH.json, PATH.md and PATH.png; with --parity PATH.json",
    )
    parser.add_argument("--commit", help="of this code, where the run has no repository")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 if every column ran, or on parity; 1 otherwise.

    Raises:
        argparse.ArgumentError: arguments that make no sense.
    """
    if args.device is not None and args.device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentError(
            None, mismatch("--device", "cpu", args.device, "This torch has no usable GPU.")
        )
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = tuple(sorted(set(args.batch)))
    steps = args.steps or (256 if args.parity else 50)
    extra = args.buckets or [n for n in DEFAULT_BUCKETS if n < batches[-1]]
    try:
        if device.index is not None:
            torch.cuda.set_device(device)  # streams and graphs are those of the current device
        layers = args.layers
        if layers is None and args.model in PRESETS:
            layers = _layers_of(args.model, device, args.parity)
        source = make_source(args.model, layers, args.seed)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    if max(extra, default=0) > batches[-1]:
        raise argparse.ArgumentError(
            None,
            mismatch("--buckets", f"at most {batches[-1]}, the largest batch", extra, "Drop it."),
        )
    if args.out is not None:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # before an hour of work, not after it
            raise argparse.ArgumentError(None, f"--out: {error}") from error
    columns: dict[str, ColumnResult] = {}

    def keep(result: ColumnResult) -> None:
        columns[result.name] = result
        if args.out is not None:
            bench_report.write(args.out, facts, list(columns.values()))

    options = Options(
        source=source,
        device=device,
        batches=batches,
        buckets=tuple(sorted({*batches, *extra})),
        context_length=args.context,
        steps=steps,
        budget_s=args.budget,
        attention=ATTENTION if args.attention == "gemm" else "sdpa",
        backend=args.backend,
        seed=args.seed,
        fuse_routers=args.fuse_routers,
        keep=keep,
    )
    register_attention()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    facts: dict[str, Any] = {
        "model": source.name,
        "context": args.context,
        "attention": args.attention,
        "steps": steps,
        "command": "megamoe " + shlex.join(sys.argv[1:]),
        **environment(args.commit),
    }
    say(f"{source.name} on {facts['gpu']}")
    if args.parity:
        from .parity import run_parity

        return run_parity(options, facts, args.out, args.json, say)
    for column in run_columns(list(dict.fromkeys(args.columns)), options, say):
        keep(column)
    results = list(columns.values())
    if args.profile and device.type == "cuda":
        for column in profile_columns(results, options, say):
            keep(column)
    if args.out is not None:
        try:
            bench_report.plot(args.out, facts, results)
        except ModuleNotFoundError as error:
            say(f"no {args.out}.png: {error}. Run: pip install 'megamoe-compile[plot]'")
    if args.json:
        print(json.dumps(bench_report.as_dict(facts, results), default=str))
    else:
        print(bench_report.table(results))
    return 1 if any(column.error for column in results) else 0


def _layers_of(preset: str, device: torch.device, parity: bool) -> int:
    """What a preset has, as far as it fits and makes sense."""
    layers: int = RandomSource(preset, None).config.num_hidden_layers
    if device.type == "cuda":
        # Parity has three models at once, one in bf16 and two of half the bytes.
        free = torch.cuda.mem_get_info(device)[0]
        layers = fitting_layers(preset, free // 2 if parity else free)
    return min(layers, PARITY_LAYERS) if parity else layers
