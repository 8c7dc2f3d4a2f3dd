"""The two paths of one rank, and the choice between them, against the floor, in one run.

    python -m benchmarks.small_batch --out DIR/small_batch

All are layers on the same weights, rows and routing: `mega` under backend="deep_gemm", `small` the
small-batch kernel alone, `auto` under backend="auto", which has chosen at warm-up. Method and floor
as in benchmarks.layer. `--tune` adds the small-batch kernel under other settings.

A shape with an alpha and a beta of SwiGLU is measured when `--shapes` names it: `small` computes
them, and biases if there are any, and `plain` is the kernel without them on the same weights.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
OAI = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
# Shape -> fields of the config. None of these has an aim yet.
GENERAL: dict[str, dict[str, Any]] = {
    # GptOssConfig, its hidden size of 2880 padded to whole scales.
    "gpt-oss-120b": dict(hidden_size=2944, intermediate_size=2880, expert_bias=True),
    # Defaults of the text configuration of MiniMaxM3VLConfig.
    "minimax-m3": dict(hidden_size=6144, intermediate_size=3072, routed_scaling_factor=2.0),
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
LINES = (("mega_us", "x--"), ("small_us", "o-"), ("plain_us", "+:"), ("floor_us", "k:"))


@dataclass
class Kernel:
    """The small-batch kernel on the weights of a bench.

    Attributes:
        config: what it computes.
    """

    config: mm.MegaMoEConfig
    op: SmallBatch

    @classmethod
    def make(cls, bench: Bench, tuning: Tuning, config: mm.MegaMoEConfig | None = None) -> Kernel:
        config = bench.config if config is None else config
        op = SmallBatch(
            hidden_size=config.hidden_size,
            intermediate_size=bench.context.weight_geometry.padded_intermediate_size,
            num_experts=config.num_experts,
            top_k=config.top_k,
            capacity=config.max_tokens_per_rank,
            device=bench.context.device,
            swiglu_limit=config.swiglu_limit,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_beta=config.swiglu_beta,
            expert_bias=config.expert_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            tuning=tuning,
        )
        return cls(config, op)

    def __call__(self, bench: Bench, inputs: Inputs, layer: mm.MegaMoE, y: Tensor) -> None:
        context = bench.context
        weights, biases = layer.prepared[:4], layer.prepared[4:]
        stream = torch.cuda.current_stream().cuda_stream
        state = (context.num_valid, context.launch_count)
        self.op(*inputs, *state, *weights, y, stream, *(biases if self.config.expert_bias else ()))

    def error(self, bench: Bench, inputs: Inputs, layer: mm.MegaMoE) -> float:
        """Relative to the recipe, on poisoned output and workspaces."""
        y = torch.full_like(inputs[0], float("nan"))
        for name, workspace in self.op._workspaces.items():
            if name != "counters":
                workspace.view(torch.uint8).fill_(0xFF)  # NaN of each type
        self(bench, inputs, layer, y)
        torch.cuda.synchronize()
        return relative_error(y, recipe(inputs, layer, INTERMEDIATE_GROUP, self.config))


def automatic(bench: Bench, buckets: Sequence[int]) -> Bench:
    """The same layers in a context that chooses, warm."""
    config = replace(bench.config, backend="auto")
    context = mm.MegaMoEContext(config, device="cuda")
    layers = [same_weights(context, layer) for layer in bench.layers]
    context.warmup(buckets)
    return Bench(config, context, layers)


def measure(
    bench: Bench,
    layers: Mapping[str, Bench],
    kernels: Mapping[str, Kernel],
    tokens: int,
    bandwidth: float,
    rounds: int,
) -> dict[str, Any]:
    """Times of the layers (none, or `mega` and `auto`) and kernels, on the inputs of `bench`."""
    inputs = bench.inputs(tokens)
    pairs = bench.pairs(inputs)
    bench.context.warmup([tokens])
    variants: dict[str, list[Callable[[], object]]] = {
        name: [functools.partial(layer, *rows) for rows, layer in which.pairs(inputs)]
        for name, which in layers.items()
    }
    worst = 0.0
    for name, kernel in kernels.items():
        if tokens <= kernel.op.max_tokens:
            worst = max(worst, kernel.error(bench, *pairs[0]))
            y = torch.empty_like(pairs[0][0][0])
            variants[name] = [functools.partial(kernel, bench, *pair, y) for pair in pairs]
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
    if "plain" in times:
        row["small/plain"] = times["small"].median / times["plain"].median
    if layers:
        row["mega/floor"] = times["mega"].median / floor
        row["choice"] = layers["auto"].context.backend_for(tokens)
        best = min(times[name].median for name in ("mega", "small") if name in times)
        row["auto/best"] = times["auto"].median / best
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    with panels(rows, path, "shape") as drawn:
        for axis, mine in drawn:
            draw_lines(axis, mine, LINES)
            for choice, marker in (("small_batch", "v"), ("deep_gemm", "^")):
                chosen = [row for row in mine if row.get("choice") == choice]
                points = [(row["tokens"], row["auto_us"]) for row in chosen]
                if points:
                    label = f"auto: {choice}"
                    axis.plot(*zip(*points, strict=True), marker, mfc="none", label=label)
            axis.set_xticks([row["tokens"] for row in mine], [str(row["tokens"]) for row in mine])
            axis.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=[*SHAPES, *GENERAL])
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 to 512")
    parser.add_argument("--aims", action="store_true", help="only tokens with an aim")
    parser.add_argument("--tune", action="store_true", help="add the kernel under other settings")
    add_run_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    data = results(args, bandwidth)
    for shape in args.shapes:
        tunings = {"small": DEFAULT, **(TUNED if args.tune else {})}
        if shape in GENERAL:
            aims: dict[int, float] = {}
            sweep = args.tokens or TOKENS
            # A backend that takes each of them, and is not timed.
            fields = dict(num_experts=128, top_k=4, max_tokens_per_rank=512, backend="reference")
            bench = Bench.make(mm.MegaMoEConfig(**fields, **OAI, **GENERAL[shape]))
            layers = {}
        else:
            preset, experts, aims = SHAPES[shape]
            sweep = args.tokens or (aims if args.aims else TOKENS)
            config = mm.MegaMoEConfig.preset(
                preset, max_tokens_per_rank=512, num_experts=experts, backend="deep_gemm"
            )
            bench = Bench.make(config)
            layers = {"mega": bench, "auto": automatic(bench, sweep)}
        kernels = {name: Kernel.make(bench, tuning) for name, tuning in tunings.items()}
        if shape in GENERAL:
            plain = replace(bench.config, swiglu_alpha=1.0, swiglu_beta=0.0, expert_bias=False)
            kernels["plain"] = Kernel.make(bench, DEFAULT, plain)
        for tokens in sweep:
            row = {
                "shape": shape,
                **measure(bench, layers, kernels, tokens, bandwidth, args.rounds),
            }
            row["aim"] = aims.get(tokens, "")
            data["rows"].append(row)
            show(row)
        for which in (*layers.values(), bench):
            which.close()
        del kernels
    columns = (
        *("shape", "tokens", "small_us", "mega_us", "auto_us", "choice", "auto/best", "floor_us"),
        *("small/floor", "mega/floor", "aim", "plain_us", "small/plain", "relative_error"),
    )
    table = markdown([{key: row.get(key, "") for key in columns} for row in data["rows"]])
    write_results(args.out, data, table)
    plot(data["rows"], args.out)
    print(table)


if __name__ == "__main__":
    main()
