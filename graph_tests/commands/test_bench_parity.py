"""`megamoe bench --parity` on a CPU: what holds, and each fault that it must see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_same, relative_error

pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from bench_helpers import options

from megamoe_compile.commands import cli
from megamoe_compile.commands.bench import models as bench_models
from megamoe_compile.commands.bench import parity as bench_parity
from megamoe_compile.commands.bench.models import RandomSource
from megamoe_compile.commands.bench.parity import BF16_TOLERANCE, compare
from megamoe_compile.commands.bench.routing import MOST_REROUTED, REROUTED_TOLERANCE, RoutedParity
from megamoe_compile.custom_ops.reference.recipe import moe_reference


def parity(**changes: Any) -> dict[str, RoutedParity]:
    run = options(**{"source": RandomSource("tiny", 1), "buckets": (2, 4), "steps": 32, **changes})
    with torch.no_grad():
        report = compare(run, lambda text: None)
    assert len(report.sizes) >= 4
    return report.comparisons


def test_parity_holds() -> None:
    got = parity()
    assert got["bf16"].holds, got["bf16"]
    assert got["recipe"].holds, got["recipe"]
    # FP8 activations cost something: a comparison of a model with itself would not.
    errors = {name: routed.alike.max_relative_error for name, routed in got.items()}
    assert errors["recipe"] < errors["bf16"] < BF16_TOLERANCE
    assert got["bf16"].alike.decided > 10


@pytest.mark.usefixtures("quick_compile")
def test_parity_tells_tokens_that_a_router_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of DeepSeek-V3's kind weigh much: another one is more than the bound."""
    fields = {
        **dict(hidden_size=512, moe_intermediate_size=256, intermediate_size=512, vocab_size=512),
        **dict(num_hidden_layers=2, first_k_dense_replace=0, n_routed_experts=16, n_group=4),
        **dict(topk_group=2, num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=4),
        **dict(q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32),
        **dict(v_head_dim=32, max_position_embeddings=4096),
    }
    presets = {**bench_models.PRESETS, "small": ("DeepseekV3Config", fields)}
    monkeypatch.setattr(bench_models, "PRESETS", presets)
    got = parity(source=RandomSource("small", None))["bf16"]
    assert got.holds, got.text()
    assert got.rerouted.tokens > 0, "take more steps: no rounding changed a choice"
    assert BF16_TOLERANCE < got.rerouted.max_relative_error < REROUTED_TOLERANCE
    assert 0 < got.changed < MOST_REROUTED * got.taken
    assert f"{got.rerouted.tokens} more tokens took another expert" in got.text()


@pytest.mark.usefixtures("quick_compile")
def test_parity_sees_a_wrong_router(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_parity._megamoe

    def wrong(*args: Any) -> Any:
        model, context = right(*args)
        gate: Any = model.model.layers[0].mlp.gate
        gate.weight.copy_(gate.weight.roll(1, 0))
        return model, context

    monkeypatch.setattr(bench_parity, "_megamoe", wrong)
    got = parity()["recipe"]
    assert not got.holds
    assert f"of {got.taken} experts differ" in str(got.fault)


def outputs(logits: list[list[float]], *ids: list[int]) -> tuple[torch.Tensor, ...]:
    """Of one layer."""
    values = torch.tensor(logits)
    return values, values.argmax(-1), torch.tensor(ids)[:, None]


def routed(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], alike: int = 20
) -> RoutedParity:
    """The comparison of one step, after one in which `alike` tokens are equal."""
    parity = RoutedParity(0.1)
    before: Any = outputs([[1.0, 0.0, 0.0]] * alike, *([[0, 1]] * alike))
    if alike:
        parity.compare("step 1", before, before)
    parity.compare("step 2", got, want)  # type: ignore[arg-type]
    return parity


LOGITS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_the_order_of_experts_is_no_choice() -> None:
    parity = routed(outputs(LOGITS, [3, 5], [2, 4]), outputs(LOGITS, [5, 3], [4, 2]))
    assert parity.holds
    assert (parity.changed, parity.taken, parity.rerouted.tokens) == (0, 44, 0)


def test_a_token_that_went_elsewhere_is_no_fault() -> None:
    """Neither its logits nor its token; the others' bound stays."""
    got = outputs([[0.6, 0.0, 0.5], [0.0, 1.0, 0.0]], [3, 5], [2, 4])
    got[1][0] = 2
    want = outputs(LOGITS, [3, 6], [2, 4])
    parity = routed(got, want)
    assert not parity.holds, "a wrong token leads, by more than the wide bound"
    assert parity.fault == "step 2, row 0: token 2, not 0"
    got[1][0] = 0
    parity = routed(got, want)
    assert parity.holds
    assert parity.rerouted.max_relative_error == pytest.approx(0.5)
    assert (parity.alike.max_relative_error, parity.alike.tokens) == (0.0, 21)
    got[0][1, 1] = 0.8
    assert routed(got, want).fault == "step 2, row 1: logits differ by 0.2"
    got[0][1, 1] = math.nan
    assert "row 1: logits differ by nan" in str(routed(got, want).fault)


