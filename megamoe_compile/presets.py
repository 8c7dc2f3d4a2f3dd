"""Shapes of known models, for `MegaMoEConfig.preset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Shapes of public checkpoints, from the models' own configuration classes in transformers, and
# where there is none, from the published config.json.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v4-flash": dict(
        hidden_size=4096,
        intermediate_size=2048,
        num_experts=256,
        top_k=6,
        swiglu_limit=10.0,
        routed_scaling_factor=1.5,
    ),
}
