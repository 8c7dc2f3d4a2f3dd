"""Small modules around a layer, as a model would hold it."""

from __future__ import annotations

import torch
from helpers import Inputs, random_inputs
from torch import Tensor, nn

import megamoe_compile as mm


class Block(nn.Module):
    """Residual around the experts; routing comes from outside, so that results are bitwise."""

    def __init__(self, experts: mm.MegaMoE) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return x + self.experts(x, topk_ids, topk_weights)


class Routed(nn.Module):
    """Decides the experts itself, from rows that may be padding."""

    def __init__(self, experts: mm.MegaMoE) -> None:
        super().__init__()
        self.router = nn.Linear(128, 4, bias=False, dtype=torch.bfloat16)
        self.experts = experts

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(2, dim=-1)
        out: Tensor = self.experts(x, ids, weights)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x)


def inputs_of(layer: mm.MegaMoE, tokens: int, seed: int = 0) -> Inputs:
    return random_inputs(layer.context.config, tokens, seed=seed)
