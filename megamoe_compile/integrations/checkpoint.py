"""The old name of `megamoe_compile.engines.transformers`."""

from ..engines.transformers import load_checkpoint
from . import moved

__all__ = ["load_checkpoint"]

moved("checkpoint", "transformers")
