"""A MegaMoE layer over several ranks: right, then how fast, against other ways in the same run.

    torchrun --nproc-per-node 8 -m benchmarks.expert_parallel --out benchmarks/results/ep8
    python -m benchmarks.expert_parallel --spawn 4 --check-only    # 4 processes, on one GPU or CPU

Correctness comes first (`expert_parallel_check`), and a fault ends the run with exit code 1. Times
are taken only with a GPU for each rank: ranks that share one wait for each other's time slices.

Columns, microseconds of one layer with `tokens` on every rank, replayed in a CUDA graph:

    layer    the MegaMoE module, backend deep_gemm
    raw      DeepGEMM's own pre-dispatch and mega kernel on the same buffer
    chain    all-gather, this rank's experts, reduce-scatter (NCCL, see GatherChain)
    triton   the module with backend="triton", over symmetric memory
    floor    FP8 bytes of the experts touched on the busiest rank, at rank 0's copy rate

Method: that of `timing`. Before each timed replay a rank sleeps on the device, until the host has
queued the replay, and then all ranks meet in an all-reduce; a round's time is the slowest rank's.
NVLink multicast stays off, in NCCL and in PyTorch. Every wait has a limit, and a watchdog ends the
processes at --timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import megamoe_compile as mm
from benchmarks.expert_parallel_check import Findings, check
from benchmarks.expert_parallel_paths import (
    GatherChain,
    Ranks,
    gather_objects,
    local_oracle,
    reduce_scatter,
    triton_context,
)
from benchmarks.layer import WEIGHT_SETS, Bench, raw_calls
from benchmarks.layers import Inputs, floor_us, relative_error, same_weights
from benchmarks.plots import draw_lines, panels
from benchmarks.timing import (
    Timing,
    add_run_arguments,
    copy_bandwidth,
    markdown,
    results,
    show,
    time_variants,
    write_results,
)
from megamoe_compile.commands.decode.ranks import number_of_ranks, run_ranks, under_torchrun
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.symmetric.memory import OVERLAP_VARIABLE
from megamoe_compile.models.presets import PRESETS

MODELS = ["deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3", "glm-5"]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
SLEEP = 400_000  # device clocks, about 0.2 ms: longer than the host takes to queue a replay
MEMORY_SHARE = 0.35  # of a GPU, for sets of weights that take turns
VARIANTS = ("layer", "raw", "chain", "triton")
LINES = (
    ("layer_us", "o-"),
    ("raw_us", "x--"),
    ("chain_us", "s-"),
    ("triton_us", "^-"),
    ("floor_us", "k:"),
)
# Multicast of NVLink can put GPUs out of service for others that share the host.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Meeting:
    """How the ranks' times become one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._flag = torch.zeros(1, dtype=torch.float32, device=ranks.device)

    def align(self) -> None:
        torch.cuda._sleep(SLEEP)
        dist.all_reduce(self._flag, group=self._ranks.rows_group)

    def slowest(self, samples: dict[str, list[float]]) -> dict[str, list[float]]:
        everyone = gather_objects(samples, self._ranks.group)
        return {
            name: [max(times) for times in zip(*(other[name] for other in everyone), strict=True)]
            for name in samples
        }


