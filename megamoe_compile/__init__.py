"""MegaMoE, the fused expert-parallel FP8 MoE kernel of Hopper GPUs, as PyTorch ops."""

from .capability import Capability, probe
from .config import MegaMoEConfig
from .context import MegaMoEContext
from .custom_ops.errors import (
    BackendUnavailable,
    CapacityError,
    ContextClosed,
    MegaMoEError,
    NotWarmedUp,
)
from .graph import BucketSummary, GraphRunner
from .module import MegaMoE
from .one_graph import compile_one_graph

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "BucketSummary",
    "Capability",
    "CapacityError",
    "ContextClosed",
    "GraphRunner",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEContext",
    "MegaMoEError",
    "NotWarmedUp",
    "compile_one_graph",
    "probe",
]
