"""Experts modules of transformers: which ones the kernels compute, and moving their weights out."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import BLOCK
from ...context import MegaMoEContext
from ...custom_ops.call import Swiglu
from ...custom_ops.reference.recipe import FP8
from ...errors import MegaMoEError, mismatch
from ..seam import EngineLayer
from .activation import KEEP, swiglu_of

CHILD = "megamoe"  # the name of the layer below the experts module
BIASES = ("gate_up_proj_bias", "down_proj_bias")
PARAMETERS = (
    "gate_up_proj",
    "gate_up_proj_scale_inv",
    "down_proj",
    "down_proj_scale_inv",
    *BIASES,
)


class HFExperts(EngineLayer):
    """The MegaMoE layer of one experts module, called as transformers calls experts.

    Args:
        local_ids: transformers has sharded the experts itself. Ids are then those of this rank's
            experts, and the number of these experts stands for a slot of another rank.
    """

    def __init__(self, context: MegaMoEContext, *, local_ids: bool = False) -> None:
        super().__init__(context)
        self.top_k = context.config.top_k
        self.sentinel = context.config.num_experts if local_ids else None
        self.released = False

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor | int | None = None,
    ) -> Tensor:
        """As MegaMoE.forward, for any leading dimensions, and for fewer slots than top_k."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = topk_ids.reshape(-1, topk_ids.shape[-1])
        weights = topk_weights.reshape(-1, topk_weights.shape[-1])
        if self.sentinel is not None:
            # The op skips such ids anyway, but counts them as mistakes of the router.
            ids = ids.masked_fill(ids >= self.sentinel, -1)
        if missing := self.top_k - ids.shape[-1]:
            # The all-to-all of transformers sends (token, expert) pairs: rows of one slot.
            ids = nn.functional.pad(ids, (0, missing), value=-1)
            weights = nn.functional.pad(weights, (0, missing))
        return super().forward(rows, ids, weights, num_valid).view(hidden_states.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What an experts module holds."""

    hidden_size: int
    intermediate_size: int
    num_experts: int  # on this rank, where transformers has sharded them
    swiglu: Swiglu
    biased: bool
    transposed: bool  # [E, H, 2I] and [E, I, H]
    interleaved: bool  # gate 0, up 0, gate 1, ..., not all of gate before up
    local_ids: bool


def shape_of(layout: Layout, top_k: int) -> dict[str, Any]:
    """The fields of MegaMoEConfig that an experts module fixes."""
    return {
        "hidden_size": layout.hidden_size,
        "intermediate_size": layout.intermediate_size,
        "num_experts": layout.num_experts,
        "top_k": top_k,
        "swiglu_limit": layout.swiglu.limit,
        "swiglu_alpha": layout.swiglu.alpha,
        "swiglu_beta": layout.swiglu.beta,
        "expert_bias": layout.biased,
    }


def is_experts(module: nn.Module) -> bool:
    """Whether the class of `module` takes an experts implementation of transformers."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def find_experts(model: nn.Module) -> dict[str, Any]:
    """The experts modules by name: those whose class takes an experts implementation.

    Raises:
        ValueError: there is none. MegaMoEError: some are converted already.
    """
    modules = {
        name or type(module).__name__: module
        for name, module in model.named_modules()
        if is_experts(module)
    }
    if not modules:
        raise ValueError(
            mismatch(
                f"experts in {type(model).__name__}",
                "at least one module that takes experts_implementation",
                "none",
                "Pass a MoE model of transformers.",
            )
        )
    if converted := [name for name, module in modules.items() if CHILD in module._modules]:
        raise MegaMoEError(
            mismatch("experts to convert", "unconverted", converted, "Load the model anew.")
        )
    return modules


def layout_of(
    experts: Any, name: str, group: dist.ProcessGroup | None, *, empty: bool = False
) -> Layout:
    """The layout of an experts module. ValueError where the kernels don't compute it.

    Args:
        empty: the weights may be on the meta device, since they come later.
    """
    _check_kind(experts, name, empty)
    w13, w2 = local_parameter(experts, "gate_up_proj"), local_parameter(experts, "down_proj")
    transposed = bool(experts.is_transposed)
    count, hidden, intermediate = w2.shape if not transposed else w2.mT.shape
    columns = (hidden, 2 * intermediate) if transposed else (2 * intermediate, hidden)
    if tuple(w13.shape) != (count, *columns):
        raise ValueError(
            mismatch(f"{name}.gate_up_proj.shape", [count, *columns], list(w13.shape), KEEP)
        )
    # transformers before 5.20 shards the parameters and sets no flag.
    local_ids = bool(getattr(experts, "_is_expert_parallel", False))
    local_ids = local_ids or _is_sharded(experts._parameters["gate_up_proj"], dim=0)
    sharded = local_ids or _is_sharded(experts._parameters["gate_up_proj"])
    if sharded and group is not None and dist.get_world_size(group) > 1:
        raise ValueError(
            mismatch(
                f"{name} with a group of {dist.get_world_size(group)} ranks",
                "whole experts on every rank",
                "experts that transformers has sharded",
                "Load the model without its parallelism, or pass group=None.",
            )
        )
    biased = bool(experts.has_bias)
    if biased and sharded and not local_ids:
        raise ValueError(
            mismatch(
                f"{name} with biases",
                "whole experts: the ranks' results are summed, and the bias would be with them",
                "experts that transformers has sharded by columns",
                "Load the model without tensor parallelism.",
            )
        )
    for key, columns_of in zip(BIASES, (2 * intermediate, hidden), strict=True) if biased else ():
        bias = local_parameter(experts, key)
        if tuple(bias.shape) != (count, columns_of):
            raise ValueError(
                mismatch(f"{name}.{key}.shape", [count, columns_of], list(bias.shape), KEEP)
            )
    return Layout(
        hidden,
        intermediate,
        count,
        swiglu_of(experts, name),
        biased,
        transposed,
        not experts.is_concatenated,
        local_ids,
    )


def local_parameter(experts: nn.Module, name: str) -> Tensor:
    """A parameter of an experts module, or this rank's part of it where it is sharded."""
    tensor = experts._parameters.get(name)
    if tensor is None or not tensor.numel():
        raise ValueError(
            mismatch(
                f"{type(experts).__name__}.{name}",
                "a parameter",
                "none",
                f"Load the model anew if its experts were released. {KEEP}",
            )
        )
    local = cast(Any, tensor).to_local() if _is_sharded(tensor) else tensor
    return cast(Tensor, local.detach())


def _is_sharded(tensor: Any, dim: int | None = None) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor) and any(
        not placement.is_replicate() and dim in (None, getattr(placement, "dim", None))
        for placement in tensor.placements
    )


