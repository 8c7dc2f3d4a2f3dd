"""Routers of transformers whose softmax, top-k and renormalization one kernel can do.

    notes = fuse_routers(model)

Whether a router is one of those is decided by running it: its outputs on random rows must be those
of the kernel. Any other router stays as it is, and the notes say so.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...custom_ops.staging.router_topk import MAX_EXPERTS, router_topk
from .experts import CHILD

TRIED_ROWS = 64
FUSED = "fused"


class FusedRouter(nn.Module):
    """A linear router with softmax, top-k and optional renormalization; called as the original.

    Args:
        weight: [E, H], the original's parameter. top_k: K. renormalize: whether weights sum to 1.
    """

    def __init__(self, weight: nn.Parameter, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.weight = weight
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> (logits [T, E], weights [T, K], ids int64 [T, K])."""
        rows = hidden_states.reshape(-1, self.weight.shape[1])
        logits = nn.functional.linear(rows, self.weight)
        return (logits, *router_topk(logits, self.top_k, self.renormalize))


@torch.no_grad()
def fuse_routers(model: nn.Module) -> dict[str, str]:
    """Replace what can be replaced, next to experts that `prepare` has converted.

    A replaced router takes no hooks of the original's class: `output_router_logits` records
    nothing.

    Returns:
        by the router's name, "fused" or why it stays.
    """
    notes: dict[str, str] = {}
    for name, block in list(model.named_modules()):
        experts, gate = block._modules.get("experts"), block._modules.get("gate")
        if experts is None or gate is None or CHILD not in experts._modules:
            continue
        notes[f"{name}.gate"] = _fuse(cast(Any, block), gate)
    return notes


def _fuse(block: Any, gate: Any) -> str:
    weight, top_k = getattr(gate, "weight", None), getattr(gate, "top_k", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not isinstance(top_k, int):
        return "not a linear router with a top_k"
    if weight.shape[0] > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    if gate._forward_hooks or gate._forward_pre_hooks or "forward" in vars(gate):
        return "something wraps it"
    # Drawn on the CPU from a seed of its own: the same on every rank.
    generator = torch.Generator().manual_seed(0)
    shape = (TRIED_ROWS, weight.shape[1])
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    rows = rows.to(weight.device, weight.dtype)
    for renormalize in (True, False):
        fused = FusedRouter(weight, top_k, renormalize)
        if _same(gate(rows), fused(rows)):
            block.gate = fused.train(gate.training)
            return FUSED
    return "computes something else than softmax, top-k and renormalization"


def _same(want: Any, got: tuple[Tensor, Tensor, Tensor]) -> bool:
    if not isinstance(want, tuple) or len(want) != 3:
        return False
    logits, weights, ids = want
    if any(w.shape != g.shape or w.dtype != g.dtype for w, g in zip(want, got, strict=True)):
        return False
    if not torch.equal(logits, got[0]):
        return False
    # Equal logits may come in any order.
    picked = [logits.gather(1, chosen) for chosen in (ids, got[2])]
    return torch.equal(*picked) and torch.allclose(weights, got[1], rtol=0.01, atol=1e-6)
