"""The settings and counts that a StepPlan is made from, and what makes them good or bad."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import CapacityError, is_int, mismatch
from .agreement import fingerprint

Mode = Literal["max_len", "sum_len"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What must be the same on every rank; `problem` is an error to raise on all of them."""

    buckets: tuple[int, ...]
    width: int
    mode: Mode
    capacity: int | None
    attn_tp: int
    problem: Exception | None
    fingerprint: int

    @property
    def values(self) -> tuple[object, ...]:
        return (self.buckets, self.width, self.mode, self.capacity, self.attn_tp)

    @staticmethod
    def of(buckets: Any, width: Any, mode: Any, capacity: Any, attn_tp: Any) -> Settings:
        try:
            buckets = tuple(buckets)
            # By type too: a float that equals a good bucket is none.
            return _good(tuple(map(type, buckets)), buckets, width, mode, capacity, attn_tp)
        except ValueError as error:
            problem: Exception = error
        except TypeError as error:  # not iterable, or not hashable
            cure = f"{error}."
            problem = ValueError(
                mismatch("buckets", "a list of numbers of tokens", repr(buckets), cure)
            )
        return Settings((), 1, "max_len", None, 1, problem, 0)


@functools.lru_cache(maxsize=64, typed=True)  # an engine makes a plan per step, always alike
def _good(
    types: tuple[type, ...], buckets: Any, width: Any, mode: Any, capacity: Any, attn_tp: Any
) -> Settings:
    if mode not in get_args(Mode):
        raise ValueError(mismatch("mode", get_args(Mode), repr(mode), "Pick one."))
    if capacity is not None and not is_count(capacity):
        raise ValueError(
            mismatch("capacity", "an int >= 1, or None", capacity, "Tokens of ONE rank.")
        )
    if not is_count(attn_tp):
        raise ValueError(
            mismatch("attn_tp", "an int >= 1", attn_tp, "The size of an attention TP group.")
        )
    most = None if capacity is None else capacity * attn_tp
    given, capacity = bool(buckets), None if capacity is None else int(capacity)
    buckets = tuple(check_buckets(buckets or (width,), width, most if given else None))
    # Plain ints: a numpy integer would have another fingerprint than a rank's own int.
    values = (buckets if given else (), int(width), mode, capacity, int(attn_tp))
    return Settings(*values, None, fingerprint(values))


def check_buckets(buckets: Sequence[int], width: int, capacity: int | None) -> list[int]:
    """As a list of ints. ValueError: not ascending, or no multiples of width. CapacityError."""
    if not is_count(width):
        raise ValueError(mismatch("width", "at least 1", width, "It counts tokens of a request."))
    buckets = list(buckets)
    fit = bool(buckets) and all(is_count(b) and b % width == 0 for b in buckets)
    if not fit or any(a >= b for a, b in itertools.pairwise(buckets)):
        raise ValueError(
            mismatch(
                "buckets",
                f"an ascending list of numbers of tokens, multiples of the width {width}",
                buckets,
                "Sort it and drop doubles; buckets are requests x width.",
            )
        )
    if capacity is not None and buckets[-1] > capacity:
        raise CapacityError(
            mismatch(
                "largest bucket",
                f"at most {capacity} (max_tokens_per_rank)",
                buckets[-1],
                f"Set max_tokens_per_rank to {buckets[-1]} or more, or drop the bucket.",
            )
        )
    return [int(bucket) for bucket in buckets]


def check_rows(what: str, rows: int, expected: int, source: str) -> None:
    """Raise a ValueError unless `rows` is `expected`, which `source` says. Compiles."""
    if rows != expected:  # int(): torch.compile formats no symbolic size
        raise ValueError(
            mismatch(
                what,
                f"{int(expected)} ({source})",
                int(rows),
                "Every size comes from the plan of this step: pad or cut the rows to it.",
            )
        )


def check_replicas(counts: tuple[int, ...], attn_tp: int) -> None:
    """Ranks of one attention TP group hold the same tokens. The same error on every rank."""
    uneven = [
        first
        for first in range(0, len(counts), attn_tp)
        if counts[first : first + attn_tp] != counts[first : first + 1] * attn_tp
    ]
    if uneven:
        raise ValueError(
            mismatch(
                "tokens_per_rank",
                f"the same count on each {attn_tp} ranks in a row (attn_tp)",
                f"{counts}, uneven from rank {uneven[0]}",
                "Ranks of one attention TP group pass the count of their common batch.",
            )
        )


def count_problem(what: str, value: object, width: int) -> Exception | None:
    expected = f"a multiple of the width {width}, at least 0" if width > 1 else "an int >= 0"
    if not is_int(value):
        got = f"{value!r} of type {type(value).__name__}"
        return ValueError(mismatch(what, expected, got, "Count on the host: int(count)."))
    if not 0 <= int(value) < 2**62 or int(value) % width:  # type: ignore[call-overload]
        return ValueError(
            mismatch(what, expected, value, "Count real tokens: requests x width, 0 when idle.")
        )
    return None


def is_count(value: Any) -> bool:
    return is_int(value) and value >= 1


def as_ints(counts: Any) -> list[Any]:
    if isinstance(counts, Tensor):
        fits = counts.dim() == 1 and not counts.is_floating_point() and counts.dtype != torch.bool
        if not fits or counts.device.type != "cpu":
            raise ValueError(
                mismatch(
                    "counts",
                    "integers [num_ranks] on the CPU",
                    f"{counts.dtype} {list(counts.shape)} on {counts.device}",
                    "Exchange the counts over a gloo group.",
                )
            )
        return list(counts.tolist())
    try:
        return list(counts)
    except TypeError as error:
        raise ValueError(
            mismatch("counts", "one count per rank", repr(counts), "Pass a list.")
        ) from error
