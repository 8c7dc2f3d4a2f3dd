"""`megamoe bench` on a CPU: its steps, columns, reports, and the parity check."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative_error
from torch._dynamo.utils import counters

pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")

from bench_helpers import CPU, options
from checkpoint_helpers import small_config, write_checkpoint
from cuda_fakes import fake_cuda

from megamoe_compile.commands import cli
from megamoe_compile.commands.bench import (
    columns as bench_columns,
)
from megamoe_compile.commands.bench import (
    models as bench_models,
)
from megamoe_compile.commands.bench import (
    passes as bench_passes,
)
from megamoe_compile.commands.bench import (
    report as bench_report,
)
from megamoe_compile.commands.bench.columns import KINDS, Options
from megamoe_compile.commands.bench.measure import (
    HostTime,
    KernelShare,
    StepTime,
    host_time,
    share_of,
    step_bytes,
)
from megamoe_compile.commands.bench.models import (
    CheckpointSource,
    RandomSource,
    fitting_layers,
    make_source,
    model_without_experts,
    noting_ids,
    set_bf16_experts,
    set_fp8_experts,
)
from megamoe_compile.commands.bench.passes import profile_columns, run_columns
from megamoe_compile.commands.bench.results import Cell, ColumnResult
from megamoe_compile.commands.bench.step import (
    ATTENTION,
    BenchStep,
    decode_attention,
    register_attention,
)
from megamoe_compile.commands.environment import environment
from megamoe_compile.custom_ops.reference.recipe import (
    interleave_gate_up,
    moe_reference,
    quantize_blocks,
)
from megamoe_compile.engines.transformers.experts import find_experts
from megamoe_compile.engines.transformers.model import prepare


def bf16_step(source: Any, max_batch: int, length: int) -> BenchStep:
    register_attention()
    model: Any = model_without_experts(source, CPU, ATTENTION)
    set_bf16_experts(model, source, CPU)
    model.set_experts_implementation("eager")
    return BenchStep(model, max_batch, length)


# -- the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "length"), [(1, 8, 2, 512), (3, 4, 4, 48)])
def test_attention_matches_sdpa(batch: int, heads: int, kv_heads: int, length: int) -> None:
    query = torch.randn(batch, heads, 1, 64).bfloat16()
    key, value = torch.randn(2, batch, kv_heads, length, 64).bfloat16()
    value = value[..., :32]  # as in MLA, narrower than the keys
    mask = torch.where(torch.arange(length) <= length // 3, 0.0, -math.inf)[None, None, None]
    key[:, :, length // 3 + 1 :] = 1e4  # what the mask hides has no influence
    got, _ = decode_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.1)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.float(),
        key.float()[:, :, : length // 3 + 1],
        value.float()[:, :, : length // 3 + 1],
        scale=0.1,
        enable_gqa=True,
    )
    assert got.shape == (batch, 1, heads, 32)
    assert relative_error(got, want.transpose(1, 2)) < 0.01


def test_the_step_is_the_model() -> None:
    """Token by token over the static cache, against one call of the model on all tokens."""
    source = RandomSource("tiny", None)
    step = bf16_step(source, 3, 8)
    model: Any = model_without_experts(source, CPU, "sdpa")
    set_bf16_experts(model, source, CPU)
    model.set_experts_implementation("eager")
    ids = torch.randint(512, (3, 5))
    with torch.no_grad():
        want = model(ids).logits
        for position in range(5):
            logits, tokens = step(ids[:, position], torch.tensor([position]))
            assert relative_error(logits, want[:, position]) < 0.02
            assert torch.equal(tokens, logits.argmax(-1))


def test_a_smaller_batch_takes_the_first_rows_of_the_cache() -> None:
    step = bf16_step(RandomSource("tiny", 1), 3, 8)
    with torch.no_grad():
        step(torch.tensor([1, 2, 3]), torch.tensor([4]))
        keys = step.stores[0].keys
        assert isinstance(keys, torch.Tensor)
        before = keys.clone()
        step(torch.tensor([7]), torch.tensor([5]))
    changed = (keys != before).any(-1).any(1)  # [rows, positions]
    assert changed.nonzero().tolist() == [[0, 5]]


def test_layers_share_one_compiled_code() -> None:
    step = bf16_step(RandomSource("tiny", None), 1, 8)
    step.model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    ids, position = torch.tensor([1]), torch.tensor([4])
    with torch.no_grad():
        want = step(ids, position)[0]
        step.compile(backend="aot_eager")
        counters.clear()
        got = step(ids, position)[0]
    assert counters["stats"]["unique_graphs"] == 3  # before the layers, a layer, after them
    assert relative_error(got, want) < 0.02


# -- models ----------------------------------------------------------------------------------------


def test_fp8_and_bf16_columns_have_the_same_weights() -> None:
    source = RandomSource("tiny", 1)
    models: list[Any] = [model_without_experts(source, CPU, "sdpa") for _ in range(2)]
    set_bf16_experts(models[0], source, CPU)
    set_fp8_experts(models[1], source, CPU)
    dense, fp8 = (model.model.layers[0].mlp.experts for model in models)
    for name in ("gate_up_proj", "down_proj"):
        scale = getattr(fp8, f"{name}_scale_inv")
        full = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        want = (getattr(fp8, name).float() * full).bfloat16()
        assert torch.equal(getattr(dense, name), want)
        assert 0.8 < want.float().std() * want.shape[-1] ** 0.5 < 1.2
    own = [dict(model.named_parameters()) for model in models]
    for name in own[0].keys() & own[1].keys():
        if ".experts." not in name:
            assert torch.equal(own[0][name], own[1][name])


def test_a_checkpoint_is_a_source(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path, small_config(hidden_size=512, moe_intermediate_size=256))
    source = make_source(str(tmp_path), 1)
    assert isinstance(source, CheckpointSource)
    model: Any = model_without_experts(source, CPU, "sdpa")
    set_bf16_experts(model, source, CPU)
    experts = model.model.layers[0].mlp.experts
    at = "model.layers.0.mlp.experts.5."
    assert torch.equal(experts.down_proj[5], plain[f"{at}down_proj.weight"])
    gate_up = torch.cat([plain[f"{at}{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(experts.gate_up_proj[5], gate_up)


@pytest.mark.parametrize("preset", ["deepseek-v3", "glm-4-moe", "qwen3-30b-a3b"])
def test_fitting_layers(preset: str) -> None:
    whole = RandomSource(preset, None).config.num_hidden_layers
    assert fitting_layers(preset, 10**14) == whole
    assert fitting_layers(preset, 1) == 1
    one_gpu = fitting_layers(preset, 140 * 10**9)
    assert one_gpu == {"deepseek-v3": 7, "glm-4-moe": 23, "qwen3-30b-a3b": 48}[preset]


def test_counted_experts_are_those_of_the_router() -> None:
    step = bf16_step(RandomSource("tiny", None), 4, 8)
    with torch.no_grad(), noting_ids(step.model) as taken:
        step(torch.tensor([3]), torch.tensor([1]))
        assert [ids.unique().numel() for ids in taken] == [4, 4]  # top-4 of each layer
        step(torch.tensor([3, 3, 3, 3]), torch.tensor([1]))
    assert [tuple(ids.shape) for ids in taken] == [(1, 4)] * 2 + [(4, 4)] * 2
    assert all(4 <= ids.unique().numel() <= 16 for ids in taken[2:])


def test_no_hook_stays_on_the_experts() -> None:
    step = bf16_step(RandomSource("tiny", None), 4, 8)
    experts = find_experts(step.model).values()
    with pytest.raises(RuntimeError, match="far enough"), noting_ids(step.model):
        assert all(module._forward_pre_hooks for module in experts)
        raise RuntimeError("far enough")
    assert len(experts) == 2 and not any(module._forward_pre_hooks for module in experts)


def test_step_bytes() -> None:
    source = RandomSource("tiny", None)
    step = bf16_step(source, 4, 8)
    with torch.no_grad():
        step(torch.tensor([3]), torch.tensor([1]))
    model: Any = step.model
    parameters = sum(
        p.nbytes
        for name, p in model.named_parameters()
        if ".experts." not in name and "embed_tokens" not in name
    )
    cache = 2 * 2 * 3 * 2 * 8 * 64 * 2  # layers, keys and values, rows, heads, length, D, bytes
    assert step_bytes(step, 3, 10, 7) == parameters + cache + 70


# -- measures --------------------------------------------------------------------------------------


def test_share_of_kernels() -> None:
    layer = [("a_rsqrt", 1.0), ("mm", 2.0), ("b_rsqrt", 1.0), ("gatherTopK", 1.0)]
    layer += [("bitonicSortKVInPlace", 1.0), ("c_rsqrt_renorm", 0.5), ("mega", 3.0), ("add", 0.5)]
    replay = [("embed", 1.0), *layer, *layer, ("end_rsqrt", 5.0), ("lm_head", 7.0)]
    share = share_of(replay * 3, 3)
    assert share.kernel_ms == pytest.approx(33.0)
    assert share.kernels == 19
    assert share.moe_block == pytest.approx(8 / 33)  # 4 in each of two layers
    assert share.rows[0] == ("lm_head", pytest.approx(7.0), 1)
    assert {name: count for name, _, count in share.rows}["mega"] == 2
    assert share_of([("a", 1.0), ("b", 1.0)], 1).moe_block is None
    assert share_of([], 3).moe_block is None


def test_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is waited for before each call, outside of its time."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.01))
    seen: list[int] = []

    def step(tokens: torch.Tensor) -> None:
        seen.append(int(tokens[0]))
        time.sleep(0.004 if len(seen) == 2 else 0.0)

    rows = torch.arange(6).view(3, 2)
    got = host_time([functools.partial(step, row) for row in rows], 5)
    assert seen == [0, 2, 4, 0, 2]
    assert 0 < got.least <= got.median < 4e3


# -- columns and reports ---------------------------------------------------------------------------


def test_the_command_runs_all_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chain needs a GPU: it fails, is reported, and the columns after it run."""
    out = tmp_path / "results" / "tiny"
    arguments = "bench --model tiny --layers 1 --batch 2 --buckets 2 --context 32 --steps 3"
    code = cli.main([*arguments.split(), "--device", "cpu", "--json", "--out", str(out)])
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert code == 1
    columns = {column["name"]: column for column in data["columns"]}
    assert tuple(columns) == tuple(KINDS)
    assert "expected cuda, got cpu" in columns["chain"]["error"]
    for name in ("hf-eager", "hf", "megamoe"):
        (cell,) = columns[name]["cells"]
        assert columns[name]["error"] is None
        assert cell["batch"] == 2
        assert cell["time"]["steps"] >= 3
        assert cell["tokens_per_s"] == pytest.approx(2e3 / cell["time"]["median"])
        assert 4 <= cell["touched_experts"] <= 8
    assert columns["hf"]["cells"][0]["implementation"] in bench_columns.HF_IMPLEMENTATIONS
    # FP8 experts are half the bytes: all else that a step reads is the same.
    read = {name: columns[name]["cells"][0]["gigabytes"] for name in ("hf", "megamoe")}
    touched = columns["hf"]["cells"][0]["touched_experts"]
    assert read["hf"] - read["megamoe"] == pytest.approx(touched * 3 * 512 * 256 / 1e9, rel=0.2)
    assert data["speedup_over_best_hf"].keys() == {"2"}
    assert data["speedup_over_chain"] == {}
    text = out.with_suffix(".md").read_text()
    assert "- chain failed: BackendUnavailable" in text
    assert text.count("\n| 2 | ") == 3
    assert json.loads(out.with_suffix(".json").read_text())["columns"] == data["columns"]
    for word in ("column hf", "built in", "compiled in"):
        assert word in printed.err
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").stat().st_size > 1000


