"""The shape of the routed experts, read from a Hugging Face model configuration.

transformers is not imported: a configuration object, the dict of a config.json and the file itself
are read the same way, by the names that the model families use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import mismatch

HIDDEN_SIZE = ("hidden_size",)
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
# Families whose every layer is a MoE (Mixtral, MiniMax-M2, OLMoE) name the expert's width
# intermediate_size; where moe_intermediate_size exists, that one belongs to dense layers.
INTERMEDIATE_SIZE = ("moe_intermediate_size", "intermediate_size")

NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
SILU = ("silu", "swish")

# What these families compute, where config.json alone doesn't tell. Source: `_apply_gate` of
# GptOssExperts and of MiniMaxM3VLExperts of transformers.
_M3 = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "expert_bias": False}
PARAMETERIZED: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_M3, "expert_bias": True},
    "minimax_m3": _M3,
    "minimax_m3_vl": _M3,
    "minimax_m3_vl_text": _M3,
}
PLAIN = {"swiglu_limit": None, "swiglu_alpha": 1.0, "swiglu_beta": 0.0, "expert_bias": False}
# Their shape fits, their arithmetic doesn't.
UNSUPPORTED = {
    "llama4": "routing weights that scale the input of an expert",
    "llama4_text": "routing weights that scale the input of an expert",
}


def moe_shape(source: Any) -> dict[str, Any]:
    """Fields of MegaMoEConfig, all but the capacity, that `source` determines.

    It describes the routed experts as an engine calls them: `routed_scaling_factor` is the model's
    own, applied by us to the router's unscaled weights, and `num_shared_experts` is 0, since shared
    experts stay with the model. Override either where that is not so: the routers of transformers
    scale the weights themselves (its integration passes 1.0), and `num_shared_experts=n` takes the
    model's shared expert, of n times the routed width, as n experts of ours.

    Args:
        source: a configuration object of transformers, the dict of one, or the Path of a
            config.json or its directory. Multimodal ones are read at their text part.

    Raises:
        ValueError: no such file, not a MoE model, or experts that the kernels don't compute.
    """
    config = _text_part(_read(source) if isinstance(source, Path) else source)
    name = str(_get(config, "model_type") or type(source).__name__)
    shape = {
        "hidden_size": _first(config, HIDDEN_SIZE),
        "intermediate_size": _first(config, INTERMEDIATE_SIZE),
        "num_experts": _first(config, NUM_EXPERTS),
        "top_k": _first(config, TOP_K),
    }
    _check_complete(name, shape)
    _check_arithmetic(name, config)
    swiglu = PARAMETERIZED.get(name, PLAIN)
    limit, alpha = _get(config, "swiglu_limit"), _get(config, "swiglu_alpha")
    factor = _get(config, "routed_scaling_factor")
    return {
        **shape,
        **swiglu,
        "swiglu_limit": float(limit) if limit else swiglu["swiglu_limit"],
        "swiglu_alpha": float(alpha) if alpha else swiglu["swiglu_alpha"],
        "routed_scaling_factor": 1.0 if factor is None else float(factor),
        "num_shared_experts": 0,
    }


def moe_top_k(source: Any) -> int:
    """Routed experts of a token, of a `source` as in `moe_shape`.

    For a model whose layers differ in shape, where `moe_shape` has no answer.

    Raises:
        ValueError: no such file, or not a MoE model.
    """
    config = _text_part(_read(source) if isinstance(source, Path) else source)
    name = str(_get(config, "model_type") or type(source).__name__)
    shape = {"top_k": _first(config, TOP_K)}
    _check_complete(name, shape)
    return int(shape["top_k"])


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    cure = "Pass the directory of a local checkpoint, or a configuration object."
    if not file.is_file():
        raise ValueError(mismatch("config of the model", f"a file {file}", "none", cure))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(mismatch(str(file), "a JSON object", error, cure)) from error
    if not isinstance(config, dict):
        raise ValueError(mismatch(str(file), "a JSON object", type(config).__name__, cure))
    return config


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := _get(config, name)) is not None), None)


def _text_part(config: Any) -> Any:
    """The configuration that has the experts: `config`, or one that it nests."""
    if _first(config, NUM_EXPERTS) is not None:
        return config
    for name in NESTED:
        nested = _get(config, name)
        if nested is not None and _first(found := _text_part(nested), NUM_EXPERTS) is not None:
            return found
    return config


def _check_complete(name: str, shape: Mapping[str, Any]) -> None:
    known = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
    }
    missing = [field for field, value in shape.items() if value is None]
    if missing:
        raise ValueError(
            mismatch(
                f"config of a MoE model ({name})",
                "; ".join(f"{field} as one of {', '.join(known[field])}" for field in missing),
                f"none of them: {', '.join(missing)} missing",
                "Is it a MoE model? Build MegaMoEConfig(...) from the numbers themselves.",
            )
        )
    for field, value in shape.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                mismatch(
                    f"{field} of {name}",
                    "one int for all layers",
                    repr(value),
                    "Layers of several shapes need one MegaMoEConfig(...) and context per shape.",
                )
            )


def _check_arithmetic(name: str, config: Any) -> None:
    if name in PARAMETERIZED:  # the gate is not their hidden_act
        return
    cure = "Keep the model's own experts, or build MegaMoEConfig(...) from the numbers themselves."
    activation = _first(config, ("hidden_act", "hidden_activation"))
    if activation is not None and activation not in SILU:
        raise ValueError(
            mismatch(
                f"unsupported activation of the experts of {name}",
                " or ".join(SILU),
                repr(activation),
                cure,
            )
        )
    oddity = UNSUPPORTED.get(name)
    if oddity is None and _get(config, "swiglu_alpha") is not None:
        oddity = f"a SwiGLU with an alpha of {_get(config, 'swiglu_alpha')}, of a family not known"
    if oddity is not None:
        raise ValueError(
            mismatch(
                f"unsupported activation of the experts of {name}",
                f"SwiGLU, or one of {', '.join(PARAMETERIZED)}",
                oddity,
                cure,
            )
        )
