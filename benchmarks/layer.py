"""A MegaMoE layer against the raw DeepGEMM calls and the floor, in one run on one GPU.

    python -m benchmarks.layer --preset deepseek-v4-flash --local-experts 32 256 --out DIR/layer

One rank holds `local_experts` experts and routes among them. The floor is the FP8 bytes of the
experts that a call touches, at the copy rate measured in the same run. All calls of a graph share
one routing, so that every variant reads the same bytes (the mega kernel alone too, on what was
staged once), and rotate through several sets of weights, far larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe_compile as mm
from benchmarks.layers import Inputs, recipe, relative_error
from benchmarks.timing import (
    copy_bandwidth,
    environment,
    host_time,
    markdown,
    time_variants,
    write_results,
)
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops import library

CALLS = 16  # per graph
WEIGHT_SETS = 4
LINES = (("layer_us", "o-"), ("raw_us", "x--"), ("mega_us", "+:"), ("floor_us", "k:"))


@dataclasses.dataclass
class Bench:
    config: mm.MegaMoEConfig
    context: mm.MegaMoEContext
    layers: list[mm.MegaMoE]

    @classmethod
    def make(
        cls,
        config: mm.MegaMoEConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cuda",
        weight_sets: int = WEIGHT_SETS,
    ) -> Bench:
        context = mm.MegaMoEContext(config, group, device)
        return cls(config, context, [random_layer(context) for _ in range(weight_sets)])

    def inputs(self, tokens: int, calls: int = CALLS) -> list[Inputs]:
        """For each call its own rows, and one routing for all."""
        device = self.context.device
        scores = torch.rand(tokens, self.config.num_experts, device=device)
        weights, ids = scores.topk(self.config.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        shape = (tokens, self.config.hidden_size)
        return [
            (torch.randn(shape, device=device).bfloat16(), ids.int(), weights) for _ in range(calls)
        ]

    def pairs(self, inputs: list[Inputs]) -> list[tuple[Inputs, mm.MegaMoE]]:
        return list(zip(inputs, itertools.cycle(self.layers), strict=False))


def random_layer(context: mm.MegaMoEContext) -> mm.MegaMoE:
    """A layer with random e4m3 bytes (no NaN) and scales that keep outputs near one."""
    layer = mm.MegaMoE(context)
    geometry = context.weight_geometry
    e, h, i = geometry.num_rows, geometry.hidden_size, geometry.padded_intermediate_size

    def fp8(*shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=context.device)
        for expert in out:
            expert.copy_(torch.randn(expert.shape, device=context.device) * 64)
        return out

    def scale(rows: int, columns: int, fan_in: int) -> Tensor:
        return (0.5 + torch.rand(e, rows // 128, columns // 128, device=context.device)) / (
            64 * fan_in**0.5
        )

    # Made at the padded size: the bytes are random anyway, and are taken over in place.
    weights = (fp8(e, 2 * i, h), scale(2 * i, h, h), fp8(e, h, i), scale(h, i, i))
    for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), weights, strict=True):
        setattr(layer, name, tensor)
    layer.loaded = True
    return layer


def raw_calls(bench: Bench) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """DeepGEMM's own pre-dispatch and mega kernel on the context's buffer."""
    import deep_gemm

    runtime: Any = bench.context._runtime
    buffer = runtime._stage._buffer
    symmetric = SimpleNamespace(
        buffer=runtime.buffer.tensor,
        handle=SimpleNamespace(buffer_ptrs=runtime.buffer.pointers),
        group=SimpleNamespace(rank=lambda: bench.context.rank),
        num_max_tokens_per_rank=buffer.capacity,
        num_experts=bench.config.num_experts,
        num_topk=bench.config.top_k,
    )

    def pre_dispatch(x: Tensor, ids: Tensor, weights: Tensor) -> None:
        deep_gemm.mega_moe_pre_dispatch_sm90(
            x,
            ids,
            weights,
            buffer.x,
            buffer.scale,
            buffer.ids,
            buffer.weights,
            x.shape[0],
            128,
            bench.config.routed_scaling_factor,
        )

    def mega(y: Tensor, layer: mm.MegaMoE) -> None:
        deep_gemm.fp8_mega_moe(
            y,
            (layer.w13, layer.w13_scale),
            (layer.w2, layer.w2_scale),
            symmetric,
            activation_clamp=bench.config.swiglu_limit,
        )

    return pre_dispatch, mega


def measure(bench: Bench, tokens: int, bandwidth: float, rounds: int) -> dict[str, Any]:
    config = bench.config
    bench.context.warmup([tokens])
    pairs = bench.pairs(bench.inputs(tokens))
    pre_dispatch, mega = raw_calls(bench)
    y = torch.empty_like(pairs[0][0][0])

    def raw(inputs: Inputs, layer: mm.MegaMoE) -> None:
        pre_dispatch(*inputs)
        mega(y, layer)

    pre_dispatch(*pairs[0][0])
    times = time_variants(
        {
            "layer": [functools.partial(layer, *inputs) for inputs, layer in pairs],
            "raw": [functools.partial(raw, inputs, layer) for inputs, layer in pairs],
            "mega": [functools.partial(mega, y, layer) for _, layer in pairs],
        },
        rounds,
    )
    experts = int(pairs[0][0][1].unique().numel())
    per_expert = 3 * config.hidden_size * pairs[0][1].w2.shape[2]
    floor = experts * per_expert / bandwidth * 1e6
    inputs, layer = pairs[0]
    want = recipe(inputs, layer, bench.context.intermediate_group_for(tokens))
    return {
        "local_experts": config.num_experts,
        "tokens": tokens,
        "layer_us": times["layer"].median,
        "layer_spread_us": times["layer"].spread,
        "raw_us": times["raw"].median,
        "raw_spread_us": times["raw"].spread,
        "mega_us": times["mega"].median,
        "mega_spread_us": times["mega"].spread,
        "floor_us": floor,
        "layer/raw": times["layer"].median / times["raw"].median,
        "layer/mega": times["layer"].median / times["mega"].median,
        "layer/floor": times["layer"].median / floor,
        "relative_error": relative_error(layer(*inputs), want),
        "experts_touched": experts,
    }


def padding(bench: Bench, rounds: int) -> dict[str, float]:
    """Bucket 128 with 20 real tokens against exactly 20 tokens."""
    pairs = bench.pairs(bench.inputs(128))
    bench.context.warmup([20, 128])
    valid = torch.tensor([20], dtype=torch.int32, device="cuda")
    exact = [(tuple(t[:20] for t in inputs), layer) for inputs, layer in pairs]
    times = time_variants(
        {
            "padded": [functools.partial(m, *a, num_valid=valid) for a, m in pairs],
            "exact": [functools.partial(m, *a) for a, m in exact],
        },
        rounds,
    )
    padded, exactly = times["padded"].median, times["exact"].median
    return {"bucket128_20_us": padded, "exactly20_us": exactly, "ratio": padded / exactly}


def host(bench: Bench) -> dict[str, float]:
    """Host microseconds: an eager call and its parts, the raw calls, and a replay and its parts.

    `python_op_us` is the call where C++ does not take it: a first launch, an SM budget, a wheel
    without a C interface.
    """
    (a,), layer = bench.inputs(8, calls=1), bench.layers[0]
    pre_dispatch, mega = raw_calls(bench)
    y = torch.empty_like(a[0])
    state = (layer.num_valid, layer.launch_count)
    arguments = (*a, *layer.prepared, *state, *layer._constants)
    names = ("hidden_states", "topk_ids", "topk_weights")
    kwargs = dict(zip(names, a, strict=True))
    copying, viewing = (
        mm.GraphRunner(layer, kwargs, [8], bench.context, copy_outputs=copy)
        for copy in (True, False)
    )
    for runner in (copying, viewing):
        runner.capture(progress=False)
    graph, write = copying._captured[8].run, copying._expect(8).write
    with torch.no_grad():
        times = {
            "eager_layer_us": host_time(lambda: layer(*a)),
            "op_us": host_time(lambda: library.fused_moe(*arguments)),
            "python_op_us": host_time(lambda: library._fused_moe(*arguments)),
            "raw_pre_dispatch_us": host_time(lambda: pre_dispatch(*a)),
            "raw_mega_us": host_time(lambda: mega(y, layer)),
            "bare_graph_replay_us": host_time(graph),
            "input_copy_us": host_time(lambda: write(a)),
            "runner_call_us": host_time(lambda: copying(num_tokens=8, **kwargs)),
            "runner_call_views_us": host_time(lambda: viewing(num_tokens=8, **kwargs)),
        }
        bench.context.num_valid.fill_(ALL_VALID)  # `write` alone leaves 8 there
    return times


def plot(
    rows: list[dict[str, Any]],
    path: Path,
    panel: tuple[str, str] = ("local_experts", "{} local experts"),
    lines: Sequence[tuple[str, str]] = LINES,
    xlabel: str = "tokens",
) -> None:
    """path.png: a panel for each value of a column, and in it time against tokens.

    Args:
        panel: the column, and the title with the value in it. lines: columns and their styles; one
            without any value is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    column, title = panel
    groups = list(dict.fromkeys(row[column] for row in rows))
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False)
    for axis, value in zip(axes[0], groups, strict=True):
        mine = [row for row in rows if row[column] == value]
        tokens = [row["tokens"] for row in mine]
        for key, style in lines:
            if any(row[key] is not None for row in mine):
                axis.plot(tokens, [row[key] for row in mine], style, label=key.removesuffix("_us"))
        axis.set(
            xscale="log",
            yscale="log",
            xlabel=xlabel,
            ylabel="us per layer",
            title=title.format(value),
        )
        axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="deepseek-v4-flash")
    parser.add_argument("--local-experts", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of this code, where the run has no repository")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    data: dict[str, Any] = {
        "environment": environment(args.commit),
        "preset": args.preset,
        "copy_terabytes_per_second": bandwidth / 1e12,
        "calls_per_graph": CALLS,
        "rows": [],
    }
    for experts in args.local_experts:
        config = mm.MegaMoEConfig.preset(
            args.preset,
            max_tokens_per_rank=max(*args.tokens, 128),
            num_experts=experts,
            backend="deep_gemm",
        )
        bench = Bench.make(config)
        for tokens in args.tokens:
            row = measure(bench, tokens, bandwidth, args.rounds)
            data["rows"].append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        data[f"padding_{experts}"] = padding(bench, args.rounds)
        data[f"host_{experts}"] = host(bench)
        print(data[f"padding_{experts}"], data[f"host_{experts}"])
        bench.context.close()
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    table = markdown(data["rows"])
    write_results(args.out, data, table)
    plot(data["rows"], args.out)
    print(table)


if __name__ == "__main__":
    main()
