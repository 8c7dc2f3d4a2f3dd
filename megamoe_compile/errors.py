"""The errors that callers see. They are defined beside the ops, which import nothing from here."""

from .custom_ops.errors import (
    BackendUnavailable,
    CapacityError,
    ContextClosed,
    MegaMoEError,
    NotWarmedUp,
    as_int,
    is_int,
    mismatch,
    require,
)

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "ContextClosed",
    "MegaMoEError",
    "NotWarmedUp",
    "as_int",
    "is_int",
    "mismatch",
    "require",
]
