"""The small-batch kernels under graph replay: every tuning at every bar shape, against the floor.

    python -m benchmarks.small_batch_sweep --out DIR/sweep            # about two minutes on an H200
    python -m benchmarks.small_batch_sweep --out DIR/sweep --shapes qwen3-30b --tokens 1 2 4 16

Method: as in timing.py. A graph holds CALLS calls with one routing, each on its own rows, that
rotate through WEIGHT_SETS sets of weights: a set is read again only after three others, far more
than L2 holds. The floor is the FP8 bytes of the touched experts at the copy rate measured in the
same run. Before it is timed, each variant's output is compared with the recipe.

Rows of the table: `default` is Tuning(); the others change what their name says. `K1` and `K2` are
one kernel alone, so their launches overlap less than in the pair. `staged` puts the pre-dispatch
kernel in front and feeds K1 quantized rows; `stage` is that kernel alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import copy_bandwidth, environment, time_variants, write_results
from megamoe_compile.custom_ops.pre_dispatch import PreDispatch, Routing, StagingBuffer
from megamoe_compile.custom_ops.reference import moe_reference
from megamoe_compile.custom_ops.small_batch_cuda import DOWN, GATE_UP, SmallBatch, Tuning

CALLS, WEIGHT_SETS = 16, 4
TOLERANCE = 0.006  # as in test_small_batch_cuda.py


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    bars: dict[int, float]  # tokens -> most times the floor


SHAPES = {
    "flash-256": Shape(4096, 2048, 256, 6, {1: 1.30, 4: 1.20, 8: 1.15}),
    "flash-32": Shape(4096, 2048, 32, 6, {1: 1.30, 8: 1.15, 32: 1.15}),
    "qwen3-30b": Shape(2048, 768, 128, 8, {1: 2.0, 8: 1.30, 64: 1.25}),
    "deepseek-v3-ep8": Shape(7168, 2048, 32, 8, {}),
}
DEFAULT = Tuning()
VARIANTS = {
    "default": DEFAULT,
    "tensor": replace(DEFAULT, loader="tensor"),
    "no-pdl": replace(DEFAULT, pdl=False),
    "early": replace(DEFAULT, early_trigger=True),
    "early-tensor": replace(DEFAULT, early_trigger=True, loader="tensor"),
    "blocks1": replace(DEFAULT, min_blocks=1),
    "blocks4": replace(DEFAULT, min_blocks=4),
    "cluster4": replace(DEFAULT, cluster=4),
    "stages3": replace(DEFAULT, stages=(3, 3)),
    "stages4": replace(DEFAULT, stages=(4, 4)),
    "stages8": replace(DEFAULT, stages=(8, 8)),
    "stages8-tensor": replace(DEFAULT, stages=(8, 8), loader="tensor"),
    "sms128": replace(DEFAULT, num_sms=128),
}


def random_weights(shape: Shape) -> tuple[Tensor, ...]:
    """Prepared weights: random e4m3 without NaN, and scales that keep outputs near one."""

    def fp8(*size: int) -> Tensor:
        out = torch.empty(size, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in out:
            expert.copy_(torch.randn(expert.shape, device="cuda") * 64)
        return out

    def scale(rows: int, columns: int) -> Tensor:
        size = (shape.experts, rows // 128, columns // 128)
        return (0.5 + torch.rand(size, device="cuda")) / (64 * columns**0.5)

    e, h, i = shape.experts, shape.hidden, shape.intermediate
    return fp8(e, 2 * i, h), scale(2 * i, h), fp8(e, h, i), scale(h, i)


@dataclass
class Bench:
    shape: Shape
    tokens: int
    weights: list[tuple[Tensor, ...]]

    def __post_init__(self) -> None:
        shape, tokens = self.shape, self.tokens
        scores = torch.rand(tokens, shape.experts, device="cuda").softmax(-1)
        self.routing, ids = scores.topk(shape.top_k, dim=-1)
        self.routing /= self.routing.sum(-1, keepdim=True)
        self.ids = ids.int()
        self.rows = [
            torch.randn(tokens, shape.hidden, device="cuda").bfloat16() for _ in range(CALLS)
        ]
        self.num_valid = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        self.count = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.y = torch.empty_like(self.rows[0])

    def floor(self, bandwidth: float) -> float:
        experts = int(self.ids.unique().numel())
        return experts * 3 * self.shape.hidden * self.shape.intermediate / bandwidth * 1e6

    def op(self, tuning: Tuning, **options: Any) -> SmallBatch:
        return SmallBatch(
            hidden_size=self.shape.hidden,
            intermediate_size=self.shape.intermediate,
            num_experts=self.shape.experts,
            top_k=self.shape.top_k,
            capacity=self.tokens,
            device=torch.device("cuda"),
            swiglu_limit=10.0,
            tuning=tuning,
            **options,
        )

    def call(self, op: SmallBatch, x: Tensor, w: tuple[Tensor, ...], phases: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        op(x, None, self.ids, self.routing, self.num_valid, self.count, *w, self.y, stream, phases)

    def calls(self, op: SmallBatch, phases: int = GATE_UP | DOWN) -> list[Callable[[], None]]:
        return [functools.partial(self.call, op, x, w, phases) for x, w in self.inputs()]

    def inputs(self) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        return zip(self.rows, itertools.cycle(self.weights), strict=False)

    def staged(self) -> Iterator[tuple[str, list[Callable[[], None]]]]:
        """The pre-dispatch kernel alone, and in front of kernels that take what it wrote."""
        shape, tokens = self.shape, self.tokens
        buffer = StagingBuffer(
            torch.zeros(tokens, shape.hidden, dtype=torch.uint8, device="cuda").view(
                torch.float8_e4m3fn
            ),
            torch.zeros(tokens, shape.hidden // 128, device="cuda"),
            torch.zeros(tokens, shape.top_k, dtype=torch.int64, device="cuda"),
            torch.zeros(tokens, shape.top_k, device="cuda"),
        )
        routing = Routing(shape.experts, shape.experts)
        stage = PreDispatch(buffer, routing, self.count, pdl=True, early_trigger=True)
        op = self.op(DEFAULT, staged=True)

        def run(x: Tensor, w: tuple[Tensor, ...], whole: bool) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            stage(x, self.ids, self.routing, self.num_valid, self.count, stream)
            if whole:
                op(buffer.x, buffer.scale, buffer.ids, buffer.weights, self.num_valid, self.count,
                   *w, self.y, stream)  # fmt: skip

        for name, whole in (("stage", False), ("staged", True)):
            yield name, [functools.partial(run, x, w, whole) for x, w in self.inputs()]

    def error(self, op: SmallBatch) -> float:
        """Relative to the recipe, on poisoned output and workspaces."""
        x, w = self.rows[0], self.weights[0]
        for poisoned in (self.y, op._hidden, op._spill):
            poisoned.fill_(float("nan"))
        self.call(op, x, w, GATE_UP | DOWN)
        torch.cuda.synchronize()
        return float((self.y.float() - self.reference).norm() / self.reference.norm())

    @functools.cached_property
    def reference(self) -> Tensor:
        return moe_reference(
            self.rows[0], self.ids, self.routing, *self.weights[0], swiglu_limit=10.0
        ).float()


def measure(bench: Bench, bandwidth: float, rounds: int) -> dict[str, Any]:
    variants: dict[str, list[Callable[[], None]]] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, tuning in VARIANTS.items():
        try:
            op = bench.op(tuning)
            errors[name] = bench.error(op)
        except RuntimeError as error:  # a ring that does not fit
            failed[name] = str(error)
            continue
        if not errors[name] <= TOLERANCE:
            failed[name] = f"relative error {errors[name]}"
        variants[name] = bench.calls(op)
    op = bench.op(DEFAULT)
    variants["K1"] = bench.calls(op, GATE_UP)
    variants["K2"] = bench.calls(op, DOWN)
    variants.update(bench.staged())
    times = time_variants(variants, rounds)
    floor = bench.floor(bandwidth)
    return {
        "tokens": bench.tokens,
        "floor_us": floor,
        "bar": bench.shape.bars.get(bench.tokens),
        "cluster": op.cluster,
        "us": {name: time.median for name, time in times.items()},
        "spread_us": {name: time.spread for name, time in times.items()},
        "relative_error": errors,
        "failed": failed,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Variants down, shapes across: microseconds; the best in each column has a star."""
    pairs = (*VARIANTS, "staged")
    lines = ["| | " + " | ".join(f"{r['shape']} T{r['tokens']}" for r in rows) + " |"]
    lines.append("|" + " --- |" * (len(rows) + 1))
    lines.append("| floor | " + " | ".join(f"{r['floor_us']:.1f}" for r in rows) + " |")
    bars = (f"{r['bar'] * r['floor_us']:.1f}" if r["bar"] else "" for r in rows)
    lines.append("| bar | " + " | ".join(bars) + " |")
    for name in (*pairs, "K1", "K2", "stage"):
        cells = []
        for r in rows:
            best = min(us for other, us in r["us"].items() if other in pairs)
            us = r["us"].get(name)
            star = "*" if us == best else "!" if name in r["failed"] else ""
            cells.append(f"{us:.1f}{star}" if us is not None else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    best = (min(us for n, us in r["us"].items() if n in pairs) / r["floor_us"] for r in rows)
    lines.append("| best / floor | " + " | ".join(f"{b:.3f}" for b in best) + " |")
    mine = (r["us"]["default"] / r["floor_us"] for r in rows)
    lines.append("| default / floor | " + " | ".join(f"{b:.3f}" for b in mine) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["flash-256", "flash-32", "qwen3-30b"])
    parser.add_argument("--tokens", type=int, nargs="+", help="default: those with a bar")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    rows = []
    for name in args.shapes:
        shape = SHAPES[name]
        weights = [random_weights(shape) for _ in range(WEIGHT_SETS)]
        for tokens in args.tokens or shape.bars or (1, 8):
            row = measure(Bench(shape, tokens, weights), bandwidth, args.rounds)
            rows.append({"shape": name, **row})
            worst = max(row["relative_error"].values(), default=float("nan"))
            print(name, tokens, f"default {row['us'].get('default', 0):.1f} us,",
                  f"floor {row['floor_us']:.1f}, worst error {worst:.4f}", row["failed"] or "",
                  flush=True)  # fmt: skip
        del weights
        gc.collect()
        torch.cuda.empty_cache()
    data = {
        "environment": environment(),
        "copy_terabytes_per_second": bandwidth / 1e12,
        "calls_per_graph": CALLS,
        "weight_sets": WEIGHT_SETS,
        "rows": rows,
    }
    text = table(rows)
    write_results(args.out, data, text)
    print(f"copy rate {bandwidth / 1e12:.3f} TB/s\n{text}")


if __name__ == "__main__":
    main()
