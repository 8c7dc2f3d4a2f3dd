"""Layers on equal weights, and what the recipe says of their outputs."""

from __future__ import annotations

import math

from torch import Tensor

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference.recipe import moe_reference

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden_states, topk_ids, topk_weights


def same_weights(context: mm.MegaMoEContext, layer: mm.MegaMoE) -> mm.MegaMoE:
    """A layer of another context over the same tensors: all backends read one layout."""
    geometry, other = context.weight_geometry, layer.context.weight_geometry
    sizes = [(g.num_rows, g.hidden_size, g.padded_intermediate_size) for g in (geometry, other)]
    assert sizes[0] == sizes[1], f"weights of {sizes[1]} for a layer of {sizes[0]}"
    twin = mm.MegaMoE(context)
    twin.install(layer.prepared)
    return twin


def recipe(
    inputs: Inputs,
    layer: mm.MegaMoE,
    intermediate_group: int,
    config: mm.MegaMoEConfig | None = None,
) -> Tensor:
    """[T, H] bf16 of the recipe in PyTorch, for a layer that has all experts.

    Args:
        intermediate_group: columns of a scale between the GEMMs, by which paths differ.
        config: of what is computed with the layer's weights; the layer's own by default.
    """
    config = layer.context.config if config is None else config
    return moe_reference(
        *inputs,
        *(layer.prepared if config.expert_bias else layer.prepared[:4]),
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
        routed_scaling_factor=config.routed_scaling_factor,
        intermediate_group=intermediate_group,
    )


def floor_us(experts: int, layer: mm.MegaMoE, bandwidth: float) -> float:
    """Microseconds to read the FP8 bytes of so many experts at `bandwidth`, in bytes per second."""
    per_expert = 3 * layer.w2.shape[1] * layer.w2.shape[2]
    return experts * per_expert / bandwidth * 1e6


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of all rows together; 0 for no rows, inf for what is not finite."""
    norm = float(want.double().norm())
    error = float((got.double() - want.double()).norm())
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm else error
