"""Loading a checkpoint: the right weights in the right place, and little memory beyond them."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import PeakStorage
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from checkpoint_helpers import small_config, write_checkpoint
from safetensors.torch import load_file, save_file

from megamoe_compile.commands import cli
from megamoe_compile.custom_ops.reference.recipe import (
    FP8,
    deinterleave_gate_up,
    dequantize_blocks,
    quantize_blocks,
)
from megamoe_compile.engines.transformers import checkpoint as loading
from megamoe_compile.engines.transformers.checkpoint import Checkpoint, dequantize, load_checkpoint

ALL_EXPERTS = 8


def loaded(directory: Path, **options: Any) -> tuple[Any, Any]:
    return load_checkpoint(directory, device="cpu", max_tokens_per_rank=8, **options)


def experts_of(model: Any, layer: int) -> nn.Module:
    return cast(nn.Module, model.model.layers[layer].mlp.experts.megamoe)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_every_weight_arrives(tmp_path: Path, fp8: bool) -> None:
    plain = write_checkpoint(tmp_path, small_config(), fp8=fp8)
    model, context = loaded(tmp_path)
    with context:
        tensors = dict(model.named_parameters())
        dense = {name: w for name, w in plain.items() if ".experts." not in name}
        assert set(tensors) == set(dense)
        for name, weight in dense.items():
            assert tensors[name].dtype == torch.bfloat16
            assert torch.equal(tensors[name], weight), name
        for layer in range(2):
            got: Any = experts_of(model, layer)
            for expert in range(ALL_EXPERTS):
                at = f"model.layers.{layer}.mlp.experts.{expert}."
                w13 = torch.cat([plain[f"{at}{name}_proj.weight"] for name in ("gate", "up")])
                w2 = plain[f"{at}down_proj.weight"]
                if not fp8:  # quantized on load
                    w13, w2 = (dequantize_blocks(*quantize_blocks(w)) for w in (w13, w2))
                have = dequantize_blocks(
                    deinterleave_gate_up(got.w13[expert]), got.w13_scale[expert]
                )
                assert torch.equal(have.bfloat16(), w13.bfloat16()), (layer, expert)
                have = dequantize_blocks(got.w2[expert], got.w2_scale[expert])
                assert torch.equal(have.bfloat16(), w2.bfloat16()), (layer, expert)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_the_model_runs_as_transformers_loads_it(tmp_path: Path) -> None:
    """Against the same weights in bf16: rotary frequencies and all else that no file holds."""
    plain = write_checkpoint(tmp_path, small_config())
    model, context = loaded(tmp_path)
    from transformers import Qwen3MoeForCausalLM

    bf16: Any = Qwen3MoeForCausalLM(small_config()).bfloat16().eval()
    own = {name: w for name, w in plain.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        gate_up = [
            torch.cat([plain[f"{at}{e}.{n}_proj.weight"] for n in ("gate", "up")])
            for e in range(ALL_EXPERTS)
        ]
        down = [plain[f"{at}{e}.down_proj.weight"] for e in range(ALL_EXPERTS)]
        own |= {f"{at}gate_up_proj": torch.stack(gate_up), f"{at}down_proj": torch.stack(down)}
    bf16.load_state_dict(own)
    ids = torch.randint(256, (1, 6))
    with context, torch.no_grad():
        got, want = model(ids).logits.float(), bf16(ids).logits.float()
    assert (got - want).norm() / want.norm() < 0.06


def test_a_small_model_takes_fewer_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    model, context = loaded(tmp_path, model_config=small_config(num_hidden_layers=1))
    with context:
        assert len(model.model.layers) == 1


def test_peak_memory_is_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 % more: 4 layers of 64 experts, so that one expert is 0.4 % of the weights."""
    write_checkpoint(tmp_path, small_config(num_hidden_layers=4, num_experts=64))
    read = Checkpoint.read
    # On a CPU a tensor is a view of the mapped file. A copy, as on a GPU, counts.
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read(self, name).clone())
    gc.collect()
    with PeakStorage() as live:
        model, context = loaded(tmp_path)
    with context:
        weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert weights > 4 * 64 * 3 * 256 * 128
        assert live.live >= weights
        assert live.peak <= 1.02 * weights, live.peak / weights


def test_a_ragged_block_is_dequantized() -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.5
    got = dequantize(weight, scale)
    rows, columns = torch.arange(200) // 128, torch.arange(300) // 128
    assert torch.equal(got, (weight.float() * scale[rows][:, columns]).bfloat16())


