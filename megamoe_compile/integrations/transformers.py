"""The old name of `megamoe_compile.engines.transformers`."""

from ..engines.transformers import NAME, prepare, prepare_empty, register, release
from . import moved

__all__ = ["NAME", "prepare", "prepare_empty", "register", "release"]

moved("transformers", "transformers")
