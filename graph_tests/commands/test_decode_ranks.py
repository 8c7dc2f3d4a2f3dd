"""megamoe decode over ranks: the schedule, drafts, parity with one rank, and ranks that fail."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import RankPool, refuses
from torch import nn

import megamoe_compile as mm
from megamoe_compile.commands import cli
from megamoe_compile.commands.decode import command as decode
from megamoe_compile.commands.decode import ranks as decode_ranks
from megamoe_compile.commands.decode.batch import Batch, Request, batch_sizes, rank_sizes
from megamoe_compile.commands.decode.ranks import number_of_ranks, run_ranks
from megamoe_compile.commands.decode.report import DecodeReport
from megamoe_compile.commands.decode.slot_cache import DecodeStep

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = [1, 2, 4]  # requests
multirank = pytest.mark.multirank
Ranks = Callable[[int], RankPool]


def needs_transformers() -> None:
    pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")


# -- the schedule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_busiest_rank_has_the_sizes_of_one(ranks: int) -> None:
    rows = rank_sizes(64, BUCKETS, ranks, seed=3)
    assert [max(row) for row in rows] == batch_sizes(64, BUCKETS, seed=3)
    assert rows == rank_sizes(64, BUCKETS, ranks, seed=3)
    assert {len(row) for row in rows} == {ranks}
    assert any(max(row) == 0 for row in rows), "all idle"
    for rank in range(ranks if ranks > 1 else 0):
        mine = [row[rank] for row in rows]
        assert any(size == 0 < max(row) for size, row in zip(mine, rows, strict=True))
        assert any(size == max(row) > 0 for size, row in zip(mine, rows, strict=True))
        assert any(size not in (0, max(row)) for size, row in zip(mine, rows, strict=True))


def test_ranks_are_idle_for_some_steps_in_a_row() -> None:
    for seed in range(5):
        mine = [row[1] for row in rank_sizes(64, BUCKETS, 4, seed) if max(row)]
        assert any(not any(mine[at : at + 3]) for at in range(len(mine) - 2))


# -- drafts ----------------------------------------------------------------------------------------


def test_the_first_choice_that_differs_ends_what_is_kept() -> None:
    request = Request(0, [7])
    assert request.feed(4) == [7, 7, 7, 7], "nothing stood before: the same once more"
    assert request.accept([7, 7, 5, 9]) == 3, "7 7 as chosen; the fourth was to be 5"
    assert (request.position, request.known) == (3, [7, 7, 7, 5])
    assert request.feed(4) == [5, 5, 5, 5]
    assert request.accept([7, 5, 5, 5]) == 1, "what agrees after a difference doesn't count"
    assert request.feed(4) == [7, 5, 7, 5], "what followed when it stood before"


def test_a_prompt_is_kept_whatever_the_model_says() -> None:
    request = Request(0, [1, 2, 3])
    assert request.feed(2) == [1, 2]
    assert request.accept([9, 9]) == 2
    assert request.feed(2) == [3, 3]
    assert request.accept([8, 3]) == 1
    assert (request.position, request.known) == (3, [1, 2, 3, 8])


@pytest.mark.parametrize("width", [2, 4])
def test_drafts_change_no_token(width: int) -> None:
    """A model is a function of the tokens so far: any width gives the tokens of width 1."""

    def model(tokens: list[int]) -> int:
        return (3 * tokens[-1] + sum(tokens[-4:])) % 5

    kept = []
    for prompt in ([1], [2, 4], [3, 3, 1, 0]):
        known = list(prompt)
        while len(known) < 30:
            known.append(model(known))
        request = Request(0, list(prompt))
        while request.position < 20:
            fed, before = request.feed(width), request.known[: request.position]
            chosen = [model(before + fed[: at + 1]) for at in range(width)]
            kept.append(request.accept(chosen))
            assert request.known == known[: len(request.known)]
            assert len(request.known) > request.position
    assert min(kept) == 1 and max(kept) == width


def test_a_batch_of_several_tokens_per_request() -> None:
    batch = Batch(num_slots=4, max_length=6, vocab_size=50, seed=1, width=3)
    empty = batch.inputs(torch.device("cpu"))
    assert {name: list(t.shape) for name, t in empty.items()} == {
        "input_ids": [0, 3],
        "positions": [0, 3],
        "slots": [0],
    }
    last = 0
    for size in batch_sizes(60, BUCKETS, seed=1):
        batch.resize(size)
        positions = batch.inputs(torch.device("cpu"))["positions"]
        assert positions.shape == (size, 3)
        assert (positions.diff(dim=1) == 1).all()
        if size:
            last = max(last, int(positions.max()))
            assert int(positions[:, 0].max()) < 6
        before = [request.position for request in batch.requests]
        kept = batch.advance(torch.zeros(size * 3, dtype=torch.int64))
        assert kept == sum(r.position for r in batch.requests) - sum(before) >= size
    assert last < 6 + 3 - 1, "no position above max_length + width - 1"


# -- parity ----------------------------------------------------------------------------------------


def uncompiled(step: nn.Module, context: mm.MegaMoEContext, inputs: list[str]) -> Any:
    return step


def arguments(*changes: str) -> list[str]:
    small = ["--device", "cpu", "--buckets", "1,2,4", "--max-length", "12", "--steps", "24"]
    return ["decode", *small, *changes]


def parsed(*changes: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    return parser.parse_args(arguments(*changes)[1:])


def decode_rank(
    args: argparse.Namespace, local_rank: int, group: dist.ProcessGroup | None
) -> DecodeReport:
    with mock.patch.object(decode, "_compile", uncompiled):
        return decode.decode_rank(args, local_rank, group)


def report_of(rank: int, world_size: int, args: argparse.Namespace) -> DecodeReport:
    return decode_rank(args, rank, dist.group.WORLD)


@multirank
@pytest.mark.parametrize(("size", "width"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_ranks_give_what_one_rank_gives(size: int, width: int, ranks: Ranks) -> None:
    needs_transformers()
    steps = 16
    args = parsed("--width", str(width), "--steps", str(steps), "--seed", str(size))
    report, *others = ranks(size).run(report_of, args, timeout=120)
    assert all(other == report for other in others), "one report, on every rank"
    assert report.parity, report.verdict()
    assert report.max_relative_error <= 1e-6, "the same kernels and an exact sum"
    rows = rank_sizes(steps, BUCKETS, size, seed=size)
    assert any(0 in row and max(row) for row in rows), "a rank is idle while another isn't"
    assert report.idle_steps == sum(row.count(0) for row in rows)
    assert report.tokens == width * sum(map(sum, rows))
    assert report.kept_tokens == report.tokens if width == 1 else True
    assert report.tokens / width <= report.kept_tokens <= report.tokens
    assert (report.ranks, report.width, report.steps) == (size, width, steps)
    assert [bucket.bucket for bucket in report.buckets] == [width * n for n in BUCKETS]
    for number, low in zip(range(3), (-1, 1, 2), strict=True):
        mine = [row for row in rows if low < max(row) <= BUCKETS[number]]
        bucket = report.buckets[number]
        assert bucket.steps == len(mine)
        assert bucket.idle == sum(row.count(0) for row in mine)
        assert bucket.tokens == width * sum(map(sum, mine))
    assert f"{size} rank(s), width {width}: {report.idle_steps} of {size * steps} " in (
        report.table()
    )
    assert report.verdict().startswith(f"PARITY: captured on {size} ranks equals eager on one; ")


@pytest.mark.parametrize("width", [1, 3])
def test_one_rank_with_drafts(width: int) -> None:
    needs_transformers()
    report = decode_rank(parsed("--width", str(width)), 0, None)
    assert report.parity, report.verdict()
    assert (report.ranks, report.width) == (1, width)
    assert report.idle_steps == sum(bucket.idle for bucket in report.buckets) > 0
    assert ("rank(s)" in report.table()) == (width > 1)


def an_expert_lost(step: DecodeStep, call: Callable[..., Any], *inputs: Any) -> Any:
    expert = step.model.model.layers[0].mlp.experts.megamoe.w2[3]  # type: ignore
    saved = expert.clone()
    expert.zero_()  # in place: the runner sees to it that nothing moves
    result = call(*inputs)
    expert.copy_(saved)
    return result


def a_row_sees_one_position_more(step: DecodeStep, call: Callable[..., Any], *inputs: Any) -> Any:
    ids, positions, slots = inputs
    return call(ids, (positions + 1).clamp(max=step.cache.max_length - 1), slots)


def idle_ranks_route(step: DecodeStep, call: Callable[..., Any], *inputs: Any) -> Any:
    """Pad rows count, and write into the slots of requests."""
    before = step.num_valid.clone()
    step.num_valid.fill_(1000)
    result = call(*inputs)
    step.num_valid.copy_(before)
    return result


@contextlib.contextmanager
def broken_captured_step(fault: Callable[..., Any]) -> Iterator[None]:
    """The fault is in the first step that `decode` makes, the captured one."""
    made: list[DecodeStep] = []

    class Step(DecodeStep):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def forward(self, input_ids: Any, positions: Any, slots: Any) -> Any:
            if self is made[0]:
                return fault(self, super().forward, input_ids, positions, slots)
            return super().forward(input_ids, positions, slots)

    with mock.patch.object(decode, "DecodeStep", Step):
        yield


def report_with_fault_on_rank_1(
    rank: int, world_size: int, args: argparse.Namespace, fault: Callable[..., Any]
) -> DecodeReport:
    with broken_captured_step(fault) if rank == 1 else contextlib.nullcontext():
        return report_of(rank, world_size, args)


@multirank
@pytest.mark.parametrize("fault", [an_expert_lost, a_row_sees_one_position_more, idle_ranks_route])
def test_a_fault_on_one_rank_is_seen(fault: Callable[..., Any], ranks: Ranks) -> None:
    needs_transformers()
    reports = ranks(2).run(report_with_fault_on_rank_1, parsed("--width", "4"), fault, timeout=120)
    assert [report.parity for report in reports] == [False, False]
    assert reports[0].first_fault.startswith("step ")
    # An expert of rank 1 serves all ranks; the other faults hurt its own requests.
    assert fault is an_expert_lost or ", rank 1, row " in reports[0].first_fault


# -- the command -----------------------------------------------------------------------------------


def broken_decode_rank(
    args: argparse.Namespace, local_rank: int, group: dist.ProcessGroup | None
) -> DecodeReport:
    fault = an_expert_lost if local_rank == 1 else None
    with broken_captured_step(fault) if fault else contextlib.nullcontext():
        return decode_rank(args, local_rank, group)


def failing_decode_rank(
    args: argparse.Namespace, local_rank: int, group: dist.ProcessGroup | None
) -> DecodeReport:
    """Rank 1 fails in its third step, when the others wait for it."""
    steps: list[int] = []

    def advance(self: Batch, tokens: Any) -> int:
        steps.append(0)
        if local_rank == 1 and len(steps) == 3:
            raise ValueError("three is enough")
        return original(self, tokens)

    original = Batch.advance
    with mock.patch.object(Batch, "advance", advance):
        return decode_rank(args, local_rank, group)


def command(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *changes: str
) -> tuple[int, list[Any]]:
    """Exit code, and the processes that ran."""
    needs_transformers()
    started: list[Any] = []

    def collect(workers: list[Any], deadline: float) -> dict[int, Any]:
        started.extend(worker.process for worker in workers)
        return original(workers, deadline)

    original = decode_ranks._collect
    monkeypatch.setattr(decode_ranks, "_collect", collect)
    monkeypatch.setattr(decode, "decode_rank", function)
    code = cli.main(arguments("--ranks", "2", "--timeout", "120", *changes))
    assert len(started) == 2
    assert not any(process.is_alive() for process in started)
    return code, started


@multirank
def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = command(decode_rank, monkeypatch, "--width", "4", "--json", "--steps", "16")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, "one JSON object and nothing else"
    result = json.loads(lines[0])
    assert code == 0
    assert result["parity"] is True
    assert (result["ranks"], result["width"], result["steps"]) == (2, 4, 16)
    rows = rank_sizes(16, BUCKETS, 2)
    assert result["idle_steps"] == sum(row.count(0) for row in rows) > 0
    assert result["backend"] == "reference"
    assert [bucket["bucket"] for bucket in result["buckets"]] == [4, 8, 16]


@multirank
def test_no_parity_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = command(broken_decode_rank, monkeypatch)
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NO PARITY: step ")


@multirank
def test_a_rank_that_fails_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = command(failing_decode_rank, monkeypatch)
    output = capsys.readouterr()
    assert (code, output.out) == (1, "")
    assert "megamoe decode: rank 1 of 2: expected a result, got ValueError: three is enough" in (
        output.err
    )


def test_ranks_that_do_not_divide_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank raises it: bad arguments, with one message."""
    needs_transformers()
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments("--ranks", "3", "--timeout", "120"))
    assert caught.value.code == 2
    assert "num_experts" in capsys.readouterr().err


