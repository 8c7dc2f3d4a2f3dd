"""What the tests of `megamoe bench` share: the options of a small run on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from megamoe_compile.commands.bench.columns import Options
from megamoe_compile.commands.bench.models import RandomSource
from megamoe_compile.commands.bench.step import ATTENTION, register_attention

CPU = torch.device("cpu")


def options(**changes: Any) -> Options:
    register_attention()
    fields: dict[str, Any] = {
        "source": RandomSource("tiny", None),
        "device": CPU,
        "batches": (2,),
        "buckets": (1, 2),
        "context_length": 32,
        "steps": 3,
        "budget_s": 1.0,
        "attention": ATTENTION,
        "backend": "auto",
        "seed": 0,
    }
    return Options(**{**fields, **changes})
