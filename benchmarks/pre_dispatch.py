"""Time our pre-dispatch kernel against DeepGEMM's, side by side in one run.

    python benchmarks/pre_dispatch.py results.json

Method: one CUDA graph holds LAUNCHES launches that rotate over BUFFERS sets of inputs and outputs;
the time of a launch is the time of a replay over LAUNCHES. The contestants take turns in each
round, so that a drift of the clocks hits all; the table has the median of ROUNDS rounds.

Traps: back-to-back launches overlap where PDL is on, so compare rows of the same kind. Only with
`early_trigger` does the next launch start before this one ends, and only a successor that waits
allows that. DeepGEMM's kernel also fills the ids of the rows behind T, ours never touches them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe_compile.custom_ops.cuda.timing import capture_calls
from megamoe_compile.custom_ops.staging.pre_dispatch import (
    PreDispatch,
    Routing,
    StagingBuffer,
    TritonPreDispatch,
)

LAUNCHES, BUFFERS, ROUNDS = 200, 8, 30
EXPERTS, CAPACITY, SCALING = 256, 128, 1.5
Step = Callable[[int], None]


class Workload:
    """BUFFERS sets of inputs, and an output buffer per set and contestant."""

    def __init__(self, tokens: int, hidden: int, top_k: int) -> None:
        self.tokens, self.hidden, self.top_k = tokens, hidden, top_k
        self.num_valid = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        self.count = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.inputs = [
            (
                torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda"),
                torch.randint(EXPERTS, (tokens, top_k), dtype=torch.int32, device="cuda"),
                torch.rand(tokens, top_k, dtype=torch.float32, device="cuda"),
            )
            for _ in range(BUFFERS)
        ]

    def buffers(self) -> list[StagingBuffer]:
        return [
            StagingBuffer(
                torch.zeros(CAPACITY, self.hidden, dtype=torch.uint8, device="cuda").view(
                    torch.float8_e4m3fn
                ),
                torch.zeros(CAPACITY, self.hidden // 128, dtype=torch.float32, device="cuda"),
                torch.zeros(CAPACITY, self.top_k, dtype=torch.int64, device="cuda"),
                torch.zeros(CAPACITY, self.top_k, dtype=torch.float32, device="cuda"),
            )
            for _ in range(BUFFERS)
        ]


def ours(work: Workload, **options: bool) -> tuple[Step, list[StagingBuffer]]:
    buffers, invalid = work.buffers(), torch.zeros(1, dtype=torch.int32, device="cuda")
    launchers = [
        PreDispatch(b, Routing(EXPERTS, EXPERTS, 0, 0, SCALING), invalid, **options)
        for b in buffers
    ]

    def step(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launchers[i](*work.inputs[i], work.num_valid, work.count, stream)

    return step, buffers


def twin(work: Workload) -> tuple[Step, list[StagingBuffer]]:
    buffers, invalid = work.buffers(), torch.zeros(1, dtype=torch.int32, device="cuda")
    routing = Routing(EXPERTS, EXPERTS, 0, 0, SCALING)
    launchers = [TritonPreDispatch(b, routing, invalid) for b in buffers]
    return lambda i: launchers[i](*work.inputs[i], work.num_valid, work.count), buffers


def theirs(work: Workload, pdl: bool) -> tuple[Step, list[StagingBuffer]]:
    import deep_gemm

    buffers = work.buffers()

    def step(i: int) -> None:
        deep_gemm.set_pdl(pdl)
        b = buffers[i]
        deep_gemm.mega_moe_pre_dispatch_sm90(
            *work.inputs[i],
            b.x,
            b.scale,
            b.ids,
            b.weights,
            work.tokens,
            128,
            SCALING,
        )
        deep_gemm.set_pdl(False)

    return step, buffers


CONTESTANTS: dict[str, Callable[[Workload], tuple[Step, list[StagingBuffer]]]] = {
    "deep_gemm": partial(theirs, pdl=False),
    "deep_gemm pdl": partial(theirs, pdl=True),
    "ours": partial(ours, pdl=False),
    "ours pdl": partial(ours, pdl=True),
    "ours pdl early_trigger": partial(ours, pdl=True, early_trigger=True),
    "triton": twin,
}


def capture(step: Step) -> torch.cuda.CUDAGraph:
    """LAUNCHES steps in one graph; an eager round before it compiles and loads everything."""
    return capture_calls([partial(step, launch % BUFFERS) for launch in range(LAUNCHES)])


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds per launch of one replay."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / LAUNCHES


def _staged(buffer: StagingBuffer, tokens: int) -> list[Tensor]:
    return [
        t[:tokens] for t in (buffer.x.view(torch.uint8), buffer.scale, buffer.ids, buffer.weights)
    ]


def measure(tokens: int, hidden: int, top_k: int) -> list[dict[str, Any]]:
    """Check that all contestants stage the same bytes, then time them in turn."""
    work = Workload(tokens, hidden, top_k)
    graphs, reference = {}, None
    for name, make in CONTESTANTS.items():
        step, buffers = make(work)
        graphs[name] = capture(step)
        graphs[name].replay()
        torch.cuda.synchronize()
        reference = reference or buffers
        for got, expected in zip(buffers, reference, strict=True):
            for a, b in zip(_staged(got, tokens), _staged(expected, tokens), strict=True):
                assert torch.equal(a, b), f"{name} differs from {next(iter(CONTESTANTS))}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph))
    return [
        {
            "tokens": tokens,
            "kernel": name,
            "median_us": round(statistics.median(samples), 3),
            "min_us": round(min(samples), 3),
        }
        for name, samples in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path, help="where the results go")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=6)
    args = parser.parse_args()

    rows = [row for n in args.tokens for row in measure(n, args.hidden, args.top_k)]
    print(f"us per launch, H={args.hidden}, K={args.top_k}, {torch.cuda.get_device_name()}")
    print(f"{'kernel':<24}" + "".join(f"{f'T={n}':>9}" for n in args.tokens))
    for name in CONTESTANTS:
        medians = [row["median_us"] for row in rows if row["kernel"] == name]
        print(f"{name:<24}" + "".join(f"{us:>9.2f}" for us in medians))
    report = {
        "benchmark": "pre_dispatch",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hidden": args.hidden,
        "top_k": args.top_k,
        "capacity": CAPACITY,
        "launches_per_graph": LAUNCHES,
        "rotating_buffers": BUFFERS,
        "rounds": ROUNDS,
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
