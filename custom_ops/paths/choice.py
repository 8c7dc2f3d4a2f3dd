"""Which of two paths a layer call takes: decided per bucket, stored, looked up per call.

A call of T rows takes the path of the smallest decided bucket that holds T rows, else the base
path, which takes any number of rows. So an eager call and the replay of the bucket that it would be
padded to take the same path, where no other buckets were warmed. Once decided, a bucket keeps its
path as long as the context lives: captured graphs have it inside.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import is_int, mismatch, require

PathName = Literal["deep_gemm", "triton", "small_batch"]
DEEP_GEMM: PathName = "deep_gemm"
SMALL_BATCH: PathName = "small_batch"
BASES: tuple[PathName, ...] = (DEEP_GEMM, "triton")  # what small_batch may stand beside
TIE = 0.01  # small_batch must be faster by more than this part of the base path's time
Times = Mapping[PathName, float]  # microseconds of one layer call

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """The path of one bucket.

    Attributes:
        bucket: number of tokens. path: the base path, or small_batch.
        reason: "measured", "stored" (measured by an earlier start), "pinned", or why there was
            nothing to measure.
        microseconds: of one layer call under graph replay, per path; empty where not timed.
    """

    bucket: int
    path: PathName
    reason: str
    microseconds: Times = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.microseconds.items())
        return f"{self.path} ({self.reason}{': ' if times else ''}{times})"


def faster(times: Times) -> PathName:
    """The path of the smaller time of two; the base path where they tie."""
    (base,) = times.keys() - {SMALL_BATCH}
    return SMALL_BATCH if times[SMALL_BATCH] < (1 - TIE) * times[base] else base


def check_pins(
    pins: Mapping[int, str], capacity: int, allowed: tuple[PathName, ...], cure: str
) -> None:
    """Raise a ValueError unless `pins` maps numbers of tokens up to `capacity` to `allowed`."""
    require(
        isinstance(pins, Mapping), "paths", "a dict of bucket to path", repr(pins), "Pass {8: ...}."
    )
    for bucket, path in pins.items():
        require(
            is_int(bucket) and 1 <= bucket <= capacity,
            "bucket of paths",
            f"an int from 1 to {capacity} (max_tokens_per_rank)",
            repr(bucket),
            "Keys are numbers of tokens.",
        )
        expected = " or ".join(map(repr, allowed)) or "no entry"
        require(path in allowed, f"paths[{bucket}]", expected, repr(path), cure)


class PathChoice:
    """The decisions of one context, and the table that a call looks its path up in.

    Args:
        base: the path beside small_batch.
        capacity: most rows of a call. pins: bucket to path; never measured.

    Attributes:
        takes_small: one byte per number of rows, 0 to capacity: 1 for small_batch.
    """

    def __init__(self, base: PathName, capacity: int, pins: Mapping[int, PathName]) -> None:
        self.base = base
        self.takes_small = bytearray(capacity + 1)
        self._decisions: dict[int, Decision] = {}
        for bucket, path in pins.items():
            self.decide(Decision(bucket, path, "pinned"))

    def decide(self, decision: Decision) -> None:
        """Enter a bucket's decision."""
        self._decisions[decision.bucket] = decision
        start = 0
        for bucket in sorted(self._decisions):
            small = self._decisions[bucket].path == SMALL_BATCH
            self.takes_small[start : bucket + 1] = bytes([small]) * (bucket + 1 - start)
            start = bucket + 1

    def undecided(self, buckets: Iterable[int]) -> list[int]:
        """Those of `buckets` without a decision, ascending. No rows need none of their own."""
        return sorted({bucket for bucket in buckets if bucket > 0} - self._decisions.keys())

    def decision_for(self, rows: int) -> Decision | None:
        """What a call of so many rows goes by: of the smallest decided bucket that holds them."""
        buckets = sorted(self._decisions)
        at = bisect.bisect_left(buckets, rows)
        return self._decisions[buckets[at]] if at < len(buckets) else None

    def path_for(self, rows: int) -> PathName:
        """The path of a call of so many rows."""
        return SMALL_BATCH if self.takes_small[rows] else self.base


class ChoiceStore:
    """Measured times on disk, one file per set of facts, one entry per bucket.

    Args:
        base: the path that is timed beside small_batch.
        facts: all that a time depends on, but for the bucket; values that JSON has. Another
            geometry, GPU, release or kernel source is another file.
        directory: made when the first times are written.
    """

    def __init__(self, base: PathName, facts: Mapping[str, object], directory: Path) -> None:
        self._paths = (base, SMALL_BATCH)
        self._facts = dict(facts)
        text = json.dumps(self._facts, sort_keys=True)
        self.file = directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[int, Times]:
        """Microseconds by bucket; empty, with a warning, where the file is not one of ours."""
        try:
            return self._parse(json.loads(self.file.read_text()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError too
            log.warning("%s is ignored, and paths are measured again: %s", self.file, error)
            return {}

    def _parse(self, content: object) -> dict[int, Times]:
        require(
            isinstance(content, dict) and content.keys() == {"facts", "microseconds"},
            "content",
            "an object of facts and microseconds",
            type(content).__name__,
            "Delete the file.",
        )
        assert isinstance(content, dict)
        facts, entries = content["facts"], content["microseconds"]
        require(facts == self._facts, "facts", self._facts, facts, "Delete the file.")
        require(isinstance(entries, dict), "microseconds", "an object", entries, "Delete the file.")
        for bucket, times in entries.items():
            good = (
                bucket.isdecimal()
                and isinstance(times, dict)
                and times.keys() == set(self._paths)
                and all(_is_time(us) for us in times.values())
            )
            require(
                good, f"times of {bucket}", f"{self._paths} in microseconds", times, "Delete it."
            )
        return {
            int(bucket): {p: times[p] for p in self._paths} for bucket, times in entries.items()
        }

    def write(self, times: Mapping[int, Times]) -> None:
        """Add or replace entries. Never half-written: a temporary file is renamed into place.

        Two processes may each add entries at the same time; those of the later one stay, and the
        other's are measured again some day. A disk that cannot be written is a warning: only the
        next start is slower for it.
        """
        entries = {str(b): dict(t) for b, t in sorted({**self.read(), **times}.items())}
        text = json.dumps({"facts": self._facts, "microseconds": entries}, indent=1)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.file.parent) as scratch:
                written = Path(scratch) / self.file.name
                written.write_text(text + "\n")
                written.replace(self.file)
        except OSError as error:
            log.warning(
                mismatch(
                    "store of measured paths",
                    f"a writable {self.file.parent}",
                    error,
                    "The next start measures again. Set XDG_CACHE_HOME to a writable directory.",
                )
            )


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0