def test_a_fault_keeps_what_came_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = bench_passes.time_steps
    calls = []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory\nand more")
        return measured(*args)

    monkeypatch.setattr(bench_passes, "time_steps", fails_once)
    said: list[str] = []
    run = options(batches=(1, 2))
    results = list(run_columns(["hf-eager", "hf-eager"], run, said.append))
    assert [len(result.cells) for result in results] == [1, 2]
    assert results[0].error == "RuntimeError: out of memory"
    assert "  failed: RuntimeError: out of memory" in said
    bench_report.write(tmp_path / "half", {"model": "tiny"}, results)
    assert "- hf-eager failed: RuntimeError" in (tmp_path / "half.md").read_text()


def test_one_batch_and_one_step_are_enough(tmp_path: Path) -> None:
    """No buckets below 1; a spread needs more than one step; .5 is no suffix."""
    arguments = "bench --model tiny --layers 1 --batch 1 --columns hf-eager hf-eager --context 16"
    out = tmp_path / "new" / "glm-4.5"
    assert cli.main([*arguments.split(), "--steps", "1", "--device", "cpu", "--out", str(out)]) == 0
    (column,) = json.loads((tmp_path / "new" / "glm-4.5.json").read_text())["columns"]
    assert column["cells"][0]["time"]["steps"] == 3
    text = (tmp_path / "new" / "glm-4.5.md").read_text()
    assert bench_report.LEGEND in text
    assert "| - | - | - |" in text


