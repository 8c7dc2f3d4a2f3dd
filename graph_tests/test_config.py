"""Every rule of MegaMoEConfig, each with a message that says expected, got and the cure."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
from helpers import SMALL, make_config, refuses
from hypothesis import given
from hypothesis import strategies as st

import megamoe_compile as mm
from megamoe_compile.config import MAX_TOP_K

BAD: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in SMALL
        for value in (0, -1, 1.5, 128.0, "128", None, True, math.nan)
    ],
    ("num_shared_experts", -1),
    ("num_shared_experts", 0.5),
    ("num_shared_experts", None),
    ("num_shared_experts", True),
    ("hidden_size", 64),
    ("hidden_size", 129),
    ("hidden_size", 128 + 64),
    ("top_k", 5),  # of 4 experts
    *[("swiglu_limit", v) for v in (0, 0.0, -1.0, math.inf, -math.inf, math.nan, "10", True)],
    *[("swiglu_alpha", v) for v in (0, 0.0, -1.702, math.inf, math.nan, None, "1", True)],
    *[("swiglu_beta", v) for v in (math.inf, -math.inf, math.nan, None, "1", True)],
    *[("expert_bias", v) for v in (0, 1, None, "False")],
    *[("routed_scaling_factor", v) for v in (0, -1.5, math.inf, math.nan, None, "1", False)],
    *[("backend", v) for v in ("cuda", "", None, "Triton", 1)],
    *[("over_capacity", v) for v in ("drop", "", None)],
]


@pytest.mark.parametrize("name,value", BAD, ids=lambda v: repr(v) if v is not None else "None")
def test_a_bad_value_is_refused(name: str, value: Any) -> None:
    with refuses(ValueError, name, repr(value)):
        make_config(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": MAX_TOP_K + 1, "num_experts": 64},
        {"top_k": MAX_TOP_K, "num_experts": 64, "num_shared_experts": 1},
        {"top_k": 1, "num_shared_experts": MAX_TOP_K},
    ],
)
def test_at_most_32_slots_shared_experts_included(changes: dict[str, Any]) -> None:
    with refuses(ValueError, "top_k", str(MAX_TOP_K)):
        make_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 384},
        {"hidden_size": 7168, "intermediate_size": 1408},
        {"intermediate_size": 96},
        {"intermediate_size": 1},
        {"top_k": 4},
        {"top_k": MAX_TOP_K, "num_experts": 32},
        {"top_k": MAX_TOP_K - 1, "num_experts": 64, "num_shared_experts": 1},
        {"num_experts": 1, "top_k": 1},
        {"max_tokens_per_rank": 1},
        {"swiglu_limit": 0.5},
        {"swiglu_limit": 10},
        {"swiglu_alpha": 1.702, "swiglu_beta": 1},
        {"swiglu_beta": -0.5},
        {"expert_bias": True},
        {"routed_scaling_factor": 2},
        {"backend": "deep_gemm"},
        {"over_capacity": "chunk"},
    ],
    ids=str,
)
def test_what_is_allowed(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert all(getattr(config, name) == value for name, value in changes.items())


def test_frozen_hashable_and_comparable() -> None:
    config = make_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]
    assert config == make_config()
    assert hash(config) == hash(make_config())
    assert config != make_config(top_k=1)
    with pytest.raises(ValueError, match="hidden_size"):
        dataclasses.replace(config, hidden_size=100)


def test_defaults() -> None:
    config = make_config()
    assert config.swiglu_limit is None
    assert (config.swiglu_alpha, config.swiglu_beta, config.expert_bias) == (1.0, 0.0, False)
    assert config.routed_scaling_factor == 1.0
    assert config.num_shared_experts == 0
    assert config.backend == "auto"
    assert config.over_capacity == "error"
    assert config.num_slots == config.top_k
    assert make_config(num_shared_experts=2).num_slots == config.top_k + 2


@pytest.mark.parametrize("ep_size,local", [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_num_local_experts(ep_size: int, local: int) -> None:
    assert make_config(num_experts=12).num_local_experts(ep_size) == local


@pytest.mark.parametrize("ep_size", [0, -1, 5, 7, 8, 24])
def test_ep_size_must_divide_the_experts(ep_size: int) -> None:
    with refuses(ValueError, "ep_size", "12", str(ep_size)):
        make_config(num_experts=12).num_local_experts(ep_size)


@given(size=st.integers(1, 5000), alignment=st.sampled_from([128, 256, 512]))
def test_padded_intermediate_size(size: int, alignment: int) -> None:
    padded = make_config(intermediate_size=size).padded_intermediate_size(alignment)
    assert padded % alignment == 0
    assert 0 <= padded - size < alignment


def test_s15_padding_is_what_the_alignment_needs_and_no_more() -> None:
    assert make_config(intermediate_size=2304).padded_intermediate_size(256) == 2304
    assert make_config(intermediate_size=2304).padded_intermediate_size(512) == 2560
    assert make_config(intermediate_size=1408).padded_intermediate_size() == 1408
    assert make_config(intermediate_size=1408).padded_intermediate_size(256) == 1536


def test_s09_the_capacity_is_named_and_documented_per_rank() -> None:
    assert "max_tokens_per_rank" in {f.name for f in dataclasses.fields(mm.MegaMoEConfig)}
    documentation = inspect.getdoc(mm.MegaMoEConfig) or ""
    assert "ONE rank" in documentation


@pytest.mark.parametrize("hidden", [4096, 7168, 8192, 128 * 33])
def test_s14_every_multiple_of_128_is_a_hidden_size(hidden: int) -> None:
    """Whether a kernel takes it is the probe's verdict, made before any launch."""
    config = make_config(hidden_size=hidden)
    assert mm.probe(config, "cpu").backend == "reference"
    with refuses(ValueError, "hidden_size", "a multiple of 128"):
        make_config(hidden_size=hidden + 64)


def test_preset_takes_a_capacity_and_changes() -> None:
    config = mm.MegaMoEConfig.preset("deepseek-v4-flash", max_tokens_per_rank=128, top_k=4)
    assert (config.hidden_size, config.intermediate_size, config.num_experts) == (4096, 2048, 256)
    assert (config.max_tokens_per_rank, config.top_k) == (128, 4)
    with refuses(ValueError, "preset", "deepseek-v4-flash", "'gpt-2'"):
        mm.MegaMoEConfig.preset("gpt-2", max_tokens_per_rank=128)
    with pytest.raises(TypeError, match="max_tokens_per_rank"):
        mm.MegaMoEConfig.preset("deepseek-v4-flash")  # type: ignore[call-arg]
