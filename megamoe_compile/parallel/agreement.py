"""How ranks come to one outcome: exchanges of a few numbers, and the same error on every rank.

A rank that refuses a step on its own leaves the others waiting in a launch or a collective. So what
a rank finds wrong travels to all ranks, before any of them goes on.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..errors import CapacityError, ContextClosed, MegaMoEError, NotWarmedUp, mismatch

T = TypeVar("T")


def fingerprint(values: object) -> int:
    """56 bits of `values`; the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "little")


def check_member(group: dist.ProcessGroup) -> None:
    """ValueError on a rank outside of `group`."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            mismatch(
                "group",
                "one that this rank belongs to",
                f"global rank {dist.get_rank()} outside of it",
                "Call it on the group's ranks only.",
            )
        )


def check_group(group: dist.ProcessGroup | None, num_ranks: int | None = None) -> None:
    """ValueError unless `group` is None, or has this rank (and num_ranks of them) and does
    collectives of CPU tensors.
    """
    if group is None:
        return
    check_member(group)
    if num_ranks is not None and dist.get_world_size(group) != num_ranks:
        raise ValueError(
            mismatch(
                "ranks of the group",
                f"{num_ranks}, those of the context",
                dist.get_world_size(group),
                "Make it over the context's ranks: dist.new_group(ranks, backend='gloo').",
            )
        )
    devices = [device.type for device in group._device_types]
    if "cpu" not in devices:
        raise ValueError(
            mismatch(
                "group",
                "one that does collectives of CPU tensors",
                f"backend {dist.get_backend(group)!r} for {devices}",
                "Make one beside it: dist.new_group(ranks, backend='gloo').",
            )
        )


def exchange(
    group: dist.ProcessGroup | None,
    words: tuple[int, ...],
    problem: Exception | None = None,
    *,
    timeout: float | None = None,
) -> list[list[int]]:
    """All ranks' words, in rank order: one all-gather of a few int64s.

    Where any rank brings a problem, every rank raises the same error, of the type of the first
    rank that has one, with all ranks' messages.
    """
    if group is None:
        if problem is not None:
            raise problem
        return [list(words)]
    values = [0 if problem is None else 1, *words]
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(everyone, mine, group=group, async_op=True)
        work.wait() if timeout is None else work.wait(datetime.timedelta(seconds=timeout))
    except RuntimeError as error:
        raise MegaMoEError(
            mismatch(
                "ranks that came to the exchange of the step",
                f"all {dist.get_world_size(group)}",
                f"{error}",
                "Every rank calls it once per step, an idle one with 0 tokens; verify=True names "
                "the ranks that don't.",
            )
        ) from error
    replies = [reply.tolist() for reply in everyone]
    if any(reply[0] for reply in replies):
        _raise_problems(group, problem)
    return [reply[1:] for reply in replies]


def agreed(group: dist.ProcessGroup, plan: object, attempt: Callable[[], T]) -> T:
    """Run `attempt` on every rank, and exchange how it went and the plan; see `exchange`."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = attempt()
    except Exception as error:  # raised on every rank
        problem = error
    replies = exchange(group, (fingerprint(plan),), problem)
    if any(reply != replies[0] for reply in replies):
        check_same(group, "plan", plan)
    return result  # type: ignore[return-value]


# Errors that are raised as their own type on the other ranks too, a subclass before its base.
_TYPES: tuple[type[Exception], ...] = (
    CapacityError,
    ValueError,
    NotWarmedUp,
    ContextClosed,
)


def _raise_problems(group: dist.ProcessGroup, problem: Exception | None) -> NoReturn:
    mine = None
    if problem is not None:
        kind = next((i for i, it in enumerate(_TYPES) if isinstance(problem, it)), None)
        mine = (kind, str(problem))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    ranks: dict[str, list[int]] = {}
    for rank, reply in enumerate(everyone):
        if reply is not None:
            ranks.setdefault(reply[1], []).append(rank)
    first = next(reply[0] for reply in everyone if reply is not None)
    error = MegaMoEError if first is None else _TYPES[first]
    raise error("; ".join(f"{_ranks(where)}: {text}" for text, where in ranks.items()))


def check_same(group: dist.ProcessGroup | None, what: str, values: object) -> None:
    """ValueError on every rank, with the ranks whose values are not rank 0's. Collective."""
    if group is None:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, repr(values), group=group)
    others = {rank: text for rank, text in enumerate(everyone) if text != everyone[0]}
    if others:
        raise ValueError(
            mismatch(
                f"{what} of {_ranks(list(others))}",
                f"{everyone[0]}, as on rank 0",
                ", ".join(f"{text} on rank {rank}" for rank, text in others.items()),
                "Pass the same on every rank.",
            )
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def wait_for_all(group: dist.ProcessGroup | None, timeout: float | None) -> None:
    """A barrier that names the ranks that don't come; on rank 0, which the others' error names."""
    if group is None or dist.get_backend(group) != "gloo":
        return
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    try:
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
    except RuntimeError as error:
        raise MegaMoEError(
            mismatch(
                "ranks that came to the exchange of the step",
                f"all {dist.get_world_size(group)}",
                f"{error}",
                "Every rank calls it once per step, an idle one with 0 tokens.",
            )
        ) from error
