"""`megamoe bench` and model.generate on a Hopper GPU, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_choices, relative_error
from torch._dynamo.utils import counters

pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from megamoe_compile.commands import cli
from megamoe_compile.commands.bench.columns import Options, register_chain
from megamoe_compile.commands.bench.models import (
    RandomSource,
    model_without_experts,
    set_fp8_experts,
)
from megamoe_compile.commands.bench.parity import compare
from megamoe_compile.commands.bench.step import ATTENTION, BenchStep, register_attention
from megamoe_compile.commands.decode.model import random_model
from megamoe_compile.custom_ops.reference.recipe import interleave_gate_up, moe_reference
from megamoe_compile.engines.transformers import model as megamoe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_chain_matches_reference(tokens: int) -> None:
    """DeepGEMM's masked grouped GEMM, eager and captured, between our kernels."""
    register_chain()
    source = RandomSource("tiny", 1)
    device = torch.device("cuda")
    w13, s13, w2, s2 = source.experts("", 0, device)
    x = torch.randn(tokens, 512, device=device, dtype=torch.bfloat16)
    weights, ids = torch.rand(tokens, 16, device=device).topk(4)
    prepared = torch.stack([interleave_gate_up(w) for w in w13])
    want = moe_reference(x, ids, weights, prepared, s13, w2, s2)
    chain = torch.ops.megamoe_bench.unfused_moe
    arguments = (x, ids, weights, w13, s13, w2, s2, None)
    got = chain(*arguments)
    assert relative_error(got, want) < 0.025
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(*arguments)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, got)


def test_the_command_runs_all_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    # Few batch sizes: each is compiled anew, and what is left on the clock is Inductor's.
    arguments = "bench --model tiny --batch 2 --buckets 1 --context 128 --steps 5 --json"
    code = cli.main([*arguments.split(), "--out", str(out)])
    data = json.loads(capsys.readouterr().out)
    assert code == 0, {column["name"]: column["error"] for column in data["columns"]}
    for column in data["columns"]:
        (cell,) = column["cells"]
        assert cell["batch"] == 2
        assert cell["peak_bytes"] > 1e6
        if column["name"] == "hf-eager":
            continue
        assert cell["share"]["moe_block"] is not None, (column["name"], cell["share"]["rows"])
        assert 0.05 < cell["share"]["moe_block"] < 0.95
        assert 0 < cell["host"]["least"] <= cell["host"]["median"]
    assert data["columns"][-1]["buckets"] == [1, 2]
    assert out.with_suffix(".md").read_text().count("\n| 2 | ") == 4


def test_parity() -> None:
    register_attention()
    options = Options(
        source=RandomSource("tiny", None),
        device=torch.device("cuda"),
        batches=(1, 4),
        buckets=(1, 4),
        context_length=64,
        steps=256,
        budget_s=1.0,
        attention=ATTENTION,
        backend="auto",
        seed=0,
    )
    with torch.no_grad():
        report = compare(options, print)
    print(report.text())
    assert report.backend != "reference"
    assert report.holds, report.text()


def test_step_compiles_and_captures() -> None:
    """The layers' compiled code in one CUDA graph, against eager, token by token."""
    register_attention()
    source, device = RandomSource("tiny", None), torch.device("cuda")
    model: Any = model_without_experts(source, device, ATTENTION)
    set_fp8_experts(model, source, device)
    with megamoe.prepare(model, max_tokens_per_rank=4), torch.no_grad():
        step, eager = (BenchStep(model, 4, 64) for _ in range(2))
        ids = torch.randint(512, (6, 4), device=device)
        positions = torch.arange(6, device=device)[:, None]
        for run in (step, eager):
            run(ids[0], positions[0])
        want = [eager(ids[at], positions[at])[0] for at in range(6)]
        step.compile()
        static, position = ids[0].clone(), positions[0].clone()
        for _ in range(2):
            step(static, position)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, _ = step(static, position)
        for at in range(6):
            static.copy_(ids[at])
            position.copy_(positions[at])
            logits.fill_(float("nan"))
            graph.replay()
            assert relative_error(logits, want[at]) < 0.03, at


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_generate_compiled_by_transformers() -> None:
    """Its own torch.compile of the decode step, in its default mode with CUDA graphs."""
    megamoe.register(max_tokens_per_rank=64)
    model: Any = random_model().cuda()
    model.set_experts_implementation("megamoe")
    prompt = torch.randint(3, 256, (2, 8), device="cuda")
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    want = model.generate(prompt, **options)
    counters.clear()
    got = model.generate(prompt, cache_implementation="static", **options)
    assert counters["stats"]["unique_graphs"] >= 1, "transformers compiled nothing"
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert_same_choices(got.logits, want.logits, 0.05)
    megamoe.release(model)
