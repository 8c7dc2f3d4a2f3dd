"""What the tests of GraphRunner share: a captured runner of a block, its inputs, and poison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers import random_inputs
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.capture.runner import TIMED_REPLAYS

NAMES = ("x", "topk_ids", "topk_weights")
BUCKETS = [1, 2, 4, 8, 16]
REPLAYS_OF_A_CAPTURE = 1 + TIMED_REPLAYS


def named(config: mm.MegaMoEConfig, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    return dict(zip(NAMES, random_inputs(config, tokens, seed=seed), strict=True))


def make_runner(
    step: Any, context: mm.MegaMoEContext, buckets: Sequence[int] = BUCKETS, **options: Any
) -> mm.GraphRunner:
    runner = mm.GraphRunner(step, named(context.config, 3), buckets, context, **options)
    runner.capture()
    return runner


def poison(runner: mm.GraphRunner, value: float | None) -> None:
    """What a static row may hold: the last step, or anything."""
    for name, static in runner._static.items():
        if name == "topk_ids":
            static.fill_(0 if value is None else 10**6)
        elif value is None:
            static.normal_()
        else:
            static.fill_(value)
