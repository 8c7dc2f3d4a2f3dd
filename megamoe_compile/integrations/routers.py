"""The old name of `megamoe_compile.engines.transformers`."""

from ..engines.transformers import fuse_routers
from . import moved

__all__ = ["fuse_routers"]

moved("routers", "transformers")