def _check_kind(experts: Any, name: str, empty: bool) -> None:
    tensors = {key: experts._parameters.get(key) for key in PARAMETERS}
    dtypes = {t.dtype for key, t in tensors.items() if t is not None and "scale" not in key}
    if not empty and any(tensor is not None and tensor.is_meta for tensor in tensors.values()):
        raise ValueError(
            mismatch(f"weights of {name}", "loaded", "on the meta device", "Load them first.")
        )
    scheme = getattr(experts, "activation_scheme", "dynamic")
    block = getattr(experts, "block_size", None) if FP8 in dtypes else None
    post_norm = getattr(experts, "has_post_expert_norm", False)
    checks = (
        ("has_gate", "True, SwiGLU", experts.has_gate, bool(experts.has_gate)),
        ("has_post_expert_norm", False, post_norm, not post_norm),
        (
            "is_concatenated",
            "True, gate before up, of FP8 weights",
            False,
            bool(experts.is_concatenated) or FP8 not in dtypes,
        ),
        (
            "is_transposed",
            "False of FP8 weights",
            True,
            not experts.is_transposed or FP8 not in dtypes,
        ),
        ("activation_scheme", "'dynamic'", repr(scheme), scheme == "dynamic"),
        ("block_size", [BLOCK, BLOCK], block, block is None or list(block) == [BLOCK, BLOCK]),
    )
    for what, expected, got, holds in checks:
        if not holds:
            raise ValueError(mismatch(f"{name}.{what}", expected, got, KEEP))
    if not dtypes <= {torch.bfloat16, FP8}:
        raise ValueError(
            mismatch(
                f"dtype of {name}",
                f"torch.bfloat16 or {FP8}",
                ", ".join(sorted(map(str, dtypes))),
                "Load the model with dtype=torch.bfloat16.",
            )
        )


@torch.inference_mode(False)
@torch.no_grad()
def convert(experts: Any, layout: Layout, context: MegaMoEContext) -> HFExperts:
    """Move the weights of an inspected module into a new layer, its child, and free its own."""
    layer = HFExperts(context, local_ids=layout.local_ids)
    w13, s13, w2, s2, b13, b2 = (
        None if experts._parameters.get(name) is None else local_parameter(experts, name)
        for name in PARAMETERS
    )
    assert w13 is not None
    assert w2 is not None
    if layout.transposed or layout.interleaved:
        for expert in context.weight_geometry.local_experts:
            w13_e, w2_e = w13[expert], w2[expert]
            b13_e, b2_e = (None if b is None else b[expert] for b in (b13, b2))
            if layout.transposed:
                w13_e, w2_e = w13_e.T, w2_e.T
            if layout.interleaved:
                w13_e = gate_before_up(w13_e)
                b13_e = None if b13_e is None else gate_before_up(b13_e)
            parts = (w13_e.contiguous(), None, w2_e.contiguous(), None, b13_e, b2_e)
            layer.load_expert(expert, *parts)
    else:
        layer.load_weights(w13.contiguous(), s13, w2.contiguous(), s2, b13, b2)
    attach(experts, layer)
    return layer


def gate_before_up(rows: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, ... -> all gate rows, then all up rows (a new tensor)."""
    return torch.cat([rows[::2], rows[1::2]])


def attach(experts: Any, layer: HFExperts) -> None:
    """Make `layer` the child of an inspected experts module, and free the module's own weights."""
    for name in PARAMETERS:
        if name in experts._parameters:
            experts._parameters[name] = _remains(experts._parameters[name])
    experts.add_module(CHILD, layer)
    experts.register_state_dict_pre_hook(_refuse_state_dict)


def _remains(parameter: Any) -> nn.Parameter | None:
    """What stays in place of a parameter whose weights are gone: nothing, or an empty shard.

    transformers sums the experts' output over the ranks where the module has a sharded parameter.
    """
    if not _is_sharded(parameter):
        return None
    from torch.distributed.tensor import DTensor

    empty = parameter.to_local().new_empty(0, 0, 0)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = torch.Size((0, 0, 0)), (1, 1, 1)
    shard = DTensor.from_local(empty, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(shard, requires_grad=False)


def _refuse_state_dict(experts: nn.Module, prefix: str, keep_vars: bool) -> None:
    if CHILD in experts._modules:
        raise MegaMoEError(
            mismatch(
                f"state_dict of {prefix}gate_up_proj and down_proj",
                "the checkpoint's weights",
                "weights prepared for the kernels, which transformers cannot read back",
                "Save the model before its experts are converted.",
            )
        )
