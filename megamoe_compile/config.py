"""MegaMoEConfig: what a MoE layer is, every rule about its shape, and presets of known models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from .errors import is_int, mismatch
from .models.presets import PRESETS

Backend = Literal["auto", "deep_gemm", "triton", "reference"]
OverCapacity = Literal["error", "chunk"]

BLOCK = 128  # weight scales are 128x128, activation scales 1x128
MAX_TOP_K = 32


@dataclasses.dataclass(frozen=True)
class MegaMoEConfig:
    """Geometry and policy of a MoE layer; all layers of one geometry share one context.

    Args:
        hidden_size: H, columns of hidden_states; a multiple of 128.
        intermediate_size: I of one expert. A backend that needs an alignment gets zero padding.
        num_experts: routed experts over all ranks; divisible by the number of ranks.
        top_k: K, routed experts of a token; at most 32.
        max_tokens_per_rank: capacity of the buffer in tokens of ONE rank, not of all ranks.
        swiglu_limit: clamp of SwiGLU (gate to at most it, up to +- it); None for no clamp.
        swiglu_alpha, swiglu_beta: SwiGLU is g * sigmoid(swiglu_alpha * g) * (u + swiglu_beta) of
            the clamped gate g and up u. gpt-oss and MiniMax-M3 have 1.702, 1.0 and a limit of 7.
        routed_scaling_factor: factor on topk_weights. 1.0 where the router has applied it already.
        num_shared_experts: experts of the same shape that take every token with weight 1.
        expert_bias: whether each expert adds a bias to the result of both its projections.
        backend: "auto", "deep_gemm", "triton" or "reference".
        over_capacity: "error", or "chunk" to run a longer eager batch in several launches.

    Raises:
        ValueError: a value that breaks a rule; the message has expected, got and the cure.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    swiglu_limit: float | None = None
    routed_scaling_factor: float = 1.0
    num_shared_experts: int = 0
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    expert_bias: bool = False
    backend: Backend = "auto"
    over_capacity: OverCapacity = "error"

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_experts",
            "top_k",
            "max_tokens_per_rank",
        ):
            self._make_int(name, "a positive int", 1)
        self._make_int("num_shared_experts", "an int >= 0", 0)
        self._require(
            "hidden_size",
            f"a multiple of {BLOCK}",
            self.hidden_size % BLOCK == 0,
            "Activations and weights carry one scale per 128 columns.",
        )
        slots = self.top_k + self.num_shared_experts
        self._require(
            "top_k",
            f"at most num_experts ({self.num_experts}), and with the shared experts at most "
            f"{MAX_TOP_K}",
            self.top_k <= self.num_experts and slots <= MAX_TOP_K,
            "A token cannot choose more experts than there are.",
        )
        self._require(
            "swiglu_limit",
            "None or a finite number > 0",
            self.swiglu_limit is None or _is_positive(self.swiglu_limit),
            "Pass None where the model does not clamp.",
        )
        self._require(
            "swiglu_alpha",
            "a finite number > 0",
            _is_positive(self.swiglu_alpha),
            "Pass 1.0 for the SwiGLU of Llama and most other models.",
        )
        self._require(
            "swiglu_beta",
            "a finite number",
            _is_finite(self.swiglu_beta),
            "Pass 0.0 for the SwiGLU of Llama and most other models.",
        )
        self._require("expert_bias", "a bool", isinstance(self.expert_bias, bool))
        self._require(
            "routed_scaling_factor",
            "a finite number > 0",
            _is_positive(self.routed_scaling_factor),
            "Pass 1.0 where the router has scaled the weights already.",
        )
        self._require("backend", get_args(Backend), self.backend in get_args(Backend))
        self._require(
            "over_capacity", get_args(OverCapacity), self.over_capacity in get_args(OverCapacity)
        )

    def _make_int(self, name: str, expected: str, least: int) -> None:
        value = getattr(self, name)
        self._require(name, expected, is_int(value) and value >= least)
        object.__setattr__(self, name, int(value))  # a numpy integer is none for a kernel

    def _require(
        self, name: str, expected: object, holds: bool, cure: str = "Change the argument."
    ) -> None:
        if not holds:
            raise ValueError(mismatch(name, expected, repr(getattr(self, name)), cure))

    @property
    def num_slots(self) -> int:
        """Slots of one token: routed and shared experts."""
        return self.top_k + self.num_shared_experts

    def num_local_experts(self, ep_size: int) -> int:
        """Routed experts of one of `ep_size` ranks. ValueError where they don't divide evenly."""
        if ep_size < 1 or self.num_experts % ep_size:
            raise ValueError(
                mismatch(
                    "ep_size",
                    f"a divisor of num_experts ({self.num_experts})",
                    ep_size,
                    "Every rank must hold the same number of experts.",
                )
            )
        return self.num_experts // ep_size

    def padded_intermediate_size(self, alignment: int = BLOCK) -> int:
        """intermediate_size rounded up to what a backend needs; the padding holds zeros."""
        return math.ceil(self.intermediate_size / alignment) * alignment

    @classmethod
    def preset(cls, name: str, *, max_tokens_per_rank: int, **changes: Any) -> MegaMoEConfig:
        """The shape of a known model. ValueError with the list of names for an unknown one."""
        if name not in PRESETS:
            raise ValueError(
                mismatch("preset", sorted(PRESETS), repr(name), "Pick one of the list.")
            )
        return cls(**{**PRESETS[name], "max_tokens_per_rank": max_tokens_per_rank, **changes})

    @classmethod
    def from_pretrained(
        cls, source: Any, *, max_tokens_per_rank: int, **changes: Any
    ) -> MegaMoEConfig:
        """The shape of a Hugging Face model.

        Args:
            source: a transformers configuration, a dict of one, or a directory with config.json.
            max_tokens_per_rank: see the class.
            changes: fields to override.
        """
        from .models.hf_config import moe_shape  # the names of Hugging Face fields live there

        shape = moe_shape(source if not isinstance(source, str | Path) else Path(source))
        return cls(**{**shape, "max_tokens_per_rank": max_tokens_per_rank, **changes})


def _is_finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: object) -> bool:
    return _is_finite(value) and value > 0
