"""What a call of the op is: its tensors, the layer that they are for, and every rule about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import CapacityError, mismatch


class Weights(NamedTuple):
    """Prepared weights of E experts: this rank's routed ones, then the shared ones.

    Attributes:
        w13: [E, 2I, H] e4m3, gate and up rows interleaved in groups of 8. w13_scale:
            [E, 2I/128, H/128] fp32, gate blocks before up blocks.
        w2: [E, H, I] e4m3. w2_scale: [E, H/128, I/128] fp32.
        w13_bias: [E, 2I] fp32 in the row order of w13. w2_bias: [E, H] fp32. Both, or neither.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


class Call(NamedTuple):
    """One launch of a layer.

    Attributes:
        x: [T, H] bf16. topk_ids: [T, K] int32 or int64. topk_weights: [T, K] fp32 or bf16.
        num_valid: int32 [1]; rows at or above it are not routed.
        launch_count: int32 [1], which the launch adds one to.
        out: [T, H] bf16, contiguous; the launch writes every row.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    weights: Weights
    num_valid: Tensor
    launch_count: Tensor
    out: Tensor


class Swiglu(NamedTuple):
    """g * sigmoid(alpha * g) * (u + beta) of gate g, at most `limit`, and up u, within +-`limit`.

    gpt-oss has alpha 1.702, beta 1 and limit 7 (`GptOssExperts._apply_gate` of transformers).
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


PLAIN = Swiglu()


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a runtime is made for.

    Attributes:
        intermediate_size: I, padded. num_experts: routed ones, of all ranks.
        num_shared_experts: of the same shape, which take every row with weight 1.
        capacity: most tokens of one rank in one call.
        routed_scaling_factor: factor on the routing weights.
        expert_bias: whether each call brings w13_bias and w2_bias.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    capacity: int
    num_shared_experts: int = 0
    swiglu: Swiglu = PLAIN
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False

    @property
    def num_slots(self) -> int:
        """Slots of one token: routed and shared experts."""
        return self.top_k + self.num_shared_experts


def idle_call(tokens: int, top_k: int, weights: Weights, launch_count: Tensor) -> Call:
    """A call of `tokens` rows that routes nothing, to warm up with."""
    x = launch_count.new_zeros(tokens, weights.w13.shape[2], dtype=torch.bfloat16)
    ids = launch_count.new_full((tokens, top_k), -1)
    nothing = torch.zeros_like(launch_count)
    return Call(x, ids, ids.float(), weights, nothing, launch_count, torch.empty_like(x))


# -- rules ----------------------------------------------------------------------------------------

Rule = tuple[object, type[Exception], str, object, object, str]

_FP8_DTYPES = frozenset((torch.float8_e4m3fn, torch.uint8))
_ID_DTYPES = frozenset((torch.int32, torch.int64))
_ROUTING_DTYPES = frozenset((torch.float32, torch.bfloat16))


def rules(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    num_valid: Tensor,
    top_k: int,
    capacity: int,
) -> Iterator[Rule]:
    """Everything about a call that does not depend on data, in the order it is reported.

    Yields (condition, error, what, expected, got, cure); a condition may be symbolic.
    """
    yield from _weight_rules(weights)
    yield (
        num_valid.dtype is torch.int32 and num_valid.numel() == 1,
        ValueError,
        "num_valid",
        "one int32",
        f"{num_valid.dtype} {list(num_valid.shape)}",
        "Pass torch.tensor([n], dtype=torch.int32) on the device of hidden_states.",
    )
    rows = (("hidden_states", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights))
    for name, t in rows:
        yield t.dim() == 2, ValueError, f"{name}.dim()", 2, t.dim(), "Flatten tokens to one axis."
    dtypes = (
        ("torch.bfloat16", x.dtype is torch.bfloat16),
        ("torch.int32 or torch.int64", topk_ids.dtype in _ID_DTYPES),
        ("torch.float32 or torch.bfloat16", topk_weights.dtype in _ROUTING_DTYPES),
    )
    for (name, t), (expected, holds) in zip(rows, dtypes, strict=True):
        yield holds, ValueError, f"{name}.dtype", expected, t.dtype, "Cast it."
    yield (
        x.shape[1] == weights.w13.shape[2],
        ValueError,
        "hidden_states.shape[1]",
        weights.w13.shape[2],
        x.shape[1],
        "It must be the hidden_size of the config.",
    )
    for name, t in rows[1:]:
        yield (
            t.shape[0] == x.shape[0],
            ValueError,
            f"{name}.shape[0]",
            x.shape[0],
            t.shape[0],
            "It must be the number of rows of hidden_states.",
        )
        yield (
            t.shape[1] == top_k,
            ValueError,
            f"{name}.shape[1]",
            top_k,
            t.shape[1],
            "It must be the top_k of the config.",
        )
    for name, t in rows:
        # A single column has no column stride to speak of.
        yield (
            t.stride(1) == 1 or t.shape[1] == 1,
            ValueError,
            f"{name}.stride(1)",
            1,
            t.stride(1),
            "Rows may be strided, columns may not: call .contiguous().",
        )
    yield (
        x.shape[0] <= capacity,
        CapacityError,
        "tokens on this rank",
        f"at most {capacity} (max_tokens_per_rank)",
        x.shape[0],
        "Raise max_tokens_per_rank, or split the batch the same way on all ranks.",
    )


