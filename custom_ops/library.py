"""The `megamoe` torch.library namespace: schema, fake and kernels of the one op, side by side.

`fused_moe` is opaque to torch.compile, and its only mutated argument is `launch_count`, an int32
counter of launches. That alone keeps a call whose result is unused, keeps program order among
calls, and keeps two equal calls apart, in inference and in training graphs. The symmetric buffer
is no argument: functionalization would clone it, and a clone is not peer-mapped. The kernel reaches
it through `context_id`, an index into the table of live runtimes below; an index (unlike a pointer)
is the same on every rank and in every process, so the compile cache hits.

The op takes no per-layer constant, so that equal layers share one compiled block. Weights are e4m3
or the same bytes as uint8: opcheck's schema test compares inputs in a way that e4m3 lacks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .call import Call, Weights, check_call, rules
from .errors import ContextClosed, MegaMoEError, mismatch

NAMESPACE = "megamoe"

# Version of the prepared weight layout and of the op's contract. It is an argument of the op, so
# that an artefact compiled for another version neither hits the cache nor runs.
LAYOUT_VERSION = 2

SCHEMA = (
    "fused_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor? w13_bias, Tensor? w2_bias, "
    "Tensor num_valid, Tensor(a!) launch_count, "
    "SymInt context_id, int top_k, int capacity, int layout_version) -> Tensor"
)


class Runtime(Protocol):
    """What a backend provides behind a `context_id`."""

    def launch(self, call: Call) -> None:
        """Write every row of `call.out`, and add one to `call.launch_count`."""


class NativeEntry(Protocol):
    """What launches a runtime's common calls from C++: see `deep_gemm/native.py`."""

    def enter(self, context_id: int, layout_version: int) -> None: ...

    def leave(self) -> None: ...


# The one table of the project: context_id -> runtime, weak, so that a context alone decides how
# long its buffer lives. An id is never used twice: a graph compiled for a closed context must
# raise, not run on a stranger's buffer. `importlib.reload` keeps the table.
_RUNTIMES: dict[int, tuple[weakref.ref[Runtime], tuple[int, ...] | None, bool]]
if "_RUNTIMES" not in globals():
    _RUNTIMES = {}


def register_runtime(
    runtime: Runtime,
    w13_shape: tuple[int, ...] | None = None,
    native: NativeEntry | None = None,
    *,
    expert_bias: bool = False,
) -> int:
    """Enter `runtime` into the table and return its `context_id`.

    With `w13_shape`, calls with weights of another geometry are refused, and calls whose weights
    have biases where `expert_bias` says otherwise. With `native`, the runtime's common calls are
    launched from C++ as long as it lives.
    """
    context_id = len(_RUNTIMES) + 2  # sizes of 0 and 1 would make graphs of their own
    _RUNTIMES[context_id] = (weakref.ref(runtime), w13_shape, expert_bias)
    if native is not None:
        native.enter(context_id, LAYOUT_VERSION)
        weakref.finalize(runtime, native.leave)
    return context_id


def as_size(context_id: int, device: torch.device) -> Tensor:
    """The id as a size, [context_id, 0].

    A compiled graph would have an int inside, and so be one per context; a size that is marked
    dynamic it takes anew in each call.
    """
    handle = torch.empty(context_id, 0, dtype=torch.int8, device=device)
    torch._dynamo.mark_dynamic(handle, 0)
    return handle


def find_runtime(context_id: int) -> object | None:
    """What was entered under `context_id`, or None where it is gone."""
    return _RUNTIMES.get(context_id, _NOTHING)[0]()


def _runtime(context_id: int, layout_version: int, weights: Weights) -> Runtime:
    if layout_version != LAYOUT_VERSION:
        raise MegaMoEError(
            mismatch(
                "layout_version of megamoe::fused_moe",
                LAYOUT_VERSION,
                layout_version,
                "The graph was compiled by another release of megamoe-compile: compile it again.",
            )
        )
    entry, w13_shape, expert_bias = _RUNTIMES.get(context_id, _NOTHING)
    runtime = entry()
    if runtime is None:
        raise ContextClosed(
            mismatch(
                f"context {context_id}",
                "an open MegaMoEContext",
                "one that was closed, collected or never made in this process",
                "Keep the context alive and open while its layers and graphs run.",
            )
        )
    if w13_shape is not None:
        got, has_bias = weights.w13.shape, weights.w13_bias is not None
        if got != w13_shape or has_bias is not expert_bias:
            raise ValueError(
                mismatch(
                    f"geometry of context {context_id}: w13.shape and whether there are biases",
                    f"{list(w13_shape)}, {expert_bias}",
                    f"{list(got)}, {has_bias}",
                    "Call a layer with its own context: one context per geometry.",
                )
            )
    return runtime


_NOTHING: tuple[Callable[[], Runtime | None], None, bool] = (lambda: None, None, False)


def allocate_output(x: Tensor) -> Tensor:
    """The output of the op: [T, H], contiguous. The kernel and the fake share it."""
    return x.new_empty(x.shape)


def _fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    num_valid: Tensor,
    launch_count: Tensor,
    context_id: int,
    top_k: int,
    capacity: int,
    layout_version: int,
) -> Tensor:
    weights = Weights(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
    runtime = _runtime(context_id, layout_version, weights)
    check_call(x, topk_ids, topk_weights, weights, num_valid, top_k, capacity)
    if w13.dtype is torch.uint8:
        fp8 = torch.float8_e4m3fn
        weights = weights._replace(w13=w13.view(fp8), w2=w2.view(fp8))
    out = allocate_output(x)
    runtime.launch(Call(x, topk_ids, topk_weights, weights, num_valid, launch_count, out))
    return out


def _fused_moe_fake(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    num_valid: Tensor,
    launch_count: Tensor,
    context_id: int,
    top_k: int,
    capacity: int,
    layout_version: int,
) -> Tensor:
    # torch._check, never a Python branch: T may be symbolic, and unbacked.
    weights = Weights(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
    arguments = (x, topk_ids, topk_weights, weights, num_valid, top_k, capacity)
    for condition, _, *report in rules(*arguments):
        torch._check(condition, lambda report=report: mismatch(*map(_hint, report)))  # type: ignore
    return allocate_output(x)


def _hint(value: object) -> object:
    """The number behind a symbolic size, where there is one: what the eager call would say."""
    if isinstance(value, torch.SymInt):
        hint = getattr(value.node, "hint", None)
        return value if hint is None else hint
    return value


def _define() -> torch.library.Library:
    if hasattr(torch.ops.megamoe, "fused_moe"):
        raise ImportError(
            mismatch(
                "torch.ops.megamoe.fused_moe",
                "to be defined by this copy of megamoe_compile alone",
                f"an earlier definition (this copy is {__file__})",
                "Import one copy only: remove the other from sys.path.",
            )
        )
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define(SCHEMA, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    # Every device's kernel, but for CUDA calls that csrc/deep_gemm/fused_moe.cpp takes.
    library.impl("fused_moe", _fused_moe, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::fused_moe", _fused_moe_fake, lib=library)
    return library


# The ops live as long as this object, hence as long as the module; a reload keeps them.
if "_LIBRARY" not in globals():
    _LIBRARY = _define()

fused_moe = torch.ops.megamoe.fused_moe.default