def test_every_cell_is_kept_at_once() -> None:
    kept: list[int] = []
    run = options(batches=(1, 2), keep=lambda result: kept.append(len(result.cells)))
    list(run_columns(["hf-eager"], run, lambda text: None))
    assert kept == [1, 2]


def test_a_device_that_stays_broken_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(bench_passes, "free_memory", broken)
    results = list(run_columns(["hf-eager", "hf-eager"], options(), lambda text: None))
    assert [len(result.cells) for result in results] == [1, 1]
    assert results[0].error == "RuntimeError: illegal memory access"


def test_hf_takes_the_best_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm loses at one token, fails at two, and is still tried and taken from eight on."""
    times = {
        "grouped_mm": {1: 9.0, 8: 2.0, 32: 3.0},
        "batched_mm": {1: 1.0, 2: 1.0, 8: 2.4, 32: 9.0, 64: 18.0},
    }
    times["grouped_mm"][64] = 4.0
    tried: list[tuple[int, str]] = []

    def stand_in(column: Any, run: Options, batch: int, name: str, touched: float) -> Cell:
        tried.append((batch, name))
        if batch not in times[name]:
            raise RuntimeError("out of memory")
        measured = StepTime(times[name][batch], 0.1, 3)
        return Cell(batch, name, measured, 1.0, 1.0, 1.0, 1.0, None, None)

    monkeypatch.setattr(bench_passes, "_timed", stand_in)
    run = options(batches=(1, 2, 8, 32, 64), buckets=(64,))
    (result,) = run_columns(["hf"], run, lambda text: None)
    assert result.error is None
    assert [cell.implementation for cell in result.cells] == [
        "batched_mm",
        "batched_mm",
        "grouped_mm",
        "grouped_mm",
        "grouped_mm",
    ]
    assert (32, "batched_mm") in tried and (64, "batched_mm") not in tried
    assert "batched_mm not tried above batch 32" in result.notes
    assert result.cells[1].notes[0] == "grouped_mm: RuntimeError: out of memory"


@pytest.mark.usefixtures("quick_compile")
def test_profiles_come_after_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was profiled launches slower: 4.46 ms instead of 4.18 for one model."""
    order: list[str] = []
    timed, built = bench_passes.time_steps, bench_columns.Column.__init__
    stores: list[Any] = []

    def time_steps(*args: Any) -> Any:
        order.append("time")
        return timed(*args)

    def kernel_share(step: Any, tokens: torch.Tensor) -> KernelShare:
        step(tokens[0])
        order.append(f"profile {tokens.shape[1]}")
        return KernelShare(0.5, 1.0, 2, [])

    def note(column: Any, *args: Any) -> None:
        built(column, *args)
        stores.append(column.step.stores[0].keys.shape[0])

    monkeypatch.setattr(bench_passes, "time_steps", time_steps)
    monkeypatch.setattr(bench_passes, "kernel_share", kernel_share)
    monkeypatch.setattr(bench_columns.Column, "__init__", note)
    kept: list[str] = []
    run = options(
        source=RandomSource("tiny", 1),
        batches=(1, 2),
        buckets=(1, 2),
        keep=lambda result: kept.append(result.name),
    )
    results = list(run_columns(["hf-eager", "hf", "megamoe"], run, lambda text: None))
    notes = [list(result.notes) for result in results]
    # One of each, whichever was faster here.
    best = list(bench_columns.HF_IMPLEMENTATIONS)
    for cell, name in zip(results[1].cells, best, strict=True):
        cell.implementation = name
    captured = bench_columns.CapturedColumn.ready
    made: list[str] = []

    def spy(column: Any, batch: int, name: str) -> Any:
        made.append(name)
        return captured(column, batch, name)

    monkeypatch.setattr(bench_columns.CapturedColumn, "ready", spy)
    assert set(order) == {"time"}
    kept.clear()
    order.clear()
    assert list(profile_columns(results, run, lambda text: None)) == results[1:]
    assert order == ["profile 1", "profile 2"] * 2
    assert kept == ["hf", "hf", "megamoe", "megamoe"]
    assert [result.error for result in results] == [None] * 3
    assert [result.notes for result in results] == notes, "a second build says nothing new"
    for result in results[1:]:
        assert [cell.share.moe_block for cell in result.cells if cell.share] == [0.5, 0.5]
        assert [cell.notes for cell in result.cells if "profiled with" in str(cell.notes)] == []
    assert made == [cell.implementation for cell in results[1].cells] == best
    assert not any(cell.share for cell in results[0].cells)
    assert stores == [2] * 5


