"""A small checkpoint as DeepSeek-V3 is shipped: FP8 with block scales, in shards with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from megamoe_compile.custom_ops.reference.recipe import BLOCK, quantize_blocks


def small_config(**changes: Any) -> Qwen3MoeConfig:
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**{**fields, **changes})  # type: ignore[arg-type]


def write_checkpoint(
    directory: Path, config: Qwen3MoeConfig, *, fp8: bool = True, shards: int = 3
) -> dict[str, Tensor]:
    """Write it with random weights; returns every weight as bf16, dequantized where it is FP8."""
    generator = torch.Generator().manual_seed(0)
    c: Any = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    h, i = c.hidden_size, c.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (c.vocab_size, h),
    }
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
        for name, size in (
            ("self_attn.q_norm", c.head_dim),
            ("self_attn.k_norm", c.head_dim),
            ("input_layernorm", h),
            ("post_attention_layernorm", h),
        ):
            shapes[f"{at}{name}.weight"] = (size,)
        shapes[f"{at}mlp.gate.weight"] = (c.num_experts, h)
        for expert in range(c.num_experts):
            for name, rows, columns in (("gate", i, h), ("up", i, h), ("down", h, i)):
                shapes[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = (rows, columns)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator)
        value = value if "norm" in name else value * shape[-1] ** -0.5
        if fp8 and ("_proj." in name):
            weight, scale = quantize_blocks(value)
            stored[name], stored[f"{name}_scale_inv"] = weight, scale
            full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            plain[name] = (weight.float() * full).bfloat16()
        else:
            plain[name] = stored[name] = value.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(stored), {}
    for shard in range(shards):
        mine = names[shard::shards]  # an expert's projections and scales stand in different files
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: stored[name].contiguous() for name in mine}, str(directory / file))
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)
    if fp8:
        written = json.loads((directory / "config.json").read_text())
        written["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
        (directory / "config.json").write_text(json.dumps(written))
    return plain
