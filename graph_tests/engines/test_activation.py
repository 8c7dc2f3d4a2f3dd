"""The gates that experts modules of transformers have, and experts with biases, converted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, outcome, refuses, relative_error
from torch import Tensor, nn

import megamoe_compile as mm

transformers = pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from checkpoint_helpers import small_config, write_checkpoint  # noqa: E402
from hf_models import CAPACITY, experts_of, logits_of  # noqa: E402

from megamoe_compile.custom_ops.call import Swiglu  # noqa: E402
from megamoe_compile.engines.transformers import checkpoint as loading  # noqa: E402
from megamoe_compile.engines.transformers import model as megamoe  # noqa: E402
from megamoe_compile.engines.transformers.activation import (  # noqa: E402
    interleave,
    swiglu_limit,
    swiglu_of,
)
from megamoe_compile.engines.transformers.experts import gate_before_up, layout_of  # noqa: E402

# -- the gate --------------------------------------------------------------------------------------


def gated(
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    /,
    *,
    interleaved: bool = False,
    up_first: bool = False,
    clamp_below: bool = False,
    **attributes: Any,
) -> Any:
    """An experts module as far as its gate goes, written apart from the library's own formula."""

    def apply(columns: Tensor) -> Tensor:
        half = columns.shape[-1] // 2
        g, u = (columns[:, ::2], columns[:, 1::2]) if interleaved else columns.split(half, dim=-1)
        if up_first:
            g, u = u, g
        if limit is not None:
            g = torch.minimum(g, torch.tensor(limit))
            g = torch.maximum(g, torch.tensor(-limit)) if clamp_below else g
            u = torch.maximum(torch.minimum(u, torch.tensor(limit)), torch.tensor(-limit))
        return g / (1 + torch.exp(-alpha * g)) * (u + beta)

    fields = {"is_concatenated": not interleaved, "_apply_gate": apply, "act_fn": None}
    return SimpleNamespace(**fields, **attributes)


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (gated(), Swiglu()),
        (gated(1.0, 0.0, 7.0, limit=7.0), Swiglu(7.0)),
        (gated(swiglu_limit=0), Swiglu()),
        (gated(interleaved=True), Swiglu()),
        (gated(1.702, 1.0, 7.0, swiglu_limit=7), Swiglu(7.0, 1.702, 1.0)),
        (gated(1.702, 1.0, 7.0, swiglu_limit=7.0, alpha=1.702), Swiglu(7.0, 1.702, 1.0)),
        (gated(1.5, 0.0, swiglu_alpha=1.5), Swiglu(None, 1.5, 0.0)),
        (gated(1.5, 1.0, interleaved=True, swiglu_alpha=1.5), Swiglu(None, 1.5, 1.0)),
        (gated(1.0, 0.25, swiglu_beta=0.25), Swiglu(None, 1.0, 0.25)),
    ],
)
def test_gates_that_are_known(experts: Any, expected: Swiglu) -> None:
    assert swiglu_of(experts, "experts") == expected


@pytest.mark.parametrize(
    "experts",
    [
        gated(1.5),  # an alpha that no attribute tells
        gated(1.0, swiglu_alpha=1.702),  # an attribute that the gate does not use
        gated(1.702, 0.5),
        gated(1.702, 1.0, 7.0),  # a limit that no attribute tells
        gated(swiglu_limit=7.0),  # one that the gate does not use
        gated(1.702, 1.0, 2.0, swiglu_limit=2.0, clamp_below=True),
        gated(up_first=True),
        SimpleNamespace(**{**vars(gated(interleaved=True)), "is_concatenated": True}),
        SimpleNamespace(**{**vars(gated()), "is_concatenated": False}),
        SimpleNamespace(is_concatenated=True, _apply_gate=lambda columns: columns, act_fn="id"),
    ],
)
def test_gates_that_are_not(experts: Any) -> None:
    with refuses(ValueError, "unsupported activation of experts", "SwiGLU"):
        swiglu_of(experts, "experts")


def test_a_plain_gate_is_asked_for() -> None:
    assert swiglu_limit(gated(1.0, 0.0, 7.0, limit=7.0), "experts") == 7.0
    with refuses(ValueError, "(alpha, beta)", "(1.702, 1.0)"):
        swiglu_limit(gated(1.702, 1.0), "experts")


def test_rows_of_gate_and_up() -> None:
    gate, up = torch.arange(4.0).reshape(1, 4), -torch.arange(4.0).reshape(1, 4)
    columns = interleave(gate, up)
    assert columns.tolist() == [[0, 0, 1, -1, 2, -2, 3, -3]]
    assert gate_before_up(columns[0]).tolist() == [0, 1, 2, 3, 0, -1, -2, -3]


# -- gpt-oss and MiniMax-M3 ------------------------------------------------------------------------


