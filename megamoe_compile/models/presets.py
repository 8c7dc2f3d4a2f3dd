"""Shapes of known models, for `MegaMoEConfig.preset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The routed experts of public checkpoints; as in `hf_config.moe_shape`, the scaling factor is the
# model's own. "Defaults of X" are the defaults of that configuration class of transformers.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v4-flash": {  # defaults of DeepseekV4Config
        "hidden_size": 4096,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 6,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
    },
    "deepseek-v4-pro": {  # config.json of deepseek-ai/DeepSeek-V4-Pro
        "hidden_size": 7168,
        "intermediate_size": 3072,
        "num_experts": 384,
        "top_k": 6,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 2.5,
    },
    "deepseek-v3": {  # defaults of DeepseekV3Config
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 8,
        "routed_scaling_factor": 2.5,
    },
    "kimi-k2": {  # config.json of moonshotai/Kimi-K2-Instruct
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 384,
        "top_k": 8,
        "routed_scaling_factor": 2.827,
    },
    "glm-5": {  # defaults of GlmMoeDsaConfig
        "hidden_size": 6144,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 8,
        "routed_scaling_factor": 2.5,
    },
    "minimax-m2": {  # defaults of MiniMaxM2Config
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_experts": 256,
        "top_k": 8,
    },
    "qwen3-30b-a3b": {  # defaults of Qwen3MoeConfig
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_experts": 128,
        "top_k": 8,
    },
    "qwen3-235b-a22b": {  # config.json of Qwen/Qwen3-235B-A22B
        "hidden_size": 4096,
        "intermediate_size": 1536,
        "num_experts": 128,
        "top_k": 8,
    },
}
