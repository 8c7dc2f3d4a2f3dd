"""The two paths of one rank, and the choice between them, against the floor, in one run.

    python -m benchmarks.small_batch --out DIR/small_batch

All are layers on the same weights, rows and routing: `mega` under backend="deep_gemm", `small` the
small-batch kernel alone, `auto` under backend="auto", which has chosen at warm-up. Method and floor
as in benchmarks.layer. `--tune` adds the small-batch kernel under other settings.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megamoe_compile as mm
from benchmarks.layer import Bench
from benchmarks.layers import Inputs, floor_us, recipe, relative_error, same_weights
from benchmarks.plots import draw_lines, panels
from benchmarks.timing import (
    add_run_arguments,
    copy_bandwidth,
    markdown,
    results,
    show,
    time_variants,
    write_results,
)
from megamoe_compile.custom_ops.small_batch.kernel import INTERMEDIATE_GROUP, SmallBatch, Tuning

# Shape -> preset, local experts, and the aims: tokens -> most time over the floor.
SHAPES: dict[str, tuple[str, int, dict[int, float]]] = {
    "flash-256": ("deepseek-v4-flash", 256, {1: 1.30, 4: 1.20, 8: 1.15}),
    "flash-32": ("deepseek-v4-flash", 32, {1: 1.30, 8: 1.15, 32: 1.15}),
    "qwen3-30b": ("qwen3-30b-a3b", 128, {1: 2.0, 8: 1.30, 64: 1.25}),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT = Tuning()
TUNED = {
    "no-pdl": replace(DEFAULT, pdl=False),
    "stages3": replace(DEFAULT, stages=3),
    "stages6": replace(DEFAULT, stages=6),
    "sms128": replace(DEFAULT, num_sms=128),
}
TOLERANCE = 0.006
LINES = (("mega_us", "x--"), ("small_us", "o-"), ("floor_us", "k:"))


def small_batch(bench: Bench, tuning: Tuning) -> SmallBatch:
    config, geometry = bench.config, bench.context.weight_geometry
    return SmallBatch(
        hidden_size=config.hidden_size,
        intermediate_size=geometry.padded_intermediate_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        capacity=config.max_tokens_per_rank,
        device=torch.device("cuda"),
        swiglu_limit=config.swiglu_limit,
        routed_scaling_factor=config.routed_scaling_factor,
        tuning=tuning,
    )


def call(op: SmallBatch, bench: Bench, inputs: Inputs, layer: mm.MegaMoE, y: Tensor) -> None:
    context = bench.context
    weights = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    stream = torch.cuda.current_stream().cuda_stream
    op(*inputs, context.num_valid, context.launch_count, *weights, y, stream)


def error(op: SmallBatch, bench: Bench, inputs: Inputs, layer: mm.MegaMoE) -> float:
    """Relative to the recipe, on poisoned output and workspaces."""
    y = torch.full_like(inputs[0], float("nan"))
    for name, workspace in op._workspaces.items():
        if name != "counters":
            workspace.view(torch.uint8).fill_(0xFF)  # NaN of each type
    call(op, bench, inputs, layer, y)
    torch.cuda.synchronize()
    return relative_error(y, recipe(inputs, layer, INTERMEDIATE_GROUP))


def automatic(bench: Bench, buckets: Sequence[int]) -> Bench:
    """The same layers in a context that chooses, warm."""
    config = replace(bench.config, backend="auto")
    context = mm.MegaMoEContext(config, device="cuda")
    layers = [same_weights(context, layer) for layer in bench.layers]
    context.warmup(buckets)
    return Bench(config, context, layers)


def measure(
    bench: Bench,
    auto: Bench,
    ops: dict[str, SmallBatch],
    tokens: int,
    bandwidth: float,
    rounds: int,
) -> dict[str, Any]:
    inputs = bench.inputs(tokens)
    pairs = bench.pairs(inputs)
    bench.context.warmup([tokens])
    variants: dict[str, list[Callable[[], object]]] = {
        name: [functools.partial(layer, *rows) for rows, layer in which.pairs(inputs)]
        for name, which in (("mega", bench), ("auto", auto))
    }
    worst = 0.0
    for name, op in ops.items():
        if tokens <= op.max_tokens:
            worst = max(worst, error(op, bench, *pairs[0]))
            y = torch.empty_like(pairs[0][0][0])
            variants[name] = [functools.partial(call, op, bench, *pair, y) for pair in pairs]
    times = time_variants(variants, rounds)
    (_, ids, _), layer = pairs[0]
    floor = floor_us(int(ids.unique().numel()), layer, bandwidth)
    row: dict[str, Any] = {"tokens": tokens, "floor_us": floor}
    for name, time in times.items():
        row[f"{name}_us"] = time.median
        row[f"{name}_spread_us"] = time.spread
    if "small" in times:
        row["small/floor"] = times["small"].median / floor
        row["relative_error"] = worst
        if not worst <= TOLERANCE:
            row["wrong"] = True
    row["mega/floor"] = times["mega"].median / floor
    row["choice"] = auto.context.backend_for(tokens)
    best = min(times[name].median for name in ("mega", "small") if name in times)
    row["auto/best"] = times["auto"].median / best
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    with panels(rows, path, "shape") as drawn:
        for axis, mine in drawn:
            draw_lines(axis, mine, LINES)
            for choice, marker in (("small_batch", "v"), ("deep_gemm", "^")):
                chosen = [row for row in mine if row["choice"] == choice]
                points = [(row["tokens"], row["auto_us"]) for row in chosen]
                if points:
                    label = f"auto: {choice}"
                    axis.plot(*zip(*points, strict=True), marker, mfc="none", label=label)
            axis.set_xticks([row["tokens"] for row in mine], [str(row["tokens"]) for row in mine])
            axis.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 to 512")
    parser.add_argument("--aims", action="store_true", help="only tokens with an aim")
    parser.add_argument("--tune", action="store_true", help="add the kernel under other settings")
    add_run_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    data = results(args, bandwidth)
    for shape in args.shapes:
        preset, experts, aims = SHAPES[shape]
        config = mm.MegaMoEConfig.preset(
            preset, max_tokens_per_rank=512, num_experts=experts, backend="deep_gemm"
        )
        bench = Bench.make(config)
        tunings = {"small": DEFAULT, **(TUNED if args.tune else {})}
        ops = {name: small_batch(bench, tuning) for name, tuning in tunings.items()}
        sweep = args.tokens or (aims if args.aims else TOKENS)
        auto = automatic(bench, sweep)
        for tokens in sweep:
            row = {"shape": shape, **measure(bench, auto, ops, tokens, bandwidth, args.rounds)}
            row["aim"] = aims.get(tokens, "")
            data["rows"].append(row)
            show(row)
        del ops
        auto.close()
        bench.close()
    columns = (
        *("shape", "tokens", "small_us", "mega_us", "auto_us", "choice", "auto/best", "floor_us"),
        *("small/floor", "mega/floor", "aim", "relative_error"),
    )
    table = markdown([{key: row.get(key, "") for key in columns} for row in data["rows"]])
    write_results(args.out, data, table)
    plot(data["rows"], args.out)
    print(table)


if __name__ == "__main__":
    main()
