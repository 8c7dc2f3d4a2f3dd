# mypy: ignore-errors
"""The kernel of router_topk.py."""

import triton
import triton.language as tl


@triton.jit
def router_topk_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least EXPERTS
    SLOTS: tl.constexpr,  # power of two, at least TOP_K
):
    """Grid: (T,). Takes the largest logit TOP_K times."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    slot = tl.arange(0, SLOTS)
    low = float("-inf")
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=low)
    logits = logits.to(tl.float32)
    largest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - largest), axis=0)
    values = tl.full([SLOTS], low, tl.float32)
    ids = tl.zeros([SLOTS], tl.int32)
    left = logits
    for k in tl.static_range(TOP_K):
        value = tl.max(left, axis=0)
        # The lowest of equal ones. Padding is -inf too, but comes after every expert.
        taken = tl.min(tl.where(left == value, expert, WIDTH), axis=0)
        values = tl.where(slot == k, value, values)
        ids = tl.where(slot == k, taken, ids)
        left = tl.where(expert == taken, low, left)
    weights = tl.exp(values - largest)
    if RENORMALIZE:
        total = tl.sum(weights, axis=0)
    weights = weights / total
    at = row * TOP_K + slot
    inside = slot < TOP_K
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=inside)
