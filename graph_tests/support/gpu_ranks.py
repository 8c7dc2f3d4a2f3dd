"""What the tests of several ranks on GPUs share: processes, one layer in each, and the oracle.

Scenarios run in the ranks' processes, and what they make lives there until the pool is closed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import Inputs, RankPool, assert_close, make_config, random_checkpoint, random_inputs
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference.recipe import interleave_gate_up, moe_reference
from megamoe_compile.custom_ops.symmetric.memory import OVERLAP_VARIABLE

SHAPE: dict[str, Any] = dict(hidden_size=512, intermediate_size=256, num_experts=16, top_k=4)
DEVICE = "cuda:0"
LIMIT = 240  # seconds for one scenario on all ranks, compilations included
KEPT: dict[str, Any] = {}  # of a rank's process, between scenarios


def ranks_on_one_gpu(ranks: int, folder: Path) -> RankPool:
    return RankPool(ranks, folder, environment={OVERLAP_VARIABLE: "1"})


def layer_with(warm: list[int], **changes: Any) -> mm.MegaMoE:
    """One context and layer per process and configuration, with this rank's experts.

    Args:
        warm: numbers of tokens to warm up, when the layer is made.
        changes: of SHAPE; max_tokens_per_rank at least.
    """
    key = repr(changes)
    if key not in KEPT:
        config = make_config(**{**SHAPE, **changes})
        context = mm.MegaMoEContext(config, dist.group.WORLD, DEVICE)
        layer = mm.MegaMoE(context)
        layer.load_weights(*random_checkpoint(config))
        context.warmup(warm)
        KEPT[key] = layer
    return KEPT[key]  # type: ignore[no-any-return]


def inputs_of(rank: int, tokens: int, seed: int) -> Inputs:
    """A rank's own rows; every process can make those of any rank."""
    config = make_config(**SHAPE, max_tokens_per_rank=1)
    return random_inputs(config, tokens, seed=seed * 100 + rank, device=DEVICE)


def check(layer: mm.MegaMoE, inputs: Inputs, y: Tensor, what: str) -> None:
    """Against all experts on one rank; no rank needs the others for it."""
    assert y.shape == inputs[0].shape, what
    if "all experts" not in KEPT:
        checkpoint = random_checkpoint(make_config(**SHAPE, max_tokens_per_rank=1))
        w13 = torch.stack([interleave_gate_up(w) for w in checkpoint.w13])
        assert checkpoint.w13_scale is not None and checkpoint.w2_scale is not None
        weights = (w13, checkpoint.w13_scale, checkpoint.w2, checkpoint.w2_scale)
        KEPT["all experts"] = tuple(t.to(DEVICE) for t in weights)
    if y.shape[0]:
        group = layer.context._runtime.intermediate_group  # type: ignore[union-attr]
        want = moe_reference(*inputs, *KEPT["all experts"], intermediate_group=group)
        assert_close(y, want, 0.03 if y.shape[0] < 8 else 0.02, what)


def jitter(rank: int, step: int, world_size: int) -> None:
    """One rank comes late, on the device and on the host; another one each time."""
    if step % world_size == rank:
        torch.cuda._sleep(20_000_000)
        time.sleep(0.01)


def whole_numbers(rank: int, rows: int, step: int, device: str = "cuda") -> Tensor:
    """bf16 [rows, 64] of 0 to 7: rows of other ranks, steps and places are others.

    A sum over 8 ranks with weights 1 to 8 is at most 252: exact in bf16, in any order. Made on the
    device, so that nothing waits for a copy.
    """
    at = torch.arange(rows * 64, device=device).view(rows, 64) + 100003 * (rank + 8 * step)
    mixed = (at * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x45D9F3B) & 0xFFFFFFFF
    return (mixed >> 13 & 7).bfloat16()
