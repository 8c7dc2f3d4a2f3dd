"""The shape of the experts from Hugging Face configurations, and the presets."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megamoe_compile as mm
from megamoe_compile.models.hf_config import moe_shape, moe_top_k
from megamoe_compile.models.presets import PRESETS

# Names as the config.json of each family has them, numbers of our own.
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
}
MINIMAX = {
    "model_type": "minimax_m2",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
}
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 16,
    "top_k": 4,
    "swiglu_limit": None,
    "swiglu_alpha": 1.0,
    "swiglu_beta": 0.0,
    "expert_bias": False,
    "routed_scaling_factor": 1.0,
    "num_shared_experts": 0,
}
OSS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "expert_bias": True}
M3 = {**OSS, "expert_bias": False}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (DEEPSEEK, {"routed_scaling_factor": 2.5}),
        (
            {**DEEPSEEK, "model_type": "deepseek_v4", "swiglu_limit": 10.0},
            {"routed_scaling_factor": 2.5, "swiglu_limit": 10.0},
        ),
        ({**DEEPSEEK, "routed_scaling_factor": None, "swiglu_limit": 0.0}, {}),
        (QWEN, {}),
        ({**QWEN, "hidden_act": "swish"}, {}),
        (MINIMAX, {}),
        ({**MINIMAX, "model_type": "mixtral"}, {}),
        ({"model_type": "kimi_k25", "hidden_size": 1, "text_config": QWEN}, {}),
        ({"thinker_config": {"text_config": QWEN}}, {}),
        ({**MINIMAX, "model_type": "gpt_oss"}, OSS),
        (
            {**MINIMAX, "model_type": "gpt_oss", "swiglu_limit": 5.0, "swiglu_alpha": 1.5},
            {**OSS, "swiglu_limit": 5.0, "swiglu_alpha": 1.5},
        ),
        ({**MINIMAX, "model_type": "minimax_m3", "hidden_act": "swigluoai"}, M3),
        ({"text_config": {**MINIMAX, "model_type": "minimax_m3_vl_text"}}, M3),
    ],
)
def test_shape_of_each_family(
    config: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    expected = {**SHAPE, **changes}
    assert moe_shape(config) == expected
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert moe_shape(tmp_path) == moe_shape(tmp_path / "config.json") == expected
    attributes = json.loads(json.dumps(config), object_hook=lambda d: SimpleNamespace(**d))
    assert moe_shape(attributes) == expected


def test_from_pretrained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    from_dir = mm.MegaMoEConfig.from_pretrained(str(tmp_path), max_tokens_per_rank=8)
    assert from_dir == mm.MegaMoEConfig.from_pretrained(DEEPSEEK, max_tokens_per_rank=8)
    assert from_dir.routed_scaling_factor == 2.5
    assert from_dir.num_shared_experts == 0
    engine = mm.MegaMoEConfig.from_pretrained(
        DEEPSEEK, max_tokens_per_rank=8, routed_scaling_factor=1.0, num_shared_experts=1
    )
    assert (engine.routed_scaling_factor, engine.num_shared_experts) == (1.0, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "llama", "hidden_size": 256, "intermediate_size": 128},
            ["llama", "num_experts", "top_k missing", "n_routed_experts", "num_experts_per_tok"],
        ),
        ({}, ["dict", "hidden_size, intermediate_size, num_experts, top_k missing"]),
        ({**QWEN, "num_experts_per_tok": None}, ["qwen3_moe", "none of them: top_k missing"]),
        ({**QWEN, "moe_intermediate_size": [128, 256]}, ["intermediate_size", "[128, 256]"]),
        ({**QWEN, "hidden_act": "gelu"}, ["unsupported activation", "silu", "'gelu'"]),
        ({**MINIMAX, "swiglu_alpha": 1.702}, ["unsupported activation", "1.702"]),
        ({**MINIMAX, "model_type": "llama4_text"}, ["unsupported activation", "routing weights"]),
    ],
)
def test_unknown_models_are_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got ") as caught:
        moe_shape(config)
    for word in words:
        assert word in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a file .*config\.json, got none\. Pass the"):
        moe_shape(tmp_path)
    with pytest.raises(ValueError, match="expected a file Qwen/Some-Model, got none"):
        mm.MegaMoEConfig.from_pretrained("Qwen/Some-Model", max_tokens_per_rank=8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="expected a JSON object"):
        moe_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        moe_shape(tmp_path)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid(name: str) -> None:
    config = mm.MegaMoEConfig.preset(name, max_tokens_per_rank=16)
    assert config.num_local_experts(8) * 8 == config.num_experts


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("deepseek-v4-flash", "deepseek_v4"),
        ("deepseek-v3", "deepseek_v3"),
        ("glm-5", "glm_moe_dsa"),
        ("minimax-m2", "minimax_m2"),
        ("qwen3-30b-a3b", "qwen3_moe"),
    ],
)
def test_presets_agree_with_transformers(name: str, model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra: hf")
    config = transformers.CONFIG_MAPPING[model_type]()
    preset = mm.MegaMoEConfig.preset(name, max_tokens_per_rank=16)
    assert mm.MegaMoEConfig.from_pretrained(config, max_tokens_per_rank=16) == preset


# Published config.json files whose numbers are not the defaults of a configuration class.
PUBLISHED = {
    "deepseek-v4-pro": {**DEEPSEEK, "hidden_size": 7168, "moe_intermediate_size": 3072,
                        "n_routed_experts": 384, "num_experts_per_tok": 6, "swiglu_limit": 10.0},
    "kimi-k2": {**DEEPSEEK, "hidden_size": 7168, "moe_intermediate_size": 2048,
                "n_routed_experts": 384, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827},
    "qwen3-235b-a22b": {**QWEN, "hidden_size": 4096, "moe_intermediate_size": 1536,
                        "num_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_agree_with_published_configs(name: str) -> None:
    preset = mm.MegaMoEConfig.preset(name, max_tokens_per_rank=16)
    assert mm.MegaMoEConfig.from_pretrained(PUBLISHED[name], max_tokens_per_rank=16) == preset


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    code = (
        "import sys, megamoe_compile as mm\n"
        f"mm.MegaMoEConfig.from_pretrained({str(tmp_path)!r}, max_tokens_per_rank=8)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type", ["gpt_oss", "minimax_m3_vl_text"])
def test_families_agree_with_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra: hf")
    shape = moe_shape(transformers.CONFIG_MAPPING[model_type]())
    assert (shape["swiglu_limit"], shape["swiglu_alpha"], shape["swiglu_beta"]) == (7.0, 1.702, 1.0)
    assert shape["expert_bias"] == (model_type == "gpt_oss")


def test_top_k_alone(tmp_path: Path) -> None:
    """Of a model whose layers differ in shape too, which moe_shape refuses."""
    ernie = {**QWEN, "moe_intermediate_size": [128, 256]}
    with pytest.raises(ValueError, match="one int for all layers"):
        moe_shape(ernie)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": ernie}))
    assert moe_top_k(ernie) == moe_top_k(tmp_path) == 4
    with pytest.raises(ValueError, match="top_k missing"):
        moe_top_k({**QWEN, "num_experts_per_tok": None})
    with pytest.raises(ValueError, match="expected a file"):
        moe_top_k(tmp_path / "nowhere")
