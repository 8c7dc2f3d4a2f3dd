"""The router's kernel under Triton's interpreter, and which routers it may replace."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from megamoe_compile.custom_ops.staging.router_topk import (
    router_topk,
    router_topk_reference,
    router_topk_triton,
)

CASES = [
    (1, 128, 8, True, torch.bfloat16),
    (3, 128, 8, False, torch.bfloat16),
    (4, 60, 5, True, torch.float32),  # neither is a power of two
    (2, 512, 1, False, torch.float32),
    (2, 4, 4, True, torch.bfloat16),  # all experts
]


def check(
    tokens: int,
    experts: int,
    top_k: int,
    renormalize: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    torch.manual_seed(tokens)
    logits = (4 * torch.randn(tokens, experts, device=device)).to(dtype)
    weights, ids = router_topk_triton(logits, top_k, renormalize)
    want, want_ids = router_topk_reference(logits, top_k, renormalize)
    assert (weights.dtype, ids.dtype) == (dtype, torch.int64)
    # Equal logits may come in any order.
    assert torch.equal(logits.gather(1, ids), logits.gather(1, want_ids))
    assert all(len(set(row)) == top_k for row in ids.tolist())
    tolerance = 1e-5 if dtype == torch.float32 else 0.008
    torch.testing.assert_close(weights, want, rtol=tolerance, atol=1e-6)


def check_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]]).bfloat16()
    weights, ids = router_topk_triton(logits, 3, True)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights.float(), torch.full((2, 3), 1 / 3), rtol=0.01, atol=0)
    huge = torch.tensor([[-3e38, 3e38, 0.0, -float("inf")]])
    weights, ids = router_topk_triton(huge, 2, False)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.0, 0.0]]
    assert router_topk_triton(huge[:0], 2, False)[1].shape == (0, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_reference(interpreter: ProcessPoolExecutor, case: Any) -> None:
    interpreter.submit(check, *case).result()


def test_kernel_takes_the_lowest_of_equals(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(check_ties).result()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_a_gpu(case: Any) -> None:
    check(*case, device="cuda")


def test_kernel_compiles() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from megamoe_compile.custom_ops.staging.router_topk_triton import router_topk_kernel as kernel

    signature = {"logits_ptr": "*bf16", "weights_ptr": "*bf16", "ids_ptr": "*i64"}
    constants = {"EXPERTS": 128, "TOP_K": 8, "RENORMALIZE": True, "WIDTH": 128, "SLOTS": 8}
    source = triton.compiler.ASTSource(
        kernel, {name: signature.get(name, "constexpr") for name in kernel.arg_names}, constants
    )
    options = {"num_warps": 1}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "bar.sync" not in done.asm["ptx"]  # one warp needs no barrier


def test_op() -> None:
    logits = torch.randn(3, 16).bfloat16()
    torch.library.opcheck(torch.ops.megamoe.router_topk.default, (logits, 4, True))
    compiled = torch.compile(router_topk, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(logits, 4, True), router_topk(logits, 4, True), strict=True):
        assert torch.equal(got, want)
    for bad, top_k in ((logits, 17), (logits, 0), (logits[0], 2), (logits.new_ones(1, 2048), 2)):
        with pytest.raises(ValueError, match="router_topk: logits and top_k"):
            router_topk(bad, top_k, True)


# -- routers of transformers -----------------------------------------------------------------------


def prepared(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from megamoe_compile.engines.transformers.model import prepare

    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_()
    prepare(model, max_tokens_per_rank=8)
    return model


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_routers_are_fused(renormalize: bool) -> None:
    pytest.importorskip("transformers")
    from checkpoint_helpers import small_config

    from megamoe_compile.engines.transformers.routers import FusedRouter, fuse_routers

    model = prepared(small_config(norm_topk_prob=renormalize))
    names = set(dict(model.named_parameters()))
    ids = torch.randint(256, (2, 3))
    with torch.no_grad():
        want = model(ids).logits
        notes = fuse_routers(model)
        assert notes == {f"model.layers.{layer}.mlp.gate": "fused" for layer in range(2)}
        gates = [layer.mlp.gate for layer in model.model.layers]
        assert all(isinstance(gate, FusedRouter) for gate in gates)
        assert all(gate.renormalize is renormalize for gate in gates)
        assert torch.equal(model(ids).logits, want)
        assert fuse_routers(model) == notes  # once more changes nothing
        assert torch.equal(model(ids).logits, want)
    assert set(dict(model.named_parameters())) == names


def test_other_routers_stay() -> None:
    transformers = pytest.importorskip("transformers")
    from checkpoint_helpers import small_config

    from megamoe_compile.engines.transformers.routers import fuse_routers

    config = transformers.Glm4MoeConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        pad_token_id=0,
    )
    (note,) = fuse_routers(prepared(config)).values()
    assert note == "computes something else than softmax, top-k and renormalization"
    model = prepared(small_config())
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *args: None)
    model.model.layers[1].mlp.gate.top_k = 3
    assert set(fuse_routers(model).values()) == {"something wraps it", "fused"}
