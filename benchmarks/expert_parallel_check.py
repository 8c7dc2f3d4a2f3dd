"""Layers over several ranks against one process with all experts: right before fast.

Rows are fresh in each case; counts are uneven, zero, or equal, and routing is random or goes to one
expert or one rank. A wrong result is noted, not raised, so that all ranks make the same launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import megamoe_compile as mm
from benchmarks.expert_parallel_paths import (
    ONE_GPU,
    GatherChain,
    Ranks,
    gather_objects,
    triton_context,
)
from benchmarks.layers import Inputs, recipe, relative_error, same_weights
from megamoe_compile.custom_ops.errors import BackendUnavailable

SHAPE: dict[str, Any] = dict(hidden_size=512, intermediate_size=256, top_k=4)
EXPERTS_PER_RANK = 8
CAPACITY = 64
BUCKETS = [1, 8, CAPACITY]
NAMES = ("hidden_states", "topk_ids", "topk_weights")
COUNTS = ([5, 0, 64, 1], [0, 64], [8], [0], [1], [64], [1, 0, 0], [33, 7, 64])
FEW_TOKENS = 8  # below it a row's own error shows more
BOUNDS = (0.03, 0.02)  # of fewer tokens, and of more

Forward = Callable[[mm.StepPlan, Inputs], Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    number: int
    counts: tuple[int, ...]  # tokens of each rank
    routing: str  # "random", "one expert" or "one rank"


def cases(ranks: int) -> Iterator[Case]:
    rows = [(counts, "random") for counts in COUNTS]
    rows += [([64], "one expert"), ([64], "one rank"), ([0, 17], "one rank")]
    for number, (counts, routing) in enumerate(rows):
        yield Case(number, tuple((counts * ranks)[:ranks]), routing)


@dataclasses.dataclass
class Findings:
    """What one rank saw: the largest error by path, and what was wrong."""

    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def compare(self, path: str, case: Case, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape:
            self.faults.append(f"{path}, {case}: shape {[*got.shape]}, not {[*want.shape]}")
            return
        error = relative_error(got, want)
        bound = BOUNDS[want.shape[0] >= FEW_TOKENS]
        self.errors[path] = max(error, self.errors.get(path, 0.0))
        if not error <= bound:
            self.faults.append(f"{path}, {case}: relative error {error:.3g} above {bound}")


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class Experts:
    """All experts of a small layer, of which each rank loads its share, and the oracle."""

    def __init__(self, ranks: Ranks, backend: str) -> None:
        self.ranks = ranks
        self.config = mm.MegaMoEConfig(
            **SHAPE,
            num_experts=EXPERTS_PER_RANK * ranks.size,
            max_tokens_per_rank=CAPACITY,
            swiglu_limit=10.0,
            routed_scaling_factor=1.5,
            backend=backend,  # type: ignore[arg-type]
        )
        generator = torch.Generator().manual_seed(0)
        e, h, i = self.config.num_experts, SHAPE["hidden_size"], SHAPE["intermediate_size"]
        self.w13, self.w2 = (
            _random(shape, generator).mul_(shape[-1] ** -0.5).bfloat16()
            for shape in ((e, 2 * i, h), (e, h, i))
        )
        self.context = mm.MegaMoEContext(self.config, ranks.group, ranks.device)
        self.layer = self._load(self.context)
        alone = dataclasses.replace(self.config, backend="reference")
        self._oracle = self._load(mm.MegaMoEContext(alone, None, ranks.device))

    def _load(self, context: mm.MegaMoEContext) -> mm.MegaMoE:
        layer = mm.MegaMoE(context)
        layer.load_weights(self.w13, None, self.w2, None)
        return layer

    def inputs(self, case: Case, padded: int | None = None) -> Inputs:
        """This rank's rows of a case; with `padded`, rows without a token behind them."""
        rank, count = self.ranks.rank, case.counts[self.ranks.rank]
        generator = torch.Generator().manual_seed(1000 * case.number + rank)
        rows = count if padded is None else padded
        x = _random((rows, self.config.hidden_size), generator).bfloat16()
        scores = _random((rows, self.config.num_experts), generator).sigmoid()
        weights, ids = scores.topk(self.config.top_k)
        if case.routing == "one expert":
            ids[:, 0], ids[:, 1:] = self.config.num_experts - 1, -1
        elif case.routing == "one rank":
            ids = ids % EXPERTS_PER_RANK + EXPERTS_PER_RANK * (self.ranks.size - 1)
        x[count:], ids[count:] = 1e30, -1
        device = self.ranks.device
        return x.to(device), ids.to(device), (weights / weights.sum(-1, keepdim=True)).to(device)

    def expected(self, inputs: Inputs, group: int) -> Tensor:
        """One process with all experts, on this rank's rows; see `recipe` for the group."""
        return recipe(inputs, self._oracle, group)


