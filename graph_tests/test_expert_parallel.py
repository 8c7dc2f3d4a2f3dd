"""benchmarks/expert_parallel.py on CPU ranks: its check passes, and can fail; its table is made."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import make_config
from step_helpers import Ranks
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe_compile as mm
from benchmarks import expert_parallel, expert_parallel_check, timing
from benchmarks.expert_parallel_check import Case, Experts, Findings
from benchmarks.expert_parallel_paths import GatherChain
from benchmarks.expert_parallel_paths import Ranks as Place
from benchmarks.layer import Bench
from benchmarks.timing import Timing
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.models.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PATHS = {"eager", "compiled", "runner", "chain"}


def place() -> Place:
    group = dist.group.WORLD
    assert group is not None
    return Place.join(dist.get_rank(), group, cuda=False, timeout=60)


@pytest.mark.multirank
def test_command_checks_two_ranks() -> None:
    """As a user runs it without a GPU: it starts its ranks itself."""
    command = ["-m", "benchmarks.expert_parallel", "--spawn", "2", "--device", "cpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--timeout", "120"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks on cpu, against one process with all experts:"
    assert {line.split()[0] for line in lines[1:5]} == PATHS
    assert lines[-2:] == ["RIGHT", "no timing: it needs a GPU for each rank, and this ran on a CPU"]


def wrong_expert(rank: int, world_size: int) -> Findings:
    """One expert of rank 1 has other weights than the oracle's."""
    load = Experts._load

    def broken(experts: Experts, context: mm.MegaMoEContext) -> mm.MegaMoE:
        layer = load(experts, context)
        if context.rank == 1:
            layer.w2_scale[3] *= 1.5
        return layer

    Experts._load = broken  # type: ignore[method-assign]
    try:
        return expert_parallel_check.check(place())
    finally:
        Experts._load = load  # type: ignore[method-assign]


def unshifted_chain(rank: int, world_size: int) -> Findings:
    """Every rank takes the ids of rank 0's experts for its own."""
    made = GatherChain.__init__

    def broken(chain: GatherChain, *args: Any) -> None:
        made(chain, *args)
        dist.broadcast(chain.local_ids, 0)

    GatherChain.__init__ = broken  # type: ignore[method-assign]
    try:
        return expert_parallel_check.check(place())
    finally:
        GatherChain.__init__ = made  # type: ignore[method-assign]


@pytest.mark.multirank
def test_a_wrong_expert_is_found_by_every_path_and_rank(ranks: Ranks) -> None:
    replies = ranks(2).run(wrong_expert, timeout=90)
    assert replies[0] == replies[1]
    found = {tuple(text.split(", Case")[0].split(": ")) for text in replies[0].faults}
    assert found == {(rank, path) for rank in ("rank 0", "rank 1") for path in PATHS}


@pytest.mark.multirank
def test_a_wrong_chain_is_found(ranks: Ranks) -> None:
    replies = ranks(2).run(unshifted_chain, timeout=90)
    assert replies[0] == replies[1]
    assert {text.split(": ")[1].split(",")[0] for text in replies[0].faults} == {"chain"}


def test_what_is_no_result_is_a_fault() -> None:
    want = torch.ones(8, 4)
    for got in (torch.ones(7, 4), want * torch.nan, want * torch.inf, want * 1.03):
        findings = Findings()
        findings.compare("eager", Case(0, (8,), "random"), got, want)
        assert len(findings.faults) == 1
    few = Findings()
    few.compare("eager", Case(0, (7,), "random"), want[:7] * 1.025, want[:7])
    few.compare("eager", Case(0, (0,), "random"), want[:0], want[:0])
    assert not few.faults and few.errors["eager"] == pytest.approx(0.025)


def test_ranks_that_share_a_gpu_give_no_times_and_no_chain() -> None:
    group: Any = None
    sharing = Place(group, torch.device("cuda", 0), sharing_gpu=True, rows_group=None)
    assert "share a GPU" in (expert_parallel.no_timing(sharing) or "")
    alone = Place(group, torch.device("cuda", 0), sharing_gpu=False, rows_group=group)
    assert expert_parallel.no_timing(alone) is None
    findings, experts = Findings(), argparse.Namespace(ranks=sharing)
    expert_parallel_check._check_chain(experts, findings)  # type: ignore[arg-type]
    assert findings.left_out == {"chain": "NCCL refuses two ranks on one GPU"}


