"""What the tests of steps over several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Inputs, RankPool, make_config, make_layer, named, random_inputs
from torch import Tensor

import megamoe_compile as mm

WORLDS = pytest.mark.parametrize("world_size", [2, 4])
Ranks = Callable[[int], RankPool]
SHAPE: dict[str, Any] = dict(num_experts=8, top_k=3, max_tokens_per_rank=16)
BUCKETS = [1, 4, 8]
plan_of = mm.StepPlan.from_counts


def inputs_of(rank: int, tokens: int, seed: int) -> Inputs:
    return random_inputs(make_config(**SHAPE), tokens, seed=seed * 10 + rank)


class OneProcess:
    """What one process with all experts computes for the tokens of all ranks together."""

    def __init__(self, seed: int = 0) -> None:
        config = make_config(**{**SHAPE, "max_tokens_per_rank": 4096})
        self.context = mm.MegaMoEContext(config, device="cpu")
        self.layer = make_layer(self.context, seed=seed)

    def __call__(self, batches: list[Inputs]) -> list[Tensor]:
        """The result of every rank's batch."""
        together = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
        return list(self.layer(*together).split([batch[0].shape[0] for batch in batches]))


def make_context(**changes: Any) -> mm.MegaMoEContext:
    return mm.MegaMoEContext(make_config(**{**SHAPE, **changes}), dist.group.WORLD, "cpu")


def make_runner(
    context: mm.MegaMoEContext, layer: Callable[..., Any], **options: Any
) -> mm.GraphRunner:
    runner = mm.GraphRunner(layer, named(inputs_of(0, 2, 0)), BUCKETS, context, **options)
    runner.capture()
    return runner


def agree(tokens: Any, **options: Any) -> mm.StepPlan:
    options = {"buckets": BUCKETS, "capacity": SHAPE["max_tokens_per_rank"], **options}
    return mm.StepPlan.agree(tokens, dist.group.WORLD, **options)


def alike(values: object) -> bool:
    """Whether every rank has the same values. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return all(other == everyone[0] for other in everyone)
