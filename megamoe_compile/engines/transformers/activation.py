"""The gate of an experts module of transformers, told from what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...custom_ops.call import Swiglu
from ...custom_ops.reference.recipe import swiglu
from ...errors import mismatch

KEEP = "Keep another experts_implementation for this model."
# (alpha, beta) of Llama's SwiGLU, which most models have, and of gpt-oss and MiniMax-M3.
KNOWN = ((1.0, 0.0), (1.702, 1.0))


def swiglu_of(experts: Any, name: str) -> Swiglu:
    """The SwiGLU of a module: its attributes and the known kinds, tried on numbers that tell.

    Raises:
        ValueError: its gate computes none of them.
    """
    limit = _attribute(experts, "limit", "swiglu_limit") or None
    alpha = _attribute(experts, "alpha", "swiglu_alpha")
    beta = _attribute(experts, "beta", "swiglu_beta")
    alphas, betas = zip(*KNOWN, strict=True)
    edge = limit or 8.0
    values = [-3 * edge, -edge / 2, -0.5, 0.0, 0.5, edge / 2, 3 * edge]
    points = torch.tensor(values, dtype=torch.float32, device="cpu")
    gate, up = (t.reshape(1, -1) for t in torch.meshgrid(points, points, indexing="ij"))
    columns = torch.cat([gate, up], dim=1) if experts.is_concatenated else interleave(gate, up)
    with torch.no_grad():
        got = experts._apply_gate(columns)
    for a in alphas if alpha is None else (alpha,):
        for b in betas if beta is None else (beta,):
            expected = swiglu(gate, up, limit, a, b)
            if got.shape == expected.shape and torch.allclose(got.float(), expected, 1e-3, 1e-3):
                return Swiglu(limit, a, b)
    raise ValueError(
        mismatch(
            f"unsupported activation of {name}",
            f"SwiGLU, silu(gate) * up or gate * sigmoid(alpha * gate) * (up + beta), with limit "
            f"{limit} and alpha {'1.0 or 1.702' if alpha is None else alpha}",
            f"another function, from {getattr(experts, 'act_fn', None)} and _apply_gate",
            KEEP,
        )
    )


def swiglu_limit(experts: Any, name: str) -> float | None:
    """The limit of a module's plain SwiGLU, silu(gate) * up. ValueError: it has another gate."""
    found = swiglu_of(experts, name)
    if (found.alpha, found.beta) != KNOWN[0]:
        raise ValueError(
            mismatch(
                f"(alpha, beta) of the SwiGLU of {name}",
                KNOWN[0],
                (found.alpha, found.beta),
                "Run this model with the megamoe column alone.",
            )
        )
    return found.limit


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[T, I] and [T, I] -> [T, 2I]: gate 0, up 0, gate 1, ..."""
    return torch.stack([gate, up], dim=-1).flatten(-2)


def _attribute(experts: Any, *names: str) -> float | None:
    values = (getattr(experts, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float)), None)
