"""MegaMoE, the fused expert-parallel FP8 MoE kernel of Hopper GPUs, as PyTorch ops."""

from .backends.capability import Capability, probe
from .capture.contexts import MegaMoEContexts
from .capture.one_graph import compile_one_graph
from .capture.report import BucketSummary
from .capture.runner import GraphRunner
from .config import MegaMoEConfig
from .context import MegaMoEContext
from .custom_ops.cuda.build import set_jit_cache_dir
from .custom_ops.symmetric.exchange import SymmetricExchange
from .errors import (
    BackendUnavailable,
    CapacityError,
    ContextClosed,
    MegaMoEError,
    NotWarmedUp,
)
from .module import MegaMoE
from .parallel.rows import attn_tp_gather, attn_tp_num_valid, attn_tp_split, dp_gather, dp_scatter
from .parallel.step_plan import StepPlan, real_rows_of
from .version import __version__ as __version__

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
    "MegaMoEContexts",
    "MegaMoEError",
    "NotWarmedUp",
    "StepPlan",
    "SymmetricExchange",
    "attn_tp_gather",
    "attn_tp_num_valid",
    "attn_tp_split",
    "compile_one_graph",
    "dp_gather",
    "dp_scatter",
    "probe",
    "real_rows_of",
    "set_jit_cache_dir",
]
