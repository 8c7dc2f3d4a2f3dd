"""The models that `megamoe bench` decodes: random weights of a preset's shape, or a checkpoint.

Every column gets the same numbers. The experts exist as FP8 with one scale per 128x128 block; the
columns in bf16 get them dequantized. Random weights are made on the device, expert by expert, from
a seed per layer. Everything outside of the experts is bf16 in all columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ...custom_ops.reference.recipe import BLOCK, FP8, FP8_MAX, dequantize_blocks, quantize_blocks
from ...engines.transformers.checkpoint import Checkpoint, empty_model, fill
from ...engines.transformers.experts import find_experts, is_experts
from ...errors import mismatch
from ...models.hf_config import moe_shape

# Class of transformers, and what differs from its defaults.
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", {}),
    "glm-4-moe": ("Glm4MoeConfig", {}),  # the defaults are GLM-4.5-Air
    "tiny": (  # the least shape that the kernels take, to try the command
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
        },
    ),
}
MEMORY_PART = 0.75
Q_STD = 64.0  # of random e4m3 values: outliers of 7 standard deviations saturate


class LayerExperts(NamedTuple):
    """Experts of one layer: e4m3 [E, 2I, H] (gate rows first) and [E, H, I], fp32 block scales."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


class Source(Protocol):
    """Where a model's configuration and weights come from."""

    name: str
    config: Any

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Materialize all weights but the experts'."""

    def experts(self, prefix: str, index: int, device: torch.device) -> LayerExperts:
        """The experts of module `prefix`, the index-th one of the model."""


