"""Models whose experts have several geometries: a context for each, prepared and closed as one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, refuses, relative_error
from torch import Tensor, nn

import megamoe_compile as mm

transformers = pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from checkpoint_helpers import small_config, write_checkpoint  # noqa: E402
from hf_models import CAPACITY, dequantized, experts_of, logits_of, make_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from megamoe_compile.engines.transformers import checkpoint as loading  # noqa: E402
from megamoe_compile.engines.transformers import model as megamoe  # noqa: E402


def mixed(sizes: tuple[int, ...] = (128, 256, 128)) -> nn.ModuleList:
    return nn.ModuleList(make_model(moe_intermediate_size=size) for size in sizes)


def test_one_context_per_geometry() -> None:
    models = mixed()
    alone = copy.deepcopy(models)
    contexts = megamoe.prepare(models, max_tokens_per_rank=CAPACITY)
    assert isinstance(contexts, mm.MegaMoEContexts)
    sizes = [context.config.intermediate_size for context in contexts.contexts]
    assert sizes == [128, 256]
    assert [len(context.layers) for context in contexts.contexts] == [4, 2]
    for number, model in enumerate(models):
        single = megamoe.prepare(alone[number], max_tokens_per_rank=CAPACITY)
        assert isinstance(single, mm.MegaMoEContext), "one geometry: the context itself"
        assert_same(logits_of(model), logits_of(alone[number]), f"model {number}")
    megamoe.release(models)
    assert all(context.closed for context in contexts.contexts)


def test_closed_as_one() -> None:
    models = mixed()
    with megamoe.prepare(models, max_tokens_per_rank=CAPACITY):
        logits_of(models[1])
    for model in models:
        with refuses(mm.ContextClosed, "open MegaMoEContext"):
            logits_of(model)


def test_release_keeps_what_others_use() -> None:
    models = mixed()
    contexts = megamoe.prepare(models, max_tokens_per_rank=CAPACITY)
    assert isinstance(contexts, mm.MegaMoEContexts)
    expected = logits_of(models[0])
    megamoe.release(models[2])  # of the first geometry, as models[0]
    megamoe.release(models[1])  # the only one of the second
    assert [context.closed for context in contexts.contexts] == [False, True]
    assert_same(logits_of(models[0]), expected, "after the release of its neighbours")


def test_a_geometry_that_cannot_run_closes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    models = mixed()
    made = []
    original = mm.MegaMoEContext.__init__

    def init(context: mm.MegaMoEContext, config: mm.MegaMoEConfig, *args: Any, **kw: Any) -> None:
        if config.intermediate_size == 256:
            raise mm.BackendUnavailable("the second geometry")
        original(context, config, *args, **kw)
        made.append(context)

    monkeypatch.setattr(mm.MegaMoEContext, "__init__", init)
    before = {name: p.data_ptr() for name, p in models.named_parameters()}
    with pytest.raises(mm.BackendUnavailable):
        megamoe.prepare(models, max_tokens_per_rank=CAPACITY)
    assert [context.closed for context in made] == [True]
    assert {name: p.data_ptr() for name, p in models.named_parameters()} == before


def test_one_bad_layer_leaves_all_as_they_are() -> None:
    models = mixed()
    experts_of(models)[5].has_gate = False
    before = {name: p.data_ptr() for name, p in models.named_parameters()}
    with refuses(ValueError, "2.model.layers.1.mlp.experts.has_gate"):
        megamoe.prepare(models, max_tokens_per_rank=CAPACITY)
    assert {name: p.data_ptr() for name, p in models.named_parameters()} == before


def test_experts_on_two_devices() -> None:
    models = mixed((128, 256))
    models[1].to("meta")
    with refuses(ValueError, "device of the experts", "['cpu', 'meta']", "pass device="):
        megamoe._prepare(models, megamoe._Options(8, None, None, {}), empty=True)


def test_a_runner_over_both() -> None:
    models = mixed((128, 256)).eval()
    contexts = megamoe.prepare(models, max_tokens_per_rank=CAPACITY)

    def step(tokens: Tensor) -> Tensor:  # each request is one token of its own
        return sum(model(tokens[:, None]).logits[:, 0] for model in models)  # type: ignore[return-value]

    runner = mm.GraphRunner(step, {"tokens": torch.tensor([1])}, [1, 4], contexts, module=models)
    runner.capture(progress=False)
    for count in (4, 3, 0, 1):
        tokens = torch.arange(1, 1 + count)
        got = runner(num_tokens=count, tokens=tokens)
        assert got.shape == (count, 64)
        if count:  # attention's own reshapes cannot take 0 rows
            with torch.no_grad():
                # Dense products round by the number of rows.
                assert_close(got, step(tokens), 0.02, f"{count} tokens")


# -- a model that has them -------------------------------------------------------------------------


def ernie() -> Any:
    """ERNIE-4.5-VL's text model: text and vision experts in each layer, of different widths."""
    module = pytest.importorskip("transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe")
    settings = pytest.importorskip(
        "transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe"
    )
    config = settings.Ernie4_5_VLMoeTextConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=[256, 128],
        moe_num_experts=4,
        moe_k=2,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        mlp_layer_types=["dense", "sparse"],
    )
    torch.manual_seed(0)
    return module.Ernie4_5_VLMoeTextModel._from_config(config, dtype=torch.bfloat16).eval()