def _weight_rules(weights: Weights) -> Iterator[Rule]:
    """Of the prepared weights, against w13."""
    cure = "Use the prepared weights of one layer: load_weights makes them."
    w13, fp32 = weights.w13, torch.float32
    yield w13.dim() == 3, ValueError, "w13.dim()", 3, w13.dim(), cure
    experts, rows, hidden = w13.shape
    expected = (
        ([experts, rows, hidden], torch.uint8 if w13.dtype is torch.uint8 else torch.float8_e4m3fn),
        ([experts, rows // 128, hidden // 128], fp32),
        ([experts, hidden, rows // 2], w13.dtype),
        ([experts, hidden // 128, rows // 256], fp32),
        ([experts, rows], fp32),
        ([experts, hidden], fp32),
    )
    one = (weights.w13_bias is None) != (weights.w2_bias is None)
    yield not one, ValueError, "w13_bias and w2_bias", "both, or neither", "one", cure
    for name, t, (shape, dtype) in zip(weights._fields, weights, expected, strict=True):
        if t is not None:
            got = list(t.shape)
            yield got == shape, ValueError, f"{name}.shape", shape, got, cure
            yield t.dtype is dtype, ValueError, f"{name}.dtype", dtype, t.dtype, cure
            # Kernels see a pointer.
            whole = t.is_contiguous()
            yield whole, ValueError, f"{name}.stride()", "contiguous", t.stride(), cure


def _hold(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    num_valid: Tensor,
    top_k: int,
    capacity: int,
) -> bool:
    """Whether every rule holds; False may also be a single column's odd stride.

    The rules as one expression: making a report's words costs more than a launch.
    """
    w13, w13_scale, w2, w2_scale, w13_bias, w2_bias = weights
    shape, slots = x.shape, topk_ids.shape
    if w13.dim() != 3 or len(shape) != 2 or len(slots) != 2:
        return False
    experts, rows, hidden = w13.shape
    return (
        slots == topk_weights.shape
        and slots[0] == shape[0] <= capacity
        and slots[1] == top_k
        and shape[1] == hidden
        and x.dtype is torch.bfloat16
        and topk_ids.dtype in _ID_DTYPES
        and topk_weights.dtype in _ROUTING_DTYPES
        and x.stride(1) == 1
        and topk_ids.stride(1) == 1
        and topk_weights.stride(1) == 1
        and w13_scale.shape == (experts, rows // 128, hidden // 128)
        and w2.shape == (experts, hidden, rows // 2)
        and w2_scale.shape == (experts, hidden // 128, rows // 256)
        and w13.dtype in _FP8_DTYPES
        and w2.dtype is w13.dtype
        and w13_scale.dtype is torch.float32
        and w2_scale.dtype is torch.float32
        and w13.is_contiguous()
        and w13_scale.is_contiguous()
        and w2.is_contiguous()
        and w2_scale.is_contiguous()
        and num_valid.dtype is torch.int32
        and num_valid.numel() == 1
        and (
            (w13_bias is None and w2_bias is None)
            or (_is_bias(w13_bias, (experts, rows)) and _is_bias(w2_bias, (experts, hidden)))
        )
    )


def _is_bias(bias: Tensor | None, shape: tuple[int, int]) -> bool:
    if bias is None or bias.dtype is not torch.float32:
        return False
    return bias.shape == shape and bias.is_contiguous()


def check_call(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    num_valid: Tensor,
    top_k: int,
    capacity: int,
) -> None:
    """Raise for the first rule that does not hold."""
    arguments = (x, topk_ids, topk_weights, weights, num_valid, top_k, capacity)
    if not _hold(*arguments):
        for condition, error, *report in rules(*arguments):
            if not condition:
                raise error(mismatch(*report))  # type: ignore[arg-type]