class RandomSource:
    """Random weights of a preset's shape, equal for equal seeds."""

    def __init__(self, preset: str, layers: int | None, seed: int = 0) -> None:
        import transformers

        kind, fields = PRESETS[preset]
        self.config = getattr(transformers, kind)(**fields)
        _set_layers(self.config, layers)
        self.name = f"random {preset}, {self.config.num_hidden_layers} layers"
        self.seed = seed

    def fill(self, model: nn.Module, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(self.seed)
        shapes = {name: t.shape for name, t in model.named_parameters()}
        shapes |= {name: t.shape for name, t in model.named_buffers()}

        def value(name: str) -> Tensor:
            shape = shapes[name]
            if len(shape) == 1:
                fill_value = 1.0 if "norm" in name else 0.0  # biases
                dtype = torch.float32 if "bias" in name else torch.bfloat16
                return torch.full(shape, fill_value, device=device, dtype=dtype)
            weight = torch.empty(shape, device=device, dtype=torch.bfloat16)
            # Outputs of unit variance; a router's of 16, peaked as if it were trained.
            gain = 4.0 if name.endswith("mlp.gate.weight") else 1.0
            std = 1.0 if "embed_tokens" in name else gain * shape[1] ** -0.5
            return weight.normal_(std=std, generator=generator)

        fill(model, device, value)

    def experts(self, prefix: str, index: int, device: torch.device) -> LayerExperts:
        generator = torch.Generator(device).manual_seed(self.seed + 1 + index)
        count, hidden, intermediate = experts_shape(self.config)
        w13, w13_scale = _random_fp8(count, 2 * intermediate, hidden, device, generator)
        w2, w2_scale = _random_fp8(count, hidden, intermediate, device, generator)
        return LayerExperts(w13, w13_scale, w2, w2_scale)


class CheckpointSource:
    """The weights of a local checkpoint, with one tensor per expert and projection."""

    def __init__(self, directory: Path, layers: int | None) -> None:
        moe_shape(directory)  # the better message
        from transformers import AutoConfig

        self.config = cast(Any, AutoConfig).from_pretrained(directory, local_files_only=True)
        _set_layers(self.config, layers)
        self.directory = directory
        self.name = f"{directory}, {self.config.num_hidden_layers} layers"

    def fill(self, model: nn.Module, device: torch.device) -> None:
        with Checkpoint(self.directory, device) as checkpoint:
            fill(model, device, checkpoint.read_dense)

    def experts(self, prefix: str, index: int, device: torch.device) -> LayerExperts:
        count, hidden, intermediate = experts_shape(self.config)
        layer = _empty_experts(count, hidden, intermediate, device)
        with Checkpoint(self.directory, device) as checkpoint:
            for expert in range(count):
                w13, w13_scale, w2, w2_scale = checkpoint.expert(prefix, expert)
                if w13_scale is None or w2_scale is None:
                    w13, w13_scale = quantize_blocks(w13)
                    w2, w2_scale = quantize_blocks(w2)
                for target, value in zip(layer, (w13, w13_scale, w2, w2_scale), strict=True):
                    if target.shape[1:] != value.shape:
                        raise ValueError(
                            mismatch(
                                f"{prefix}.{expert}",
                                f"a tensor {list(target.shape[1:])}, of gate and up or of down",
                                list(value.shape),
                                "Pass a checkpoint with weights of its config.json's shape.",
                            )
                        )
                    target[expert].copy_(value)
        return layer


def make_source(model: str, layers: int | None, seed: int = 0) -> Source:
    """The source of a preset's name or a directory.

    Raises:
        ValueError: neither, not a MoE model, or none of the layers taken has experts.
    """
    source: Source
    if model in PRESETS:
        source = RandomSource(model, layers, seed)
    elif Path(model).is_dir():
        source = CheckpointSource(Path(model), layers)
    else:
        raise ValueError(
            mismatch("--model", f"{', '.join(PRESETS)} or a directory", repr(model), "Pass one.")
        )
    if not any(map(is_experts, empty_model(source.config).modules())):
        raise ValueError(
            mismatch(
                "--layers",
                "enough for a layer with experts: the first ones of some models have none",
                source.name,
                "Pass more.",
            )
        )
    return source


def experts_shape(config: Any) -> tuple[int, int, int]:
    """(experts, hidden size, intermediate size) of the routed experts of a configuration."""
    shape = moe_shape(config)
    return shape["num_experts"], shape["hidden_size"], shape["intermediate_size"]


def fitting_layers(preset: str, free_bytes: int) -> int:
    """As many layers of a preset as fit into a part of the free memory in bf16, at least one.

    The rest is for caches, graphs and what a kernel of a column needs.
    """
    config = RandomSource(preset, None).config
    model: Any = empty_model(config)
    layers = [sum(p.numel() for p in layer.parameters()) * 2 for layer in model.model.layers]
    left = MEMORY_PART * free_bytes - 2 * sum(p.numel() for p in model.parameters()) + sum(layers)
    fit = 0
    for layer in layers:
        left -= layer
        if left < 0:
            break
        fit += 1
    return max(fit, 1)


def model_without_experts(source: Source, device: torch.device, attention: str) -> nn.Module:
    """The model with all weights but the experts', which are still on the meta device."""
    model = empty_model(source.config, attention)
    source.fill(model, device)
    return model


@torch.no_grad()
def set_fp8_experts(model: nn.Module, source: Source, device: torch.device) -> None:
    """Give the experts modules FP8 parameters, as fine-grained FP8 models of transformers have."""
    for index, (prefix, module) in enumerate(find_experts(model).items()):
        layer = source.experts(prefix, index, device)
        for name, tensor in zip(
            ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"),
            layer,
            strict=True,
        ):
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


@torch.no_grad()
def set_bf16_experts(model: nn.Module, source: Source, device: torch.device) -> None:
    """Give the experts modules the dequantized weights, in bf16."""
    for index, (prefix, module) in enumerate(find_experts(model).items()):
        layer = source.experts(prefix, index, device)
        for name, weights, scales in (
            ("gate_up_proj", layer.w13, layer.w13_scale),
            ("down_proj", layer.w2, layer.w2_scale),
        ):
            values = torch.empty(weights.shape, device=device, dtype=torch.bfloat16)
            for expert in range(weights.shape[0]):
                values[expert] = dequantize_blocks(weights[expert], scales[expert])
            module.register_parameter(name, nn.Parameter(values, requires_grad=False))


@contextlib.contextmanager
def noting_ids(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, each call of an experts module appends the ids [T, K] that it gets."""
    taken: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        taken.append(args[1])

    with contextlib.ExitStack() as hooks:
        for module in filter(is_experts, model.modules()):
            hooks.enter_context(module.register_forward_pre_hook(note))
        yield taken


def _set_layers(config: Any, layers: int | None) -> None:
    if layers is None:
        return
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(
            mismatch("--layers", f"1 to {config.num_hidden_layers}", layers, "Pass fewer or more.")
        )
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = list(kinds)[:layers]


def _empty_experts(
    count: int, hidden: int, intermediate: int, device: torch.device
) -> LayerExperts:
    def weights(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(count, rows, columns, dtype=FP8, device=device),
            _empty_scales(count, rows, columns, device),
        )

    return LayerExperts(*weights(2 * intermediate, hidden), *weights(hidden, intermediate))


def _empty_scales(count: int, rows: int, columns: int, device: torch.device) -> Tensor:
    shape = (count, rows // BLOCK, columns // BLOCK)
    return torch.empty(shape, dtype=torch.float32, device=device)


def _random_fp8(
    count: int, rows: int, columns: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """e4m3 [E, N, C] and scales [E, N/128, C/128] of weights with standard deviation C**-0.5."""
    values = torch.empty(count, rows, columns, dtype=FP8, device=device)
    draw = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    for expert in range(count):
        draw.normal_(std=Q_STD, generator=generator)
        values[expert] = draw.clamp_(-FP8_MAX, FP8_MAX)
    scales = _empty_scales(count, rows, columns, device)
    scales.uniform_(0.75, 1.25, generator=generator).mul_(columns**-0.5 / Q_STD)
    return values, scales
