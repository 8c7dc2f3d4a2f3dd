"""Small models of transformers with random weights, for the tests of the integration."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megamoe_compile.custom_ops.reference.recipe import dequantize_blocks, quantize_blocks

CAPACITY = 64
COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    pad_token_id=0,
)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(head_dim=64, num_experts=4, norm_topk_prob=True),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=32,
            routed_scaling_factor=2.5,
        ),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        dict(
            head_dim=64,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
        ),
    ),
}
PROMPT = torch.arange(1, 19).reshape(2, 9)


def make_model(family: str = "qwen3_moe", **changes: Any) -> Any:
    config_name, model_name, fields = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**COMMON, **fields, **changes})
    torch.manual_seed(0)
    # Not .to(torch.bfloat16): that would round the rotary frequencies too.
    return getattr(transformers, model_name)._from_config(config, dtype=torch.bfloat16).eval()


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def dequantized(model: Any) -> Any:
    """The same model with the weights that 128x128 FP8 leaves of its experts."""
    model = copy.deepcopy(model)
    for experts in experts_of(model):
        for parameter in (experts.gate_up_proj, experts.down_proj):
            for expert in parameter.data:
                expert.copy_(dequantize_blocks(*quantize_blocks(expert)))
    return model


def logits_of(model: Any, ids: Tensor = PROMPT) -> Tensor:
    with torch.no_grad():
        return model(ids).logits
