"""`megamoe doctor` and `megamoe plan`, as processes and by their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe_compile as mm
from megamoe_compile.commands import cli, doctor, plan
from megamoe_compile.commands.plan import moe_layers, symmetric_buffer_bytes

ROOT = Path(__file__).resolve().parents[2]
FLASH = ["plan", "--model", "deepseek-v4-flash", "--ranks", "8", "--max-tokens", "128"]
# Runs the command as if a package were not installed: neither its files nor its metadata.
WITHOUT = """
import importlib.metadata, sys
sys.modules[{package!r}] = None
found = importlib.metadata.version
def version(name):
    if name == {package!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
from megamoe_compile.commands.cli import main
sys.exit(main({argv!r}))
"""


def megamoe(*argv: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "megamoe_compile", *argv]
    if without is not None:
        start = ["-c", WITHOUT.format(package=without, argv=list(argv))]
    # The verdicts below are those of a machine without a GPU.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *start], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def parsed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON object of a command that must succeed."""
    assert cli.main([*argv, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


# -- the front door -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "command"),
        (["nonsense"], "nonsense"),
        (["plan"], "--model"),
        (["plan", "--nonsense"], "--model"),
        ([*FLASH[:-1], "many"], "many"),
        ([*FLASH[:-1], "0"], "max_tokens_per_rank"),
        ([*FLASH, "--ranks", "7"], "expected a divisor of num_experts (256), got 7"),
        ([*FLASH, "--ranks", "0"], "ep_size"),
        ([*FLASH, "--layers", "0"], "--layers"),
        ([*FLASH, "--model", "deepseek-v4-flush"], "deepseek-v4-flash"),
        (["doctor", "--hidden-size", "100"], "multiple of 128"),
        (["doctor", "--device", "toaster"], "--device"),
        (["doctor", "--preset", "gpt"], "deepseek-v4-flash"),
    ],
    ids=" ".join,
)
def test_bad_arguments_exit_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"megamoe-compile {mm.__version__}\n"


def test_module_and_script_are_one_program() -> None:
    done = megamoe(*FLASH, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranks"] == 8


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_says_yes_on_this_machine() -> None:
    pytest.importorskip("transformers", reason="the main job needs transformers")
    done = megamoe("doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["problems"]) == (0, True, {})
    assert report["backend"] == "reference"
    assert report["torch"]["version"] == torch.__version__
    assert report["device"] == "cpu" and report["gpus"] == []


def test_doctor_needs_no_transformers_and_asks_for_them() -> None:
    done = megamoe("doctor", "--json", without="transformers")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    assert list(report["problems"]) == ["transformers"]
    assert "pip install 'megamoe-compile[hf]'" in report["problems"]["transformers"]


def test_doctor_text_is_one_aligned_table() -> None:
    done = megamoe("doctor", "--backend", "triton")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    column = lines[0].index(mm.__version__)
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    rows = {line[:column].strip(): line[column:] for line in lines}
    assert rows["backend"].startswith("none: backend 'triton' needs a CUDA device")
    assert rows["verdict"].startswith("megamoe decode cannot run here")


def test_doctor_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 1
    assert "no-such-compiler" in json.loads(capsys.readouterr().out)["problems"]["compiler"]


@pytest.mark.parametrize(
    ("wheel", "torch_version", "cuda", "fits", "cure"),
    [
        ("0.1.5.post1", "2.11.0+cu130", "13.0", True, None),
        ("0.2.5", "2.11.0+cu130", "13.0", False, "0.1.5.post1"),
        ("0.1.5.post1", "2.14.1", "13.0", False, "0.2.5"),
        ("0.2.0", "2.13.0+cpu", None, False, "CUDA build"),
    ],
)
def test_doctor_pairs_wheel_and_torch(
    wheel: str,
    torch_version: str,
    cuda: str | None,
    fits: bool,
    cure: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: wheel)
    monkeypatch.setattr(doctor.torch, "__version__", torch_version)
    monkeypatch.setattr(doctor.torch.version, "cuda", cuda)
    report = doctor._deep_gemm()
    assert report["fits_torch"] is fits
    assert report["problem"] is None if cure is None else cure in report["problem"]


def test_decode_without_transformers_names_the_extra() -> None:
    done = megamoe("decode", without="transformers")
    assert done.returncode == 1
    assert "pip install 'megamoe-compile[hf]'" in done.stderr
    assert "Traceback" not in done.stderr


# -- plan -----------------------------------------------------------------------------------------

# What the size query of two wheels answers, in bytes: (hidden, intermediate, experts, top-k, ranks,
# capacity). Some capacities are no multiple of 384: the query takes them as
# they are, a context asks with the next multiple.
QUERIED = [
    ("0.1", (4096, 2048, 256, 6, 8, 128), 133_938_464),
    ("0.1", (4096, 2048, 256, 6, 8, 384), 275_762_464),
    ("0.1", (4096, 2048, 256, 6, 8, 1280), 772_146_464),
    ("0.1", (4096, 2048, 256, 6, 8, 4096), 2_332_210_464),
    ("0.1", (4096, 2048, 256, 6, 8, 8192), 4_601_394_464),
    ("0.1", (4096, 2048, 256, 6, 1, 384), 548_733_344),
    ("0.1", (4096, 2048, 264, 7, 8, 384), 314_461_168),
    ("0.1", (2048, 768, 128, 8, 1, 384), 141_516_320),
    ("0.1", (2048, 768, 128, 8, 1, 64), 117_726_816),
    ("0.1", (7168, 3072, 384, 6, 32, 1152), 3_944_282_624),
    ("0.2", (4096, 2048, 256, 6, 8, 128), 165_449_504),
    ("0.2", (4096, 2048, 256, 6, 8, 1920), 1_142_461_984),
    ("0.2", (7168, 3072, 384, 6, 32, 1920), 6_573_800_192),
]


@pytest.mark.parametrize(("generation", "shape", "expected"), QUERIED)
def test_buffer_formula_is_that_of_the_wheel(
    generation: str, shape: tuple[int, ...], expected: int
) -> None:
    hidden, intermediate, experts, top_k, ranks, capacity = shape
    assert expected == plan._buffer_bytes(
        hidden=hidden,
        intermediate=intermediate,
        experts_per_rank=experts // ranks,
        top_k=top_k,
        ranks=ranks,
        capacity=capacity,
        block_m=plan.GENERATIONS[generation].block_m,
    )


def config(**changes: Any) -> mm.MegaMoEConfig:
    shape = dict(hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=6)
    return mm.MegaMoEConfig(**{**shape, "max_tokens_per_rank": 128, **changes})


def test_capacity_is_rounded_up_to_the_tiles() -> None:
    assert symmetric_buffer_bytes(config(), 8) == 275_762_464
    assert symmetric_buffer_bytes(config(max_tokens_per_rank=384), 8) == 275_762_464
    assert symmetric_buffer_bytes(config(max_tokens_per_rank=385), 8) > 275_762_464
    assert symmetric_buffer_bytes(config(), 8, generation="0.2") == 1_142_461_984


def test_shared_expert_is_a_local_expert_and_a_slot() -> None:
    assert symmetric_buffer_bytes(config(num_shared_experts=1), 8) == 314_461_168


def test_s09_capacity_is_of_one_rank() -> None:
    """32 ranks, 1024 tokens, top-6, H 7168, I 3072: linear, and 32 times too big if global."""
    shape = dict(hidden_size=7168, intermediate_size=3072, num_experts=384)

    def of(tokens: int) -> int:
        return symmetric_buffer_bytes(config(**shape, max_tokens_per_rank=tokens), 32)

    assert of(1024) == 3_944_282_624
    steps = [of(384 * (n + 1)) - of(384 * n) for n in range(1, 9)]
    assert len(set(steps)) == 1 and steps[0] > 0
    assert 27 < of(32 * 1024) / of(1024) < 32
    assert "ONE rank" in str(mm.MegaMoEConfig.__doc__)
    assert "ONE rank" in str(symmetric_buffer_bytes.__doc__)


def test_plan_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    report = parsed(capsys, *FLASH, "--layers", "43")
    per_expert = 3 * 4096 * 2048 * (1 + 4 / 128**2)
    assert report["weight_bytes_per_layer"] == 32 * per_expert
    assert report["weight_bytes"] == 43 * report["weight_bytes_per_layer"]
    assert report["buffer_bytes"] == 275_762_464 and report["capacity"] == 384
    assert report["total_bytes"] == report["weight_bytes"] + report["buffer_bytes"]
    assert report["dtypes"]["weight"] == {"dtype": "float8_e4m3fn", "bytes": 1}
    assert "0.1.x" in report["generation"]
    newer = parsed(capsys, *FLASH, "--generation", "0.2")
    assert "0.2.0" in newer["generation"] and newer["buffer_bytes"] == 1_142_461_984


def test_plan_agrees_with_the_weights_of_a_layer() -> None:
    """Where no padding is needed, the plan's bytes are those of the tensors."""
    shape = mm.MegaMoEConfig(
        hidden_size=256, intermediate_size=256, num_experts=4, top_k=2, max_tokens_per_rank=8
    )
    planned = plan.MemoryPlan("test", shape, ranks=1, layers=None).weight_bytes_per_layer
    with mm.MegaMoEContext(shape, device="cpu") as context:
        layer = mm.MegaMoE(context)
        w13 = torch.zeros(4, 512, 256, dtype=torch.bfloat16)
        layer.load_weights(w13, None, w13[:, :256].contiguous(), None)
        tensors = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
        assert planned == sum(tensor.nbytes for tensor in tensors)


def test_plan_pads_the_intermediate_for_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    odd = plan.MemoryPlan("test", config(intermediate_size=1408), ranks=8, layers=None)
    even = plan.MemoryPlan("test", config(intermediate_size=1536), ranks=8, layers=None)
    assert odd.weight_bytes_per_layer == even.weight_bytes_per_layer
    assert odd.buffer_bytes == even.buffer_bytes
    assert "1408 (padded to 1536)" in odd.to_text()


def test_plan_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLASH, "--layers", "43"]) == 0
    text = capsys.readouterr().out
    for part in ("806 MB", "34.6 GB for 43 layers", "276 MB", "0.1.x", "per rank, not of all"):
        assert part in text
    assert cli.main(FLASH) == 0
    assert "unknown: pass --layers" in capsys.readouterr().out


def test_plan_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    (tmp_path / "config.json").write_text(json.dumps(fields))
    report = parsed(capsys, "plan", "--model", str(tmp_path), "--ranks", "1", "--max-tokens", "384")
    assert (report["layers"], report["buffer_bytes"]) == (48, 141_516_320)
    argv = ("plan", "--model", str(tmp_path), "--ranks", "1", "--max-tokens", "384", "--layers")
    assert parsed(capsys, *argv, "12")["layers"] == 12


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1}, 58),
        ({"num_hidden_layers": 10, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 4),
        ({"num_hidden_layers": 6, "moe_layer_freq": [0, 1, 1, 1, 1, 1]}, 5),
        ({"text_config": {"num_hidden_layers": 4}}, 4),
        ({}, None),
    ],
)
def test_moe_layers(fields: dict[str, Any], expected: int | None) -> None:
    assert moe_layers(fields) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (275_762_464, "276 MB"), (999_600_000, "1 GB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert plan.human_bytes(count) == text
