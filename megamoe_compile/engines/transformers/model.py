"""Hugging Face transformers: `experts_implementation="megamoe"`.

    from megamoe_compile.engines import transformers as megamoe

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with megamoe.prepare(model, max_tokens_per_rank=2048):
        model.generate(...)

`prepare` moves the weights of every experts module into a MegaMoE layer, a child of that module
named "megamoe", and frees the module's own parameters: bf16 weights are quantized to FP8 expert by
expert, 128x128 FP8 weights are taken over with their scales. From then on the model has no other
experts: another implementation finds no weights, and `state_dict()` and `save_pretrained()` raise
rather than write a checkpoint that transformers could not read back.

`register` alone is enough for eager use and for `generate`: each module is converted at its first
call. A first call inside torch.compile raises, since a module cannot change while it is traced.

Routers of transformers scale the weights themselves and shared experts are the model's own MLP, so
the context has `routed_scaling_factor` 1.0 and no shared experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...capture.contexts import AnyContext, MegaMoEContexts
from ...config import MegaMoEConfig
from ...context import MegaMoEContext
from ...errors import MegaMoEError, mismatch
from ...models.hf_config import moe_top_k
from ..seam import EngineContexts, require_eager
from .experts import (
    CHILD,
    HFExperts,
    attach,
    convert,
    find_experts,
    layout_of,
    local_parameter,
    shape_of,
)

NAME = "megamoe"
OLDEST = (5, 17)


def register(
    *,
    max_tokens_per_rank: int = 4096,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **config_changes: Any,
) -> None:
    """Register the implementation "megamoe" for bf16 and for fine-grained FP8 experts.

    The arguments, as in `prepare`, are those of the contexts that first calls make: one for all
    modules of one geometry and device. Registering again changes them for later conversions.

    Raises:
        MegaMoEError: transformers is missing or older than 5.17.
    """
    first_call = _FirstCall(_Options(max_tokens_per_rank, group, device, config_changes))

    def megamoe_experts_forward(
        experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        layer = experts._modules.get(CHILD)
        if layer is None:
            layer = first_call(experts, hidden_states, top_k_index, top_k_weights)
        return cast(Tensor, layer(hidden_states, top_k_index, top_k_weights))

    for registry in _registries():
        registry.register(NAME, megamoe_experts_forward)


def prepare(
    model: nn.Module,
    *,
    max_tokens_per_rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **config_changes: Any,
) -> AnyContext:
    """Convert every experts module of `model` now. Collective over `group`.

    Args:
        model: a model of transformers, or any module that contains its experts. In bf16, or with
            fine-grained FP8 experts.
        max_tokens_per_rank: capacity of one call, e.g. batch times sequence length of a prefill;
            with over_capacity="chunk" a longer eager call runs in several launches.
        group: the expert-parallel group. Every rank passes the whole model, keeps its share of the
            experts, and calls the model the same number of times. None means one rank; a model that
            transformers has sharded itself takes None too, and stays sharded.
        device: where the experts run; default: where their weights are.
        config_changes: other fields of MegaMoEConfig, e.g. backend="triton".

    Returns:
        The one context of all layers; MegaMoEContexts, with one per geometry, where the layers
        differ. Close it, use it as a `with` block, or call `release`.

    Raises:
        ValueError: no experts, or experts that the kernels don't compute: nothing has been
            converted then.
        MegaMoEError: converted already. BackendUnavailable: see MegaMoEContext.
    """
    options = _Options(max_tokens_per_rank, group, device, config_changes)
    return _prepare(model, options, empty=False)


def prepare_empty(
    model: nn.Module,
    *,
    max_tokens_per_rank: int,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    **config_changes: Any,
) -> AnyContext:
    """As `prepare`, for a model whose experts are on the meta device: the layers have no weights.

    Load them expert by expert, by `load_expert` of each experts module's child "megamoe"; see
    `load_checkpoint`.
    """
    options = _Options(max_tokens_per_rank, group, device, config_changes)
    return _prepare(model, options, empty=True)


def _prepare(model: nn.Module, options: _Options, *, empty: bool) -> AnyContext:
    if any(NAME not in registry for registry in _registries()):
        register(max_tokens_per_rank=options.max_tokens_per_rank)
    modules = find_experts(model)
    layouts = {
        name: layout_of(module, name, options.group, empty=empty)
        for name, module in modules.items()
    }
    devices = {options.device_of(module) for module in modules.values()}
    if len(devices) > 1:
        raise ValueError(
            mismatch(
                "device of the experts",
                "one",
                sorted(map(str, devices)),
                "A step runs on one: pass device=, or load the model without a device map.",
            )
        )
    (device,) = devices
    engine = options.contexts()
    made: dict[MegaMoEConfig, MegaMoEContext] = {}
    num_valid = None
    try:
        configs = {
            name: engine.config(**shape_of(layouts[name], moe_top_k(module.config)))
            for name, module in modules.items()
        }
        for config in configs.values():
            made[config] = engine.context_for(config, device, num_valid)
            num_valid = made[config].num_valid
        _switch(model, modules)
        for name, module in modules.items():
            context = made[configs[name]]
            if empty:
                attach(module, HFExperts(context, local_ids=layouts[name].local_ids))
            else:
                convert(module, layouts[name], context)
        contexts = tuple(made.values())
        return contexts[0] if len(contexts) == 1 else MegaMoEContexts(contexts)
    except BaseException:
        engine.close()
        raise


def release(model: nn.Module) -> None:
    """Drop the layers of `model`, and close each context that has no layer left elsewhere.

    The experts are gone with them: load the model again to use it.
    """
    contexts: dict[int, MegaMoEContext] = {}
    for module in list(model.modules()):
        layer = module._modules.get(CHILD)
        if isinstance(layer, HFExperts):
            contexts[layer.context.context_id] = layer.context
            layer.released = True
            del module._modules[CHILD]
    for context in contexts.values():
        if all(isinstance(layer, HFExperts) and layer.released for layer in context.layers):
            context.close()


def _switch(model: nn.Module, modules: dict[str, Any]) -> None:
    """Make the modules call us; first by the setter of transformers, which refuses some changes."""
    if hasattr(model, "set_experts_implementation"):
        cast(Any, model).set_experts_implementation(NAME)
    for module in modules.values():
        module.config._experts_implementation = NAME


class _FirstCall:
    """Converts an experts module at its first call; modules of one geometry share a context."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._engine = options.contexts()
        # Without fullgraph, Dynamo goes on in eager mode after the first error of __call__, and
        # would trace what that calls.
        self._convert = torch.compiler.disable(self._convert_eagerly)

    def __call__(
        self, experts: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor
    ) -> HFExperts:
        require_eager(
            "first call of unconverted experts",
            "Call megamoe_compile.engines.transformers.prepare(model, ...), or the "
            "model once eagerly, before the compiled or captured call.",
        )
        if torch.is_grad_enabled() and (hidden_states.requires_grad or weights.requires_grad):
            raise MegaMoEError(
                mismatch(
                    "gradient of hidden_states and top_k_weights",
                    "none: the kernels have no backward",
                    "requires_grad=True",
                    "Call under torch.no_grad() or torch.inference_mode().",
                )
            )
        return cast(HFExperts, self._convert(experts, ids.shape[-1]))

    def _convert_eagerly(self, experts: nn.Module, top_k: int) -> HFExperts:
        if "forward" in vars(experts) and not getattr(experts, "_is_expert_parallel", False):
            # Inside such a wrapper the parameters are not what they are outside of it.
            raise MegaMoEError(
                mismatch(
                    f"first call of {type(experts).__name__}",
                    "a module that nothing wraps",
                    "a forward that tensor parallelism or a device map has replaced",
                    "Convert the model with prepare(model, ...) before it is called.",
                )
            )
        layout = layout_of(experts, type(experts).__name__, self._options.group)
        config = self._engine.config(**shape_of(layout, top_k))
        context = self._engine.context_for(config, self._options.device_of(experts))
        return convert(experts, layout, context)


@dataclasses.dataclass(frozen=True)
class _Options:
    max_tokens_per_rank: int
    group: dist.ProcessGroup | None
    device: torch.device | str | None
    config_changes: dict[str, Any]

    def contexts(self) -> EngineContexts:
        return EngineContexts(
            max_tokens_per_rank=self.max_tokens_per_rank, group=self.group, **self.config_changes
        )

    def device_of(self, experts: nn.Module) -> torch.device:
        return torch.device(self.device or local_parameter(experts, "down_proj").device)


def _registries() -> tuple[Any, Any]:
    try:
        import transformers
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise MegaMoEError(_version_message(error)) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise MegaMoEError(_version_message(transformers.__version__))
    return ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS


def _version_message(got: object) -> str:
    oldest = ".".join(map(str, OLDEST))
    return mismatch("transformers", f">= {oldest}", got, f"pip install 'transformers>={oldest}'.")
