"""MegaMoE, the fused expert-parallel FP8 MoE kernel of Hopper GPUs, as PyTorch ops."""

from .capability import Capability, probe
from .capture_report import BucketSummary
from .config import MegaMoEConfig
from .context import MegaMoEContext
from .custom_ops.cuda_build import set_jit_cache_dir
from .custom_ops.errors import (
    BackendUnavailable,
    CapacityError,
    ContextClosed,
    MegaMoEError,
    NotWarmedUp,
)
from .custom_ops.exchange import SymmetricExchange
from .graph import GraphRunner
from .module import MegaMoE
from .one_graph import compile_one_graph
from .parallel import attn_tp_gather, attn_tp_num_valid, attn_tp_split, dp_gather, dp_scatter
from .step_plan import StepPlan, real_rows_of

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
