"""Errors of the library. Each message has what was expected, what was got, and the cure."""

from __future__ import annotations

import numbers
from typing import cast


class MegaMoEError(RuntimeError):
    """Base of all errors that this library raises for reasons other than a bad argument."""


class BackendUnavailable(MegaMoEError):
    """The backend that was asked for, or that this device should run, cannot run here."""


class CapacityError(MegaMoEError, ValueError):
    """More tokens on a rank than the symmetric buffer was made for."""


class NotWarmedUp(MegaMoEError):
    """A capture or a replay of a bucket that no warm-up has prepared."""


class ContextClosed(MegaMoEError):
    """A call through a context whose buffer is gone."""


def mismatch(what: str, expected: object, got: object, cure: str) -> str:
    """One error sentence: what was expected, what was got, the cure."""
    return f"{what}: expected {expected}, got {got}. {cure}"


def require(condition: bool, what: str, expected: object, got: object, cure: str) -> None:
    """Raise a ValueError of one sentence unless the condition holds."""
    if not condition:
        raise ValueError(mismatch(what, expected, got, cure))


def is_int(value: object) -> bool:
    """Whether it is a whole number on the host: an int or a numpy integer, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_int(what: str, value: object, expected: str = "an int >= 0", least: int = 0) -> int:
    """`value` as an int. ValueError unless it is a whole number of at least `least`.

    True is no count of one, and a tensor would wait for its device.
    """
    if type(value) is not int and not is_int(value):
        got = f"{value!r} of type {type(value).__name__}"
        raise ValueError(mismatch(what, expected, got, "Count on the host: int(count)."))
    number = int(value)  # type: ignore[call-overload]
    require(number >= least, what, expected, number, "Count again.")
    return cast(int, number)