# -- the table, with stand-ins for what only a GPU can do ------------------------------------------


def stand_in_times(variants: Any, rounds: int, align: Any, slowest: Any) -> dict[str, Timing]:
    """Each variant's calls once; a time that says whose it is."""
    for calls in variants.values():
        for call in calls[:2]:
            call()
    samples = {name: [10.0 * number + dist.get_rank()] for number, name in enumerate(variants, 1)}
    return {name: Timing(times[0], 0.5) for name, times in slowest(samples).items()}


def no_triton(*_: Any) -> None:
    raise BackendUnavailable("not here")


def table(rank: int, world_size: int, out: str) -> None:
    """`benchmark` for a tiny model."""
    shape = dict(hidden_size=256, intermediate_size=256, num_experts=8, top_k=2)
    facts = argparse.Namespace(total_memory=1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", {**shape, "routed_scaling_factor": 1.5})  # type: ignore
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        patch.setattr(expert_parallel, "copy_bandwidth", lambda: 1e12)
        patch.setattr(timing, "environment", lambda commit: {"commit": commit})
        patch.setattr(expert_parallel, "raw_calls", lambda bench: (lambda *a: 0, lambda *a: 0))
        patch.setattr(expert_parallel, "time_variants", stand_in_times)
        patch.setattr(expert_parallel, "triton_context", no_triton)
        options = expert_parallel.parse(["--spawn", "2", "--device", "cpu", "--out", out])
        options.models, options.tokens, options.commit = ["tiny"], [1, 8], "abc"
        expert_parallel.benchmark(place(), options)


@pytest.mark.multirank
def test_table_takes_the_slowest_rank_and_names_what_is_left_out(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2).run(table, str(tmp_path / "ep2"), timeout=90)
    data = json.loads((tmp_path / "ep2.json").read_text())
    assert data["environment"]["commit"] == "abc" and data["environment"]["gpus"] == 2
    assert data["environment"]["NCCL_NVLS_ENABLE"] == os.environ.get("NCCL_NVLS_ENABLE")
    assert data["left_out"]["triton"] == "not available: not here"
    assert [row["tokens"] for row in data["rows"]] == [1, 8]
    for row in data["rows"]:
        assert (row["layer_us"], row["raw_us"], row["chain_us"]) == (11, 21, 31)
        assert row["triton_us"] is None and row["layer/raw"] == 11 / 21
        assert row["layer_error"] < 0.01 and row["chain_error"] < 0.02
        assert row["floor_us"] == pytest.approx(row["experts_touched"] * 3 * 256 * 256 / 1e6)
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "ep2.png").stat().st_size > 1000
    assert "| tiny | 2 | 8 | 11 | 21 | 31 | - |" in (tmp_path / "ep2.md").read_text()


def test_a_closed_bench_frees_its_weights() -> None:
    config = make_config(hidden_size=256, intermediate_size=256)
    bench = Bench.make(config, device="cpu", weight_sets=2)
    weights = [StorageWeakRef(layer.w13.untyped_storage()) for layer in bench.layers]
    bench.close()
    assert len(weights) == 2 and all(weight.expired() for weight in weights)


def test_bad_arguments_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--spawn", "1", "--check-only"], "expected at least 2 ranks"),
        (["--device", "cpu"], "expected at least 2 ranks"),
        (["--spawn", "2", "--models", "glm-5", "glm-6"], "got glm-6"),
        (["--spawn", "2", "--tokens", "0", "8"], "--tokens of at least 1"),
        (["--spawn", "2", "--rounds", "1"], "--rounds of at least 2"),
    ):
        with pytest.raises(SystemExit) as ended:
            expert_parallel.parse(arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        expert_parallel.parse(["--spawn", "2", "--device", "cuda"])
    assert "expected --out or --check-only" in capsys.readouterr().err
    assert expert_parallel.parse(["--spawn", "4", "--device", "cuda"]).ranks == 4  # sharing them
