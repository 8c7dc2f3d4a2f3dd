"""Measured paths on disk: a second start reads them, and nothing else does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_one_sentence, make_layer
from path_fakes import Machine, make_context, paths_of, stored_file

from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.paths.choice import Decision


def test_a_second_start_does_not_measure(machine: Machine, tmp_path: Path) -> None:
    with make_context() as first:
        machine.kept.append(make_layer(first))
        first.warmup([1, 8])
        chosen = paths_of(first, *range(10))
    machine.times = {}  # a timing would fail
    with make_context() as second:
        second.warmup([1, 8])  # also without weights
        assert paths_of(second, *range(10)) == chosen
        assert second.decision_for(8) == Decision(
            8, "deep_gemm", "stored", {"deep_gemm": 150.0, "small_batch": 160.5}
        )
    assert machine.timed == [1, 8]
    content = json.loads(stored_file(tmp_path).read_text())
    assert content["facts"]["gpu"] == "NVIDIA H200" and content["facts"]["hidden_size"] == 128
    assert content["microseconds"]["1"] == {"deep_gemm": 60.0, "small_batch": 40.0}


def test_new_buckets_are_added_to_the_stored_ones(machine: Machine, tmp_path: Path) -> None:
    for buckets in ([4], [1, 4], [1, 4, 8]):
        with make_context() as context:
            machine.kept.append(make_layer(context))
            context.warmup(buckets)
    assert machine.timed == [4, 1, 8]
    assert list(json.loads(stored_file(tmp_path).read_text())["microseconds"]) == ["1", "4", "8"]


def _another_wheel(machine: Machine) -> dict[str, Any]:
    machine.wheel = "0.2.0"
    return {}


def _another_gpu(machine: Machine) -> dict[str, Any]:
    machine.gpu.name = "NVIDIA H20"
    return {}


@pytest.mark.parametrize(
    "change",
    [
        _another_wheel,
        _another_gpu,
        lambda machine: {"num_experts": 8},
        lambda machine: {"top_k": 1},
        lambda machine: {"hidden_size": 256},
        lambda machine: {"intermediate_size": 512},
        lambda machine: {"num_shared_experts": 1},
    ],
)
def test_what_changes_the_times_is_measured_anew(
    machine: Machine, change: Callable[[Machine], dict[str, Any]]
) -> None:
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    with make_context(**change(machine)) as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    assert machine.timed == [1, 1]


@pytest.mark.parametrize("part", ["torch", "version", "layout", "sources"])
def test_another_release_is_measured_anew(
    machine: Machine, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    where: dict[str, Any] = {
        "torch": (torch, "__version__"),
        "version": ("megamoe_compile.backends.paths.__version__",),
        "layout": ("megamoe_compile.backends.paths.LAYOUT_VERSION",),
        "sources": ("megamoe_compile.backends.paths.sources_digest",),
    }
    monkeypatch.setattr(*where[part], (lambda launcher: "other") if part == "sources" else "9.9.9")
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    assert machine.timed == [1, 1]


def test_the_hash_is_of_kernels_headers_and_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csrc, launcher = tmp_path / "csrc", tmp_path / "launcher.py"
    files = (csrc / "one" / "a.cu", csrc / "two" / "b.cuh", launcher)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one")
    monkeypatch.setattr(cuda_build, "CSRC", csrc)
    seen = {cuda_build.sources_digest(launcher)}
    for file in files:
        file.write_text("two")
        seen.add(cuda_build.sources_digest(launcher))
    files[0].rename(csrc / "one" / "c.cu")
    assert len(seen | {cuda_build.sources_digest(launcher)}) == 5
    assert len(seen) == 4


def _with_times(content: dict[str, Any], entries: Any) -> bytes:
    return json.dumps({**content, "microseconds": entries}).encode()


BAD: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: json.dumps(content).encode()[:-20],
    "no text": lambda content: b"\xff\xfe\x00",
    "a list": lambda content: b"[]",
    "another object": lambda content: b'{"relative_error": 0.01}',
    "of another machine": lambda content: json.dumps(
        {**content, "facts": {**content["facts"], "gpu": "NVIDIA H20"}}
    ).encode(),
    "times are a list": lambda content: _with_times(content, [1, 2]),
    "no bucket": lambda content: _with_times(content, {"one": content["microseconds"]["1"]}),
    "one path": lambda content: _with_times(content, {"1": {"deep_gemm": 1.0}}),
    "a text": lambda content: _with_times(content, {"1": {"deep_gemm": "1", "small_batch": 2}}),
    "a truth": lambda content: _with_times(content, {"1": {"deep_gemm": True, "small_batch": 2}}),
    "zero": lambda content: _with_times(content, {"1": {"deep_gemm": 0, "small_batch": 2.0}}),
    "NaN": lambda content: _with_times(
        content, {"1": {"deep_gemm": float("nan"), "small_batch": 2.0}}
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_not_ours_is_ignored_with_a_warning(
    machine: Machine, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    file = stored_file(tmp_path)
    good = file.read_bytes()
    file.write_bytes(BAD[kind](json.loads(good)))
    with caplog.at_level(logging.WARNING), make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
        assert paths_of(context, 1) == "s"
    assert machine.timed == [1, 1]
    assert str(file) in caplog.text and "measured again" in caplog.text
    assert file.read_bytes() == good, "written anew"


def test_a_disk_that_cannot_be_written_costs_a_warning(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "megamoe_compile").mkdir()
    (tmp_path / "megamoe_compile" / "paths").write_text("in the way")
    with caplog.at_level(logging.WARNING), make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
        assert paths_of(context, 1) == "s"
    messages = [record.getMessage() for record in caplog.records]
    assert_one_sentence(messages[-1], "store of measured paths", "XDG_CACHE_HOME")


def test_a_write_that_fails_leaves_the_old_file(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1])
    file = stored_file(tmp_path)
    good = file.read_bytes()

    def full(path: Path, text: str, *args: Any) -> int:
        with path.open("w") as half:
            half.write(text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with make_context() as context:
        machine.kept.append(make_layer(context))
        context.warmup([1, 4])
    assert stored_file(tmp_path) == file and file.read_bytes() == good