class OnFakeCuda(Options):
    """A run on a GPU whose tensors are on the CPU."""

    def tokens(self, batch: int) -> torch.Tensor:
        return Options.tokens(dataclasses.replace(self, device=CPU), batch)


@pytest.mark.usefixtures("quick_compile")
def test_a_column_asks_for_the_kernels_of_its_fills_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def instantiator(device: torch.device) -> Any:
        made.append(device)
        return lambda graph: log.append("fills replaced")

    monkeypatch.setattr(bench_columns, "instantiator", instantiator)
    run = options(source=RandomSource("tiny", 1))
    with bench_columns.built_column("hf", run, str, ColumnResult("hf")) as column:
        log = fake_cuda(monkeypatch)
        for name in ("synchronize", "reset_peak"):
            monkeypatch.setattr(bench_columns, name, lambda device: None)
        fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        column.options = OnFakeCuda(**{**fields, "device": torch.device("cuda")})
        for batch in (1, 2):
            ready = column.ready(batch, "grouped_mm")
            tokens = torch.full((batch,), 7)
            ready.call(tokens)
            assert torch.equal(ready.memory[0], tokens) and ready.capture_s is not None
    assert made == [CPU]
    assert log.count("fills replaced") == log.count("replay") == log.count("captured") == 2


@pytest.mark.usefixtures("quick_compile")
def test_a_fault_of_a_profile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Any, tokens: torch.Tensor) -> KernelShare:
        raise RuntimeError("no counters")

    monkeypatch.setattr(bench_passes, "kernel_share", broken)
    results = list(run_columns(["megamoe"], options(), lambda text: None))
    list(profile_columns(results, options(), lambda text: None))
    assert results[0].error == "its profile: RuntimeError: no counters"
    assert len(results[0].cells) == 1


