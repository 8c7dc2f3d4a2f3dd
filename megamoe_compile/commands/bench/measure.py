"""Timing, host time and kernels of a decode step.

Traps, all met before: one input set measures caches, so every timed step gets fresh random tokens;
zeros time faster than random data; the first steps after a capture are slow; a process that
was once profiled launches slower. Figures compare within one run only.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engines.transformers.experts import is_experts

ROUTER = re.compile(r"topk|bitonicsort|radixselect", re.IGNORECASE)
NORM = re.compile(r"rsqrt", re.IGNORECASE)
PROFILED_REPLAYS = 3
LEAST_STEPS = 3  # a spread needs some
NAME_LENGTH = 120  # characters of a kernel's name: enough to tell one from another


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step: the median and the interquartile range over `steps`."""

    median: float
    spread: float
    steps: int


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Microseconds of a call on the host: the median, and the least, which nothing disturbed."""

    median: float
    least: float


@dataclasses.dataclass(frozen=True)
class KernelShare:
    """Kernels of one step, and its copies and fills by the driver, from a profile of replays."""

    moe_block: float | None  # fraction of all kernel time; None where no block was recognized
    kernel_ms: float  # sum of all kernels
    kernels: int
    rows: list[tuple[str, float, int]]  # name, ms per step, launches per step; largest first


def percent(share: KernelShare) -> str:
    return "unknown" if share.moe_block is None else f"{share.moe_block:.0%}"


def time_steps(
    step: Callable[[Tensor], object], tokens: Tensor, steps: int, budget_s: float
) -> StepTime:
    """Time `step(tokens[i])`, each with its own tokens, until `steps` or until the budget is spent;
    three times at least.

    Args:
        tokens: int64 [N, B] on the device; used in turn. On CUDA a time lies between two events
            around the whole step, the copy of its tokens included.
    """
    cuda = tokens.device.type == "cuda"
    samples: list[float] = []
    for index in range(2):
        step(tokens[index % tokens.shape[0]])
    begin = time.perf_counter()
    while len(samples) < LEAST_STEPS or (
        len(samples) < steps and time.perf_counter() - begin < budget_s
    ):
        row = tokens[len(samples) % tokens.shape[0]]
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(row)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            step(row)
            samples.append((time.perf_counter() - started) * 1e3)
    low, _, high = statistics.quantiles(samples, n=4)
    return StepTime(statistics.median(samples), high - low, len(samples))


def host_time(calls: Sequence[Callable[[], object]], count: int = 100) -> HostTime:
    """Host time of one call; they are made in turn, `count` in all, the device idle before each."""
    samples = []
    for index in range(count):
        call = calls[index % len(calls)]
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return HostTime(statistics.median(samples), min(samples))


def kernel_share(step: Callable[[Tensor], object], tokens: Tensor) -> KernelShare:
    """Profile a few replays: which part of the kernels' time belongs to the MoE blocks."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for index in range(PROFILED_REPLAYS):
            step(tokens[index % tokens.shape[0]])
        torch.cuda.synchronize()
    events = [event for event in run.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return share_of(
        [(event.name, event.time_range.elapsed_us() / 1e3) for event in events], PROFILED_REPLAYS
    )


def share_of(kernels: Sequence[tuple[str, float]], replays: int) -> KernelShare:
    """The share of the MoE blocks in (name, ms) of all kernels of some replays, in their order.

    A replay runs its kernels in the order of the model. The MoE block of a layer, permutations,
    experts, shared experts and the residual sum, lies between the last kernel of a router's top-k
    and the first kernel of the next layer. That one is the RMSNorm with which a layer begins, the
    first of a replay: all layers share one compiled code, hence this name. The last layer has no
    next one, and counts as the mean of the others.
    """
    rows: dict[str, tuple[float, int]] = {}
    for name, ms in kernels:
        before, count = rows.get(name, (0.0, 0))
        rows[name] = before + ms, count + 1
    total = sum(ms for _, ms in kernels)
    blocks, unfinished = [], 0
    length = len(kernels) // replays
    for start in range(0, length * replays, length or 1):
        replay = kernels[start : start + length]
        first = next((name for name, _ in replay if NORM.search(name)), None)
        inside, block = False, 0.0
        for name, ms in replay:
            if ROUTER.search(name):
                inside, block = True, 0.0
            elif inside and name == first:
                blocks.append(block)
                inside = False
            elif inside:
                block += ms
        unfinished += inside
    all_blocks = sum(blocks) * (1 + unfinished / len(blocks)) if blocks else None
    largest = sorted(rows.items(), key=lambda row: -row[1][0])
    return KernelShare(
        None if all_blocks is None or not total else all_blocks / total,
        total / replays,
        length,
        [(name[:NAME_LENGTH], ms / replays, count // replays) for name, (ms, count) in largest],
    )


def step_bytes(step: Any, batch: int, touched: float, expert_bytes: int) -> float:
    """Bytes that a step reads at least: dense weights once, touched experts, the requests' cache.

    Args:
        step: a BenchStep. touched: experts that a step touches, summed over its layers.
        expert_bytes: of one expert, as this column stores it.
    """
    embedding = step.body.embed_tokens.weight
    expert_modules = {
        id(parameter)
        for module in step.model.modules()
        if is_experts(module)
        for parameter in module.parameters()
    }
    dense = sum(
        parameter.nbytes
        for parameter in step.model.parameters()
        if id(parameter) not in expert_modules and parameter is not embedding
    )
    if step.model.lm_head.weight is embedding:  # tied: the output layer reads all of it
        dense += embedding.nbytes
    cache = sum(buffer.nbytes // buffer.shape[0] * batch for buffer in step.stores.buffers())
    return float(dense + touched * expert_bytes + cache)