def test_text_and_vision_experts() -> None:
    model = ernie()
    block = model.layers[1].mlp
    exact = dequantized(block)
    contexts = megamoe.prepare(model, max_tokens_per_rank=CAPACITY)
    assert isinstance(contexts, mm.MegaMoEContexts)
    assert [c.config.intermediate_size for c in contexts.contexts] == [256, 128]
    assert [c.config.top_k for c in contexts.contexts] == [2, 2]
    with contexts, torch.no_grad():
        x = torch.randn(1, 12, 128).bfloat16()
        for kinds in ([0] * 12, [0, 1, 1, 0] * 3, [1] * 12):
            types = torch.tensor([kinds])
            got, want = block(x, types), exact(x, types)
            got, want = (y[0] if isinstance(y, tuple) else y for y in (got, want))
            assert_close(got, want, 0.06, f"token types {kinds[:4]}")
            assert relative_error(got, want) > 1e-4, "the model's own experts ran"
        ids = torch.arange(12)[None]
        types = torch.tensor([[0, 1, 1, 0] * 3])
        hidden = model(input_ids=ids, moe_mm_token_type_ids=types).last_hidden_state
        assert bool(hidden.isfinite().all())


# -- a checkpoint ----------------------------------------------------------------------------------


def test_a_checkpoint_of_two_geometries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1 has wider experts than layer 0, in the files and in the model."""
    folders = [tmp_path / name for name in ("narrow", "wide", "both")]
    configs = [small_config(), small_config(moe_intermediate_size=256), small_config()]
    for folder, config in zip(folders, configs, strict=True):
        write_checkpoint(folder, config, shards=1)
    narrow, wide = (load_file(next(folder.glob("*.safetensors"))) for folder in folders[:2])
    from_wide = {name: t for name, t in wide.items() if ".layers.1.mlp.experts." in name}
    save_file({**narrow, **from_wide}, next(folders[2].glob("*.safetensors")))
    original = loading.empty_model

    def empty_model(config: Any) -> nn.Module:
        model, other = original(config), original(configs[1])
        model.model.layers[1] = other.model.layers[1]  # type: ignore[union-attr, index]
        return model

    monkeypatch.setattr(loading, "empty_model", empty_model)
    options: dict[str, Any] = dict(device="cpu", max_tokens_per_rank=CAPACITY)
    model, contexts = loading.load_checkpoint(folders[2], **options)
    monkeypatch.undo()
    assert isinstance(contexts, mm.MegaMoEContexts)
    assert [c.config.intermediate_size for c in contexts.contexts] == [128, 256]
    for layer, folder in enumerate(folders[:2]):
        whole, _ = loading.load_checkpoint(folder, **options)
        got, want = (experts_of(m)[layer].megamoe.state_dict() for m in (model, whole))
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            assert_same(got[name].float(), want[name].float(), f"layer {layer}, {name}")
    assert bool(logits_of(model).isfinite().all())
    contexts.close()
    assert all(context.closed for context in contexts.contexts)