def gpt_oss(**changes: Any) -> Any:
    config = transformers.GptOssConfig(
        **{
            **dict(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2),
            **dict(num_attention_heads=2, num_key_value_heads=2, head_dim=64, pad_token_id=0),
            **dict(num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64),
            **changes,
        }
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    for experts in experts_of(model):  # transformers starts them at zero
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            nn.init.normal_(getattr(experts, name), std=0.5)
        for name in ("gate_up_proj", "down_proj"):
            nn.init.normal_(getattr(experts, name), std=0.1)
    return model


def minimax_m3() -> Any:
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    settings = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    config = settings.MiniMaxM3VLTextConfig(
        hidden_size=128, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2
    )
    experts = module.MiniMaxM3VLExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts.to(torch.bfloat16)


@pytest.mark.parametrize("make", [lambda: experts_of(gpt_oss())[0], minimax_m3])
def test_parameterized_swiglu(make: Callable[[], Any]) -> None:
    """Against transformers' own in fp32; the rows are large, so that the clamps count."""
    experts = make()
    biased = bool(experts.has_bias)
    own = copy.deepcopy(experts).float()
    own.config._experts_implementation = "eager"
    with megamoe.prepare(experts, max_tokens_per_rank=CAPACITY) as context:
        assert isinstance(context, mm.MegaMoEContext)
        config = context.config
        assert (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta) == (7.0, 1.702, 1.0)
        assert config.expert_bias == biased
        x, ids = 4 * torch.randn(24, 128).bfloat16(), torch.rand(24, 4).topk(2).indices
        weights = torch.rand(24, 2)
        got, want = experts(x, ids, weights), own(x.float(), ids, weights)
        assert_close(got.float(), want, 0.08, "experts")
        for parameter in ("gate_up_proj_bias", "down_proj_bias"):
            assert getattr(experts, parameter, None) is None, "kept twice"


def test_weights_of_gpt_oss_arrive() -> None:
    """Transposed and interleaved parameters, as load_weights wants them, expert by expert."""
    experts = experts_of(gpt_oss())[0]
    w13 = torch.cat([experts.gate_up_proj[..., ::2].mT, experts.gate_up_proj[..., 1::2].mT], dim=1)
    b13 = torch.cat([experts.gate_up_proj_bias[:, ::2], experts.gate_up_proj_bias[:, 1::2]], dim=1)
    w2, b2 = experts.down_proj.mT, experts.down_proj_bias
    parts = [t.detach().clone().contiguous() for t in (w13, w2, b13, b2)]
    layout = layout_of(experts, "experts", None)
    assert (layout.transposed, layout.interleaved, layout.biased) == (True, True, True)
    context = megamoe.prepare(experts, max_tokens_per_rank=8)
    assert isinstance(context, mm.MegaMoEContext)
    layer = mm.MegaMoE(context)
    layer.load_weights(parts[0], None, parts[1], None, parts[2], parts[3])
    for name, tensor in layer.state_dict().items():
        if isinstance(tensor, Tensor):
            assert_same(experts.megamoe.state_dict()[name].float(), tensor.float(), name)


def test_logits_of_gpt_oss() -> None:
    model = gpt_oss()
    own = logits_of(model)
    with megamoe.prepare(model, max_tokens_per_rank=CAPACITY):
        ours = logits_of(model)
    assert_close(ours, own, 0.09, "logits")
    assert relative_error(ours, own) > 1e-4, "the model's own experts ran"


def test_biases_of_another_shape() -> None:
    experts = experts_of(gpt_oss())[0]
    experts.down_proj_bias = nn.Parameter(experts.down_proj_bias.detach()[:, :64])
    with refuses(ValueError, "down_proj_bias.shape", "[4, 128]", "[4, 64]"):
        megamoe.prepare(experts, max_tokens_per_rank=8)
    experts.down_proj_bias = None
    with refuses(ValueError, "down_proj_bias", "a parameter"):
        megamoe.prepare(experts, max_tokens_per_rank=8)


def biases_of_a_column_shard(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    experts = experts_of(gpt_oss())[0]
    mesh = init_device_mesh("cpu", (world_size,))
    for name, dim in (("gate_up_proj", 2), ("gate_up_proj_bias", 1), ("down_proj", 1)):
        shard = distribute_tensor(getattr(experts, name).detach(), mesh, [Shard(dim)])
        setattr(experts, name, nn.Parameter(shard, requires_grad=False))
    return outcome(lambda: megamoe.prepare(experts, max_tokens_per_rank=8))


@pytest.mark.multirank
def test_biases_of_a_column_shard(ranks: Callable[[int], Any]) -> None:
    """down_proj_bias is whole on every rank, and transformers sums the ranks' results."""
    for message in ranks(2).run(biases_of_a_column_shard):
        assert message.startswith("ValueError: GptOssExperts with biases: expected whole"), message


def test_the_published_width_of_gpt_oss() -> None:
    """2880 is not a multiple of 128: a fact to say, and nothing has been converted then."""
    experts = experts_of(gpt_oss(hidden_size=192, num_hidden_layers=1))[0]
    with refuses(ValueError, "hidden_size", "a multiple of 128", "192"):
        megamoe.prepare(experts, max_tokens_per_rank=8)
    assert experts.gate_up_proj.numel()


def test_mxfp4_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config(), fp8=False)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with refuses(ValueError, "qwen3_moe", "mxfp4", "prepare(model, ...)"):
        loading.load_checkpoint(tmp_path, device="cpu", max_tokens_per_rank=8)