def test_progress_counts_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    def tqdm(items: list[Any], **options: Any) -> list[Any]:
        seen.append((len(items), options))
        return items

    monkeypatch.setitem(sys.modules, "tqdm", cast(Any, type("tqdm", (), {"tqdm": tqdm})))
    write_checkpoint(tmp_path, small_config())
    loaded(tmp_path, progress=True)[1].close()
    assert seen == [(2 * ALL_EXPERTS, {"desc": "load", "unit": "expert"})]


def edit_index(directory: Path, drop: str) -> None:
    file = directory / loading.INDEX
    index = json.loads(file.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if drop not in k}
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("layers.1.self_attn.o_proj.weight", "tensor model.layers.1.self_attn.o_proj.weight"),
        ("experts.3.", "model.layers.0.mlp.experts.3: expected projections"),
        ("experts.3.up_proj", "tensor model.layers.0.mlp.experts.3.up_proj.weight"),
        ("q_proj.weight_scale_inv", "q_proj.weight_scale_inv: expected one scale"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, drop: str, message: str) -> None:
    write_checkpoint(tmp_path, small_config())
    edit_index(tmp_path, drop)
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path)


def replace(directory: Path, name: str, value: torch.Tensor | None) -> None:
    """Store other values of one tensor in its file, or drop it there; the index stays."""
    file = directory / json.loads((directory / loading.INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    del tensors[name]
    save_file({**tensors, **({} if value is None else {name: value})}, file)


def test_a_missing_or_broken_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    replace(tmp_path, name, None)
    with pytest.raises(ValueError, match=rf"model-0000\d-of-00003.safetensors: expected .*{name}"):
        loaded(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors: expected a file with"):
        loaded(tmp_path)
    shard.unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the 3 that .* names, got no model-00002.*, model-00003"):
        loaded(tmp_path)


EXPERT = "model.layers.1.mlp.experts.2"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "up_proj.weight",
            torch.zeros(64, 256).to(FP8),
            r"up_proj.weight: expected \[128, 256\] .*e4m3",
        ),
        ("up_proj.weight", torch.zeros(128, 256), r"up_proj.weight: .* got \[128, 256\] .*float32"),
        (
            "down_proj.weight",
            torch.zeros(128, 256).to(FP8),
            r"down_proj.weight: expected \[256, 128\]",
        ),
        ("down_proj.weight_scale_inv", torch.ones(1, 2), r"experts.2: w2_scale.shape: expected"),
        ("up_proj.weight_scale_inv", torch.ones(1, 2).half(), r"experts.2: w13_scale.dtype"),
    ],
)
def test_an_expert_of_another_kind_is_named(
    tmp_path: Path, name: str, value: torch.Tensor, message: str
) -> None:
    write_checkpoint(tmp_path, small_config())
    replace(tmp_path, f"{EXPERT}.{name}", value)
    if name == "up_proj.weight_scale_inv":  # they are joined
        replace(tmp_path, f"{EXPERT}.gate_proj.weight_scale_inv", value.clone())
    with pytest.raises(ValueError, match=rf"{EXPERT}.*{message.removeprefix('experts.2')}"):
        loaded(tmp_path)


def test_a_directory_without_files_is_named(tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected model.safetensors.index.json or model"):
        loaded(tmp_path)
    assert not loading.has_separate_experts(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    with pytest.raises(ValueError, match=r"embed_tokens.weight.shape: expected \[512, 256\]"):
        loaded(tmp_path, model_config=small_config(vocab_size=512))


@pytest.mark.gpu
def test_peak_memory_on_a_gpu(tmp_path: Path) -> None:
    config = small_config(
        hidden_size=512, moe_intermediate_size=256, num_hidden_layers=4, num_experts=64
    )
    write_checkpoint(tmp_path, config)
    torch.zeros(1, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, context = load_checkpoint(tmp_path, device="cuda", max_tokens_per_rank=8)
    peak = torch.cuda.max_memory_allocated() - before
    with context, torch.no_grad():
        weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        # The staging buffer is allocated too, once, whatever the size of the model.
        assert peak - context.buffer_bytes <= 1.02 * weights, (peak, weights)
        assert model(torch.randint(256, (1, 4), device="cuda")).logits.isfinite().all()


@pytest.mark.multirank
def test_decode_streams_a_share_on_each_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with half of the experts each, against rank 0 with all of them."""
    write_checkpoint(tmp_path, small_config(hidden_size=512, moe_intermediate_size=256))
    arguments = ["--model", str(tmp_path), "--ranks", "2", "--steps", "12", "--buckets", "2"]
    code = cli.main(["decode", *arguments, "--json"])
    report = json.loads(capfd.readouterr().out)
    assert code == 0, report
    assert report["parity"]
    assert report["ranks"] == 2
