"""Hugging Face transformers: `experts_implementation="megamoe"`. See `model` for how it works."""

from .checkpoint import load_checkpoint
from .model import NAME, prepare, prepare_empty, register, release
from .routers import fuse_routers

__all__ = [
    "NAME",
    "fuse_routers",
    "load_checkpoint",
    "prepare",
    "prepare_empty",
    "register",
    "release",
]
