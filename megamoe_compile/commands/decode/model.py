"""The models that `megamoe decode` decodes: a small random one, or a local checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ...errors import mismatch
from ...models.hf_config import moe_shape


def random_model(seed: int = 0) -> nn.Module:
    """A small Qwen3-MoE in bf16 with random weights: 2 layers, hidden 512, 16 experts, top-4.

    Its experts have the least shape that the mega kernel takes: 512 x 256.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = cast(Any, Qwen3MoeConfig)(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(Any, Qwen3MoeForCausalLM)._from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                # Logits of standard deviation 4. A trained router is peaked too; the default, 0.3,
                # weighs all experts alike, so that a tie turned by one rounding changes a lot.
                nn.init.normal_(weight, std=4 * config.hidden_size**-0.5)
    return cast(nn.Module, model.eval())


def load_model(directory: Path) -> nn.Module:
    """A local checkpoint, on the CPU, in bf16 or with its fine-grained FP8 experts.

    Raises:
        ValueError: not the directory of a MoE model that the kernels compute.
    """
    moe_shape(directory)  # the better message
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("cpu"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.bfloat16, local_files_only=True
            )
    except OSError as error:
        raise ValueError(
            mismatch("model", f"a checkpoint in {directory}", error, "Download it first.")
        ) from error
    return cast(nn.Module, model.eval())
