"""Ranks of a command as processes: started here, or joined where torchrun has started them.

A rank that fails, dies or hangs ends the command: the others would wait for it for ever.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing

from ...errors import MegaMoEError, mismatch

T = TypeVar("T")
GRACE = 10.0  # seconds in which the other ranks may say what they know, after the first failure
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
# Imported once, by the server that the ranks are forked from.
PRELOAD = ["torch._dynamo", "transformers.models.qwen3_moe.modeling_qwen3_moe"]


def under_torchrun() -> bool:
    """This process is a rank that something else has started."""
    return all(name in os.environ for name in TORCHRUN)


def number_of_ranks(asked: int | None) -> int:
    """The ranks of this command. ValueError where torchrun has started another number."""
    if not under_torchrun():
        return asked or 1
    started = int(os.environ["WORLD_SIZE"])
    if asked not in (None, started):
        raise ValueError(
            mismatch(
                "--ranks",
                f"{started}, the WORLD_SIZE of this launch",
                asked,
                "Start as many processes as ranks, or leave --ranks out.",
            )
        )
    return started


def run_ranks(
    function: Callable[..., T], args: tuple[Any, ...], ranks: int, timeout: float
) -> tuple[int, T]:
    """Call function(*args, local_rank, group) on every rank.

    Args:
        function: a module's own, with a result that pickles. It may use the group, over gloo and
            of all ranks; with one rank it runs in this process, and the group is None.
        timeout: seconds for all of it. No rank waits for another longer than half of that, so that
            one that hangs is told from those that wait for it.

    Returns:
        (rank of this process, its result): rank 0 and its result where the ranks are started here.

    Raises:
        MegaMoEError: a rank failed, died or was too slow. All processes started here are gone.
        ValueError: every rank raised the same one.
    """
    if ranks == 1:
        return 0, function(*args, 0, None)
    if not under_torchrun():
        return 0, _launch(function, args, ranks, timeout)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout / 2))
    faulthandler.dump_traceback_later(timeout + GRACE, exit=True)
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        return dist.get_rank(), function(*args, local_rank, dist.group.WORLD)
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


# -- processes of our own --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Failure:
    text: str
    is_value_error: bool = False
    message: str = ""
    trace: str | None = None  # of errors that don't explain themselves
    when: float = 0.0  # by the clock of the host; 0 where the process died, which explains others


@dataclasses.dataclass(frozen=True)
class _Worker:
    process: Any
    pipe: Any

    def reply(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
            return _Failure(f"its process ended, exit code {self.process.exitcode}")


def _launch(function: Callable[..., T], args: tuple[Any, ...], ranks: int, timeout: float) -> T:
    spawn: Any = torch.multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(PRELOAD)
    deadline = time.monotonic() + timeout
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="megamoe_") as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(ranks):
                ours, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(
                    target=_main,
                    args=(theirs, function, args, rank, ranks, store, timeout),
                    daemon=True,
                )
                process.start()
                theirs.close()  # so that the death of the process ends the pipe
                workers.append(_Worker(process, ours))
            replies = _collect(workers, deadline)
            if not _failed(replies, ranks):
                for worker in workers:  # what it holds of the system goes with a normal end
                    worker.process.join(GRACE)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join(GRACE)
    _check(replies, ranks, timeout)
    result: T = replies[0]
    return result


def _collect(workers: list[_Worker], deadline: float) -> dict[int, Any]:
    """Replies by rank, until all have come, the time is over, or one failed and GRACE is over."""
    replies: dict[int, Any] = {}
    while len(replies) < len(workers):
        waiting = {w.pipe: rank for rank, w in enumerate(workers) if rank not in replies}
        left = max(deadline - time.monotonic(), 0)
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), left)
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            replies[rank] = workers[rank].reply()
            if isinstance(replies[rank], _Failure):
                deadline = min(deadline, time.monotonic() + GRACE)
    return replies


def _failed(replies: dict[int, Any], ranks: int) -> bool:
    return len(replies) < ranks or any(isinstance(it, _Failure) for it in replies.values())


def _check(replies: dict[int, Any], ranks: int, timeout: float) -> None:
    failures = {rank: it for rank, it in replies.items() if isinstance(it, _Failure)}
    missing = [rank for rank in range(ranks) if rank not in replies]
    if failures:
        first = min(failures, key=lambda rank: failures[rank].when)
        failure = failures[first]
        alike = [it.is_value_error and it.message == failure.message for it in failures.values()]
        if len(failures) == ranks and all(alike):
            raise ValueError(failure.message)
        if failure.trace is not None:
            print(f"rank {first}:\n{failure.trace}", file=sys.stderr)
        cure = "Cure that; the other ranks were stopped."
        if missing:
            cure = f"{_ranks(missing)} had not come to an end, and may be what others waited for."
        raise MegaMoEError(mismatch(f"rank {first} of {ranks}", "a result", failure.text, cure))
    if missing:
        raise MegaMoEError(
            mismatch(
                "ranks done",
                f"all {ranks} within {timeout:g} s",
                f"{_ranks(missing)} at work",
                "They were stopped: raise --timeout, or decode fewer steps.",
            )
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _main(
    pipe: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
) -> None:
    """A rank's process."""
    faulthandler.dump_traceback_later(timeout + GRACE, exit=True)  # if nobody else ends it
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    reply: Any
    try:
        dist.init_process_group(
            "gloo",
            store=cast(Any, dist).FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout / 2),
        )
        result = function(*args, rank, dist.group.WORLD)
        reply = result if rank == 0 else None
    except BaseException as error:
        expected = isinstance(error, (MegaMoEError, ValueError))
        reply = _Failure(
            f"{type(error).__name__}: {error}",
            isinstance(error, ValueError),
            str(error),
            None if expected else traceback.format_exc(),
            time.monotonic(),
        )
    pipe.send(reply)
