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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe_compile as mm
from benchmarks.layers import Inputs, floor_us, recipe, relative_error
from benchmarks.plots import draw_lines, panels
from benchmarks.timing import (
    add_run_arguments,
    copy_bandwidth,
    host_time,
    markdown,
    results,
    show,
    time_variants,
    write_results,
)
from megamoe_compile.context import ALL_VALID
from megamoe_compile.custom_ops import library
from megamoe_compile.weights import PreparedWeights

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
        scores = torch.rand(tokens, self.config.num_experts, dtype=torch.float32, device=device)
        weights, ids = scores.topk(self.config.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        shape = (tokens, self.config.hidden_size)
        return [
            (torch.randn(shape, dtype=torch.bfloat16, device=device), ids.int(), weights)
            for _ in range(calls)
        ]

    def close(self) -> None:
        """Close the context, and free the weights."""
        self.context.close()
        self.layers.clear()
        gc.collect()
        torch.cuda.empty_cache()

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
            draw = torch.randn(expert.shape, dtype=torch.float32, device=context.device)
            expert.copy_(draw * 64)
        return out

    def scale(rows: int, columns: int, fan_in: int) -> Tensor:
        shape = (e, rows // 128, columns // 128)
        draw = torch.rand(shape, dtype=torch.float32, device=context.device)
        return (0.5 + draw) / (64 * fan_in**0.5)

    # Made at the padded size: the bytes are random anyway, and are taken over in place.
    weights = (fp8(e, 2 * i, h), scale(2 * i, h, h), fp8(e, h, i), scale(h, i, i))
    biases = [torch.randn(e, n, dtype=torch.float32, device=context.device) / 4 for n in (2 * i, h)]
    layer.install(PreparedWeights(*weights, *(biases if geometry.expert_bias else ())))
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
    inputs, layer = pairs[0]
    floor = floor_us(experts, layer, bandwidth)
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
    state = (layer.num_valid, layer.launch_count, layer._context_id)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="deepseek-v4-flash")
    parser.add_argument("--local-experts", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    add_run_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    data = results(args, bandwidth, preset=args.preset, calls_per_graph=CALLS)
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
            show(row)
        data[f"padding_{experts}"] = padding(bench, args.rounds)
        data[f"host_{experts}"] = host(bench)
        print(data[f"padding_{experts}"], data[f"host_{experts}"])
        bench.close()
    table = markdown(data["rows"])
    write_results(args.out, data, table)
    with panels(data["rows"], args.out, "local_experts", "{} local experts") as drawn:
        for axis, rows in drawn:
            draw_lines(axis, rows, LINES)
    print(table)


if __name__ == "__main__":
    main()