@pytest.mark.usefixtures("quick_compile")
def test_a_profile_of_another_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up picks a path by time, and two paths may tie."""
    monkeypatch.setattr(bench_passes, "kernel_share", lambda *args: KernelShare(0.5, 1.0, 2, []))
    results = list(run_columns(["megamoe"], options(), lambda text: None))
    results[0].cells[0].implementation = "small_batch"
    list(profile_columns(results, options(), lambda text: None))
    assert results[0].cells[0].notes == ["profiled with reference"]


@pytest.mark.parametrize("fuse", [True, False])
def test_routers_are_fused_where_asked(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe_compile.engines.transformers.routers import FusedRouter

    built: list[Any] = []

    def stop(model: Any, *rest: Any) -> None:
        built.append(model)
        raise RuntimeError("far enough")

    monkeypatch.setattr(bench_columns, "BenchStep", stop)
    list(run_columns(["megamoe"], options(fuse_routers=fuse), lambda text: None))
    gates = [layer.mlp.gate for layer in built[0].model.layers]
    assert all(isinstance(gate, FusedRouter) is fuse for gate in gates)


def test_the_table_says_whose_routers_are_fused() -> None:
    note = bench_columns._router_note({"a": "fused", "b": "something wraps it"})
    assert note.startswith("1 of 2 routers are one kernel after their GEMM, in this column only")
    assert note.endswith("; the rest: something wraps it")
    assert bench_columns._router_note({}) == "routers as in all columns"


def test_facts_are_of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    places: list[Any] = []

    def run(command: Any, cwd: Path, **options: Any) -> Any:
        places.append(cwd)
        return subprocess.CompletedProcess(command, 0, "1.2\n1.2\n")  # as with two GPUs

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    facts = environment()
    assert facts["driver"] == facts["commit"] == "1.2"
    assert facts["transformers"] == transformers.__version__
    assert set(places) == {Path(environment.__code__.co_filename).parent}


def test_the_table_has_both_host_times_and_the_largest_kernels(tmp_path: Path) -> None:
    share = KernelShare(0.25, 20.0, 40, [(f"kernel {n}", 1.0, 2) for n in range(20)])
    cell = Cell(8, "chain", StepTime(2.0, 0.1, 9), 4e3, 1.0, 500.0, 3.0, 1.5, 0.5)
    cell.host, cell.share = HostTime(61.4, 48.6), share
    bench_report.write(tmp_path / "one", {"model": "tiny"}, [ColumnResult("chain", [cell])])
    text = (tmp_path / "one.md").read_text()
    assert "| 25% | 500 | 1.5 | 0.5 | 61 (49) | - |" in text
    assert "`kernel 15`" in text and "`kernel 16`" not in text
    (column,) = json.loads((tmp_path / "one.json").read_text())["columns"]
    assert column["cells"][0]["host"] == {"median": 61.4, "least": 48.6}
    assert len(column["cells"][0]["share"]["rows"]) == 20


def test_speedups_compare_equal_batches() -> None:
    def column(name: str, rates: dict[int, float]) -> ColumnResult:
        result = ColumnResult(name)
        for batch, rate in rates.items():
            cell: Any = type("Cell", (), {"batch": batch, "tokens_per_s": rate})()
            result.cells.append(cell)
        return result

    columns = [column("hf", {1: 10.0, 8: 5.0}), column("megamoe", {1: 15.0, 4: 3.0, 8: 4.0})]
    assert bench_report.speedups(columns, "hf") == {1: 1.5, 8: 0.8}
    assert bench_report.speedups(columns, "chain") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model nothing", "--model: expected qwen3-30b-a3b, "),
        ("--model tiny --layers 3", "--layers: expected 1 to 2, got 3"),
        ("--model tiny --batch 2 --buckets 4", "--buckets: expected at most 2"),
        ("--model tiny --batch 0", "at least 1, got 0"),
        ("--model tiny --batch x", "at least 1, got x"),
        ("--model tiny --columns other", "invalid choice: 'other'"),
        ("--model tiny --device nothing", "expected cpu, cuda or cuda:N, got nothing"),
        ("--model tiny --device cuda", "--device: expected cpu, got cuda"),
        ("--model deepseek-v3 --layers 3", "a layer with experts"),
        (f"--model {Path(__file__).parent}", "config of the model: expected a file"),
        (f"--model tiny --out {__file__}/results", "--out: "),
    ],
)
def test_bad_arguments(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        cli.main(["bench", *arguments.split()])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


# -- the unfused chain -----------------------------------------------------------------------------


def check_chain(tokens: int, top_k: int, limit: float | None) -> None:
    from megamoe_compile.custom_ops.unfused.chain import torch_grouped_gemm, unfused_moe

    torch.manual_seed(tokens)
    experts, hidden, intermediate = 6, 384, 256  # 3 groups: not a power of two
    w13 = torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, intermediate) / intermediate**0.5
    q13, s13 = map(torch.stack, zip(*map(quantize_blocks, w13), strict=True))
    q2, s2 = map(torch.stack, zip(*map(quantize_blocks, w2), strict=True))
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = torch.rand(tokens, experts).topk(top_k)
    prepared = torch.stack(list(map(interleave_gate_up, q13)))
    want = moe_reference(x, ids, weights, prepared, s13, q2, s2, swiglu_limit=limit)
    got = unfused_moe(x, ids, weights, q13, s13, q2, s2, limit, torch_grouped_gemm)
    assert relative_error(got, want) < 0.025, relative_error(got, want)


@pytest.mark.parametrize(("tokens", "top_k", "limit"), [(1, 3, None), (5, 3, 0.5), (257, 1, None)])
def test_chain_matches_reference(
    interpreter: ProcessPoolExecutor, tokens: int, top_k: int, limit: float | None
) -> None:
    """257 tokens: more than one tile of an expert's room."""
    interpreter.submit(check_chain, tokens, top_k, limit).result()


