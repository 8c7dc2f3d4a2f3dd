"""Errors of the library. Each message has what was expected, what was got, and the cure."""

from __future__ import annotations


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