# -- ranks as processes ----------------------------------------------------------------------------


def counted(what: str, local_rank: int, group: dist.ProcessGroup | None) -> list[int]:
    """All ranks' numbers; or rank 1 does `what`, while the others wait for it."""
    if local_rank == 1 and what == "raise":
        raise RuntimeError("no luck")
    if local_rank == 1 and what == "die":
        os._exit(3)
    if what == "all hang" or (local_rank == 1 and what == "hang"):
        time.sleep(600)
    if what == "all":
        raise ValueError("bad argument")
    numbers: list[Any] = [local_rank]
    if group is not None:
        numbers = [None] * dist.get_world_size(group)
        dist.all_gather_object(numbers, local_rank, group=group)
    return numbers


@multirank
def test_run_ranks() -> None:
    assert run_ranks(counted, ("",), 1, 60) == (0, [0])
    assert run_ranks(counted, ("",), 3, 60) == (0, [0, 1, 2])


@multirank
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", ("rank 1 of 3", "RuntimeError: no luck")),
        ("die", ("rank 1 of 3", "exit code 3")),
        ("hang", ("of 3", "a result", "rank 1 had not come to an end")),
        ("all hang", ("ranks 0, 1, 2 at work", "within 2 s")),
    ],
)
def test_a_failure_is_named(
    what: str,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_ranks, "GRACE", 2.0)
    timeout = {"hang": 8, "all hang": 2}.get(what, 60)
    start = time.monotonic()
    with refuses(mm.MegaMoEError, *words):
        run_ranks(counted, (what,), 3, timeout)
    assert time.monotonic() - start < 30, "nobody waits for a rank that is gone"
    if what == "raise":
        assert 'raise RuntimeError("no luck")' in capsys.readouterr().err, "a traceback"


@multirank
def test_an_error_of_all_ranks_is_one_error() -> None:
    with pytest.raises(ValueError, match=r"^bad argument$"):
        run_ranks(counted, ("all",), 2, 60)


@multirank
def test_ranks_of_torchrun_are_joined() -> None:
    script = (
        "from megamoe_compile.commands.decode.ranks import number_of_ranks, run_ranks\n"
        "from test_decode_ranks import counted\n"
        "print(run_ranks(counted, ('',), number_of_ranks(None), 60))"
    )
    path = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), str(ROOT / "graph_tests" / "support")]
    )
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == ["(0, [0, 1])", "(1, [0, 1])"]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [number_of_ranks(asked) for asked in (None, 1, 4)] == [1, 1, 4]
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert [number_of_ranks(asked) for asked in (None, 4)] == [4, 4]
    with refuses(ValueError, "--ranks", "4, the WORLD_SIZE", "got 2"):
        number_of_ranks(2)


@pytest.mark.parametrize("option", ["--ranks", "--width", "--timeout"])
def test_bad_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["decode", option, "0"])
    assert caught.value.code == 2
    assert "at least 1, got 0" in capsys.readouterr().err