def test_chain_kernels_compile() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from megamoe_compile.custom_ops.unfused import kernels

    types = {"x": "bf16", "gate_up": "bf16", "y": "bf16", "weights": "bf16", "out": "bf16"}
    types |= {"ids": "i64", "count": "i32", "rows": "i32", "q": "u8", "scale": "fp32"}
    signature = {f"{name}_ptr": f"*{dtype}" for name, dtype in types.items()}
    signature |= {"capacity": "i32", "limit": "fp32"}
    for kernel, constants in (
        (kernels.permute_quantize_kernel, {"HIDDEN": 2048, "TOP_K": 8, "GROUPS": 16}),
        (kernels.swiglu_quantize_kernel, {"INTERMEDIATE": 768, "HAS_LIMIT": True, "GROUPS": 8}),
        (kernels.combine_kernel, {"HIDDEN": 2048, "TOP_K": 8, "BLOCK": 512}),
    ):
        source = triton.compiler.ASTSource(
            kernel, {name: signature.get(name, "constexpr") for name in kernel.arg_names}, constants
        )
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_presets_are_the_known_shapes() -> None:
    from megamoe_compile.models.hf_config import moe_shape
    from megamoe_compile.models.presets import PRESETS

    for name in bench_models.PRESETS.keys() & PRESETS.keys():
        shape = moe_shape(RandomSource(name, None).config)
        assert {key: shape[key] for key in PRESETS[name]} == dict(PRESETS[name])


def test_columns_prepare_the_same_model() -> None:
    """megamoe against the bf16 column on one step: what FP8 activations cost, no more."""
    source = RandomSource("tiny", None)
    step = bf16_step(source, 4, 16)
    model: Any = model_without_experts(source, CPU, ATTENTION)
    set_fp8_experts(model, source, CPU)
    with prepare(model, max_tokens_per_rank=4), torch.no_grad():
        ids, position = torch.randint(512, (4,)), torch.tensor([9])
        got = BenchStep(model, 4, 16)(ids, position)[0]
        assert relative_error(got, step(ids, position)[0]) < 0.06
