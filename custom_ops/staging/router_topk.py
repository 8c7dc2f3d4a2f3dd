"""`megamoe::router_topk`: softmax, top-k and renormalization of a router in one kernel.

Compiled by Inductor this is three to four kernels, since its top-k is one of its own: at one token
they cost more than reading the router's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import mismatch

MAX_EXPERTS = 1024  # one warp holds a row of logits in registers


def router_topk_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, as the routers of transformers compute it; the kernel on a CPU."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def _check(logits: Tensor, top_k: int) -> None:
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            mismatch(
                "router_topk: logits and top_k",
                f"[T, E] with top_k <= E <= {MAX_EXPERTS}",
                f"{list(logits.shape)} and {top_k}",
                "Keep the model's own router.",
            )
        )


def _cuda(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    _check(logits, top_k)
    return router_topk_triton(logits, top_k, renormalize)


def router_topk_triton(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel on checked logits."""
    import triton

    from .router_topk_triton import router_topk_kernel

    tokens, experts = logits.shape
    logits = logits.contiguous()
    weights = logits.new_empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        router_topk_kernel[(tokens,)](
            logits,
            weights,
            ids,
            EXPERTS=experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            WIDTH=triton.next_power_of_2(experts),
            SLOTS=triton.next_power_of_2(top_k),
            num_warps=1,  # reductions stay within a warp: they are the whole cost
        )
    return weights, ids


def _cpu(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    _check(logits, top_k)
    return router_topk_reference(logits, top_k, renormalize)


def _fake(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    _check(logits, top_k)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _define() -> torch.library.Library:
    fragment = torch.library.Library("megamoe", "FRAGMENT")
    fragment.define("router_topk(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)")
    fragment.impl("router_topk", _cuda, "CUDA")
    fragment.impl("router_topk", _cpu, "CPU")
    torch.library.register_fake("megamoe::router_topk", _fake, lib=fragment)
    return fragment


# The op lives as long as this object, hence as long as the module; a reload keeps it.
if "_LIBRARY" not in globals():
    _LIBRARY = _define()


def router_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Route rows of logits.

    Args:
        logits: [T, E] bf16 or fp32, E at most 1024. top_k: K.
        renormalize: weights of a row sum to 1; else they are those of the softmax over all E.

    Returns:
        (weights [T, K] in the dtype of logits, descending; ids int64 [T, K]). Of equal logits the
        lowest id comes first.
    """
    weights, ids = torch.ops.megamoe.router_topk.default(logits, top_k, renormalize)
    return weights, ids