@pytest.mark.parametrize(
    ("value", "fault"),
    [(0.3, "row 0: logits differ by 0.7"), (math.nan, "row 0: logits differ by nan")],
)
def test_a_token_that_went_elsewhere_stays_near(value: float, fault: str) -> None:
    want = outputs(LOGITS, [3, 6], [2, 4])
    got = outputs([[value, 0.0, 0.0], LOGITS[1]], [3, 5], [2, 4])
    assert fault in str(routed(got, want).fault)


def test_few_experts_may_differ() -> None:
    got, want = outputs(LOGITS, [3, 5], [2, 4]), outputs(LOGITS, [3, 6], [2, 5])
    assert routed(got, want, alike=18).holds
    parity = routed(got, want, alike=17)
    assert not parity.holds
    assert parity.fault == "2 of 38 experts differ"


def test_parity_needs_tokens_that_took_the_same_experts() -> None:
    """In a deep model hardly one takes the same in all layers: equal logits then say little."""
    logits = outputs(LOGITS)[:2]
    ids = torch.arange(200).view(2, 50, 2)  # 50 layers
    other = ids.clone()
    other[:, 7, 1] = 1000
    got: Any = (*logits, ids)
    parity = RoutedParity(0.1)
    parity.compare("step 1", got, (*logits, other))
    assert (parity.alike.tokens, parity.changed, parity.taken) == (0, 2, 200)
    assert not parity.holds
    assert parity.text().count("no token took the same experts in all layers: take fewer") == 1
    assert not RoutedParity(0.1).holds, "nothing compared is no parity"
    parity.compare("step 2", got, got)
    assert parity.holds


@pytest.mark.parametrize(
    ("asked", "layers"),
    [("--model deepseek-v3", 4), ("--model tiny", 2), ("--model qwen3-30b-a3b --layers 6", 6)],
)
def test_parity_takes_few_layers_of_a_preset(
    asked: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def run(run: Any, *rest: Any) -> int:
        taken.append(run.source.config.num_hidden_layers)
        return 0

    monkeypatch.setattr(bench_parity, "run_parity", run)
    assert cli.main(["bench", *asked.split(), "--parity", "--device", "cpu"]) == 0
    assert taken == [layers]


@pytest.mark.usefixtures("quick_compile")
def test_parity_takes_more_buckets_than_dynamo_keeps_codes() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        assert parity(buckets=(1, 2, 3, 4))["recipe"].holds


@pytest.mark.usefixtures("quick_compile")
def test_parity_sees_a_wrong_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert of 16 with its gate and up exchanged."""
    right = bench_parity.set_fp8_experts

    def wrong(model: Any, source: Any, device: torch.device) -> None:
        right(model, source, device)
        for layer in model.model.layers:
            w13 = layer.mlp.experts.gate_up_proj.data[0].view(torch.uint8)
            w13.copy_(w13.roll(w13.shape[0] // 2, 0))

    monkeypatch.setattr(bench_parity, "set_fp8_experts", wrong)
    assert not parity()["bf16"].holds


class Groups:
    """A context as far as the recipe asks it; 32 columns up to two tokens."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def intermediate_group_for(self, num_tokens: int) -> int:
        self.asked.append(num_tokens)
        return 32 if num_tokens <= 2 else 128


def test_the_recipe_has_the_scales_of_the_path() -> None:
    """On one rank of a GPU few tokens and many take different kernels."""
    groups = Groups()
    with torch.no_grad():
        model: Any = bench_parity._recipe(options(source=RandomSource("tiny", 1)), groups)  # type: ignore[arg-type]
        experts = model.model.layers[0].mlp.experts
        prepared = (
            *(experts.gate_up_proj, experts.gate_up_proj_scale_inv),
            *(experts.down_proj, experts.down_proj_scale_inv),
        )
        for tokens, group in ((2, 32), (4, 128)):
            x, weights = torch.randn(tokens, 512).bfloat16(), torch.full((tokens, 4), 0.25)
            ids = torch.rand(tokens, 16).topk(4).indices
            want = moe_reference(x, ids, weights, *prepared, intermediate_group=group)
            assert_same(experts(x, ids, weights), want)
    assert groups.asked == [2, 4]


def test_the_recipe_has_the_limit_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    def clamped(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)

    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", clamped)
    monkeypatch.setattr(Qwen3MoeExperts, "limit", 0.5, raising=False)
    run = options(source=RandomSource("tiny", 1))
    x, weights = torch.randn(4, 512).bfloat16(), torch.full((4, 4), 0.25)
    ids = torch.rand(4, 16).topk(4).indices
    with torch.no_grad():
        recipe = bench_parity._recipe(run, Groups())  # type: ignore[arg-type]
        models: list[Any] = [recipe, bench_parity._bf16(run)]
        models[1].set_experts_implementation("batched_mm")  # the eager loop has no _apply_gate
        got, want = (model.model.layers[0].mlp.experts(x, ids, weights) for model in models)
    assert relative_error(got, want) < 0.06