def check(ranks: Ranks, backend: str = "auto") -> Findings:
    """Run every path on every case. Collective; the same findings on every rank."""
    experts, findings = Experts(ranks, backend), Findings()
    with torch.no_grad():
        _check_layer(experts, experts.layer, "", findings)
        _check_chain(experts, findings)
        _check_triton(experts, findings)
    experts.context.close()
    merged = Findings(left_out=findings.left_out)
    for rank, other in enumerate(gather_objects(findings, ranks.group)):
        merged.faults += [f"rank {rank}: {fault}" for fault in other.faults]
        for path, error in other.errors.items():
            merged.errors[path] = max(error, merged.errors.get(path, 0.0))
    return merged


def _check_layer(experts: Experts, layer: mm.MegaMoE, prefix: str, findings: Findings) -> None:
    context = layer.context
    context.warmup(BUCKETS)
    one_token = Case(0, (1,) * experts.ranks.size, "random")
    example = dict(zip(NAMES, experts.inputs(one_token), strict=True))
    compiled = mm.compile_one_graph(
        layer, context, NAMES, backend="inductor" if context.device.type == "cuda" else "aot_eager"
    )
    runner = mm.GraphRunner(layer, example, BUCKETS, context)
    runner.capture(progress=False)

    def eager(plan: mm.StepPlan, inputs: Inputs, call: Any = layer) -> Tensor:
        with context.step(plan):
            out: Tensor = call(*inputs)
        return out

    def replayed(plan: mm.StepPlan, inputs: Inputs) -> Tensor:
        out: Tensor = runner(plan=plan, **dict(zip(NAMES, inputs, strict=True)))
        return out

    # On a GPU the runner replays CUDA graphs; on a CPU it calls the layer on padded buckets.
    paths: dict[str, Forward] = {
        "eager": eager,
        "compiled": functools.partial(eager, call=compiled),
        "runner": replayed,
    }
    for case in cases(experts.ranks.size):
        inputs = experts.inputs(case)
        group = context.intermediate_group_for(inputs[0].shape[0])
        want = experts.expected(inputs, group)
        plan = mm.StepPlan.from_counts(list(case.counts), experts.ranks.rank, BUCKETS)
        for name, forward in paths.items():
            findings.compare(prefix + name, case, forward(plan, inputs), want)


def _check_chain(experts: Experts, findings: Findings) -> None:
    ranks = experts.ranks
    if ranks.rows_group is None:
        findings.left_out["chain"] = ONE_GPU
        return
    chain = GatherChain(ranks, [experts.layer], CAPACITY)
    for case in cases(ranks.size):
        if not any(case.counts):
            continue  # the chain has nothing to send
        x, ids, weights = experts.inputs(case, max(case.counts))
        count = case.counts[ranks.rank]
        group = chain.context.intermediate_group_for(ranks.size * x.shape[0])
        want = experts.expected((x[:count], ids[:count], weights[:count]), group)
        findings.compare("chain", case, chain(experts.layer, x, ids, weights)[:count], want)
    chain.context.close()


def _check_triton(experts: Experts, findings: Findings) -> None:
    """The same layer on the other backend, where it can run."""
    if experts.context.backend == "reference":
        findings.left_out["triton"] = "not tried on a CPU"
        return
    try:
        context = triton_context(experts.ranks, experts.config)
    except BackendUnavailable as error:  # on every rank
        findings.left_out["triton"] = f"not available: {error}"
        return
    _check_layer(experts, same_weights(context, experts.layer), "triton ", findings)
    context.close()