class Paths:
    """All that is timed for one model: layers of the same weights, each in its own way.

    memory: bytes of a rank's GPU.
    """

    def __init__(self, ranks: Ranks, model: str, max_tokens: int, memory: int) -> None:
        self.ranks = ranks
        config = mm.MegaMoEConfig.preset(model, max_tokens_per_rank=max_tokens)
        per_set = 3 * config.hidden_size * config.padded_intermediate_size(256)
        per_set *= config.num_local_experts(ranks.size)
        sets = max(1, min(WEIGHT_SETS, int(MEMORY_SHARE * memory / per_set)))
        self.bench = Bench.make(config, ranks.group, ranks.device, sets)
        self.chain = GatherChain(ranks, self.bench.layers, max_tokens)
        self.left_out: dict[str, str] = {}
        self.triton: dict[mm.MegaMoE, mm.MegaMoE] | None = None
        try:
            context = triton_context(ranks, config)
        except BackendUnavailable as error:  # on every rank
            self.left_out["triton"] = f"not available: {error}"
        else:
            self.triton = {one: same_weights(context, one) for one in self.bench.layers}

    def contexts(self) -> list[mm.MegaMoEContext]:
        others = [] if self.triton is None else [next(iter(self.triton.values())).context]
        return [self.bench.context, self.chain.context, *others]

    @contextlib.contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Inside, every rank brings `tokens` rows to each call."""
        plan = mm.StepPlan.of_bucket(tokens, self.ranks.size, self.ranks.rank)
        with contextlib.ExitStack() as steps:
            for context in self.contexts():
                if context is not self.chain.context:
                    steps.enter_context(context.step(plan))
            yield

    def variants(self, tokens: int) -> dict[str, list[Callable[[], object]]]:
        """The calls of one graph by variant. Collective."""
        pairs = self.bench.pairs(self.bench.inputs(tokens))
        pre_dispatch, mega = raw_calls(self.bench)
        y = torch.empty_like(pairs[0][0][0])

        def raw(inputs: Inputs, layer: mm.MegaMoE) -> None:
            pre_dispatch(*inputs)
            mega(y, layer)

        calls: dict[str, list[Callable[[], object]]] = {
            "layer": [functools.partial(layer, *inputs) for inputs, layer in pairs],
            "raw": [functools.partial(raw, inputs, layer) for inputs, layer in pairs],
            "chain": [functools.partial(self.chain, layer, *inputs) for inputs, layer in pairs],
        }
        if self.triton is not None:
            calls["triton"] = [
                functools.partial(self.triton[layer], *inputs) for inputs, layer in pairs
            ]
        return calls

    def warmup(self, tokens: int) -> None:
        for context in self.contexts():
            own = context is self.chain.context
            context.warmup([tokens * self.ranks.size if own else tokens])

    def judge(self, tokens: int) -> dict[str, Any]:
        """Errors against the oracle, and the bytes of the experts that were touched."""
        (inputs,), layer = self.bench.inputs(tokens, calls=1), self.bench.layers[0]
        x, ids, weights = self.chain.gather(*inputs)

        @functools.cache  # paths with the same scales share it
        def want(group: int) -> torch.Tensor:
            out = torch.empty(inputs[0].shape, dtype=torch.float32, device=self.ranks.device)
            partial = local_oracle(layer, x, ids, weights, group)
            reduce_scatter(out, partial, group=self.ranks.rows_group)
            return out

        def error(out: torch.Tensor, context: mm.MegaMoEContext, rows: int) -> float:
            return relative_error(out, want(context.intermediate_group_for(rows)))

        errors = {
            "layer": error(layer(*inputs), layer.context, tokens),
            "chain": error(self.chain(layer, *inputs), self.chain.context, x.shape[0]),
        }
        if self.triton is not None:
            twin = self.triton[layer]
            errors["triton"] = error(twin(*inputs), twin.context, tokens)
        touched = int(ids[ids >= 0].unique().numel())
        everyone = gather_objects((errors, touched), self.ranks.group)
        return {
            "errors": {name: max(other[0][name] for other in everyone) for name in errors},
            "experts_touched": max(other[1] for other in everyone),
        }

    def close(self) -> None:
        for context in self.contexts():
            context.close()


def measure(
    paths: Paths, meeting: Meeting, model: str, tokens: int, options: Any
) -> dict[str, Any]:
    """One row of the table. Collective; the same on every rank, but for the floor."""
    paths.warmup(tokens)
    with paths.step(tokens):
        judged = paths.judge(tokens)
        times: dict[str, Timing] = time_variants(
            paths.variants(tokens), options.rounds, meeting.align, meeting.slowest
        )
    medians = {name: times[name].median if name in times else None for name in VARIANTS}
    layer = times["layer"].median
    row: dict[str, Any] = {"model": model, "ranks": paths.ranks.size, "tokens": tokens}
    row |= {f"{name}_us": median for name, median in medians.items()}
    row["floor_us"] = floor_us(judged["experts_touched"], paths.bench.layers[0], options.bandwidth)
    row["layer_spread_us"] = times["layer"].spread
    row["layer/raw"] = layer / times["raw"].median
    row["chain/layer"] = times["chain"].median / layer
    row["triton/layer"] = times["triton"].median / layer if "triton" in times else None
    row["experts_touched"] = judged["experts_touched"]
    row |= {f"{name}_error": judged["errors"].get(name) for name in VARIANTS if name != "raw"}
    return row


def benchmark(ranks: Ranks, options: argparse.Namespace) -> None:
    """All models and numbers of tokens; rank 0 prints and writes after each row."""
    torch.manual_seed(1 + ranks.rank)
    options.bandwidth = copy_bandwidth()
    data = results(options, options.bandwidth, left_out={})
    data["environment"] |= {
        "gpus": ranks.size,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **{name: os.environ.get(name) for name in NO_MULTICAST},
    }
    meeting = Meeting(ranks)
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    for model in options.models:
        paths = Paths(ranks, model, max(options.tokens), memory)
        data["left_out"] |= paths.left_out
        with torch.no_grad():
            for tokens in options.tokens:
                row = measure(paths, meeting, model, tokens, options)
                data["rows"].append(row)
                if ranks.rank == 0:
                    show(row)
                    write_results(options.out, data, markdown(data["rows"]))
        paths.close()
        del paths
        gc.collect()
        torch.cuda.empty_cache()
    if ranks.rank == 0:
        for name, reason in data["left_out"].items():
            print(f"{name}: {reason}")
        print(markdown(data["rows"]))
        try:
            with panels(data["rows"], options.out, "model", xlabel="tokens per rank") as drawn:
                for axis, rows in drawn:
                    draw_lines(axis, rows, LINES)
        except ModuleNotFoundError as error:
            print(f"no {options.out}.png: {error}")


def no_timing(ranks: Ranks) -> str | None:
    """Why this run has no times, or None."""
    if ranks.device.type == "cpu":
        return "no timing: it needs a GPU for each rank, and this ran on a CPU"
    if ranks.sharing_gpu:
        return "no timing: the ranks share a GPU and wait for each other's time slices"
    return None


def report(ranks: Ranks, findings: Findings) -> None:
    where = "sharing GPUs" if ranks.sharing_gpu else f"on {ranks.device.type}"
    print(f"{ranks.size} ranks {where}, against one process with all experts:")
    for path, error in findings.errors.items():
        print(f"  {path:16s} largest relative error {error:.4f}")
    for path, reason in findings.left_out.items():
        print(f"  {path:16s} left out: {reason}")
    for fault in findings.faults:
        print(f"  FAULT {fault}")
    print("WRONG" if findings.faults else "RIGHT", flush=True)


def run_rank(options: argparse.Namespace, local_rank: int, group: dist.ProcessGroup) -> bool:
    """One rank: check, then measure. Whether all was right."""
    ranks = Ranks.join(local_rank, group, options.device == "cuda", options.timeout / 2)
    findings = check(ranks, options.backend)
    if ranks.rank == 0:
        report(ranks, findings)
    if findings.faults or options.check_only:
        return not findings.faults
    reason = no_timing(ranks)
    if reason is None:
        benchmark(ranks, options)
    elif ranks.rank == 0:
        print(reason)
    return True


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spawn", type=int, help="start so many ranks here, without torchrun")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda if there is one)")
    parser.add_argument("--backend", default="auto", help="of the layer that is checked")
    parser.add_argument("--check-only", action="store_true", help="correctness, no timing")
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"(default: {MODELS})")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="per rank")
    add_run_arguments(parser, out_required=False)
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds, for all of it")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.models) - PRESETS.keys()):
        parser.error(f"--models: expected some of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    if min(options.tokens) < 1 or options.rounds < 2:
        parser.error("expected --tokens of at least 1 and --rounds of at least 2")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.ranks = number_of_ranks(options.spawn)
    if options.ranks < 2:
        parser.error("expected at least 2 ranks: run under torchrun, or pass --spawn")
    shared = options.device == "cuda" and torch.cuda.device_count() < options.ranks
    if options.out is None and not (options.check_only or shared or options.device == "cpu"):
        parser.error("expected --out or --check-only")
    return options


def main() -> None:
    options = parse()
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    if options.device == "cuda" and not under_torchrun():
        # Read when the ranks' processes import torch; with a GPU for each it changes nothing.
        os.environ.setdefault(OVERLAP_VARIABLE, "1")
    _, right = run_ranks(run_rank, (options,), options.ranks, options.timeout)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
