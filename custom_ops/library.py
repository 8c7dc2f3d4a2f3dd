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

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from .errors import CapacityError, ContextClosed, MegaMoEError, mismatch

NAMESPACE = "megamoe"

# Version of the prepared weight layout and of the op's contract. It is an argument of the op, so
# that an artefact compiled for another version neither hits the cache nor runs.
LAYOUT_VERSION = 1

SCHEMA = (
    "fused_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
    "Tensor num_valid, Tensor(a!) launch_count, "
    "SymInt context_id, int top_k, int capacity, int layout_version) -> Tensor"
)


class Runtime(Protocol):
    """What a backend provides behind a `context_id`."""

    def launch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
        out: Tensor,
    ) -> None:
        """Write every row of `out` [T, H] and add one to `launch_count`."""


class NativeEntry(Protocol):
    """What launches a runtime's common calls from C++: see `deep_gemm/native.py`."""

    def enter(self, context_id: int, layout_version: int) -> None: ...

    def leave(self) -> None: ...


# The one table of the project: context_id -> runtime, weak, so that a context alone decides how
# long its buffer lives. An id is never used twice: a graph compiled for a closed context must
# raise, not run on a stranger's buffer. `importlib.reload` keeps the table.
_RUNTIMES: dict[int, tuple[weakref.ref[Runtime], tuple[int, ...] | None]]
if "_RUNTIMES" not in globals():
    _RUNTIMES = {}


def register_runtime(
    runtime: Runtime,
    w13_shape: tuple[int, ...] | None = None,
    native: NativeEntry | None = None,
) -> int:
    """Enter `runtime` into the table and return its `context_id`.

    With `w13_shape`, calls with weights of another geometry are refused. With `native`, the
    runtime's common calls are launched from C++ as long as it lives.
    """
    context_id = len(_RUNTIMES) + 2  # sizes of 0 and 1 would make graphs of their own
    _RUNTIMES[context_id] = (weakref.ref(runtime), w13_shape)
    if native is not None:
        native.enter(context_id, LAYOUT_VERSION)
        weakref.finalize(runtime, native.leave)
    return context_id


def find_runtime(context_id: int) -> object | None:
    """What was entered under `context_id`, or None where it is gone."""
    return _RUNTIMES.get(context_id, _NOTHING)[0]()


def _runtime(context_id: int, layout_version: int, w13: Tensor) -> Runtime:
    if layout_version != LAYOUT_VERSION:
        raise MegaMoEError(
            mismatch(
                "layout_version of megamoe::fused_moe",
                LAYOUT_VERSION,
                layout_version,
                "The graph was compiled by another release of megamoe-compile: compile it again.",
            )
        )
    entry, w13_shape = _RUNTIMES.get(context_id, _NOTHING)
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
    if w13_shape is not None and w13.shape != w13_shape:
        raise ValueError(
            mismatch(
                f"geometry of context {context_id}: w13.shape",
                list(w13_shape),
                list(w13.shape),
                "Call a layer with its own context: one context per geometry.",
            )
        )
    return runtime


_NOTHING: tuple[Callable[[], Runtime | None], None] = (lambda: None, None)


Requirement = tuple[object, type[Exception], str, object, object, str]


def _requirements(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, top_k: int, capacity: int
) -> Iterator[Requirement]:
    """Everything about the inputs that does not depend on data, in the order it is reported.

    Yields (condition, error, what, expected, got, cure); a condition may be symbolic.
    """
    for name, t in (("hidden_states", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        yield t.dim() == 2, ValueError, f"{name}.dim()", 2, t.dim(), "Flatten tokens to one axis."
    yield (
        x.dtype == torch.bfloat16,
        ValueError,
        "hidden_states.dtype",
        torch.bfloat16,
        x.dtype,
        "Cast it: the kernel quantizes bf16 rows itself.",
    )
    yield (
        topk_ids.dtype in (torch.int32, torch.int64),
        ValueError,
        "topk_ids.dtype",
        "torch.int32 or torch.int64",
        topk_ids.dtype,
        "Cast it to one of these.",
    )
    yield (
        topk_weights.dtype in (torch.float32, torch.bfloat16),
        ValueError,
        "topk_weights.dtype",
        "torch.float32 or torch.bfloat16",
        topk_weights.dtype,
        "Cast it to one of these.",
    )
    yield (
        x.shape[1] == w13.shape[2],
        ValueError,
        "hidden_states.shape[1]",
        w13.shape[2],
        x.shape[1],
        "It must be the hidden_size of the config.",
    )
    for name, t in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        yield (
            t.shape[0] == x.shape[0],
            ValueError,
            f"{name}.shape[0]",
            x.shape[0],
            t.shape[0],
            "It must be the number of rows of hidden_states.",
        )
        yield (
            t.shape[1] == top_k,
            ValueError,
            f"{name}.shape[1]",
            top_k,
            t.shape[1],
            "It must be the top_k of the config.",
        )
    for name, t in (("hidden_states", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        # A single column has no column stride to speak of.
        yield (
            t.stride(1) == 1 or t.shape[1] == 1,
            ValueError,
            f"{name}.stride(1)",
            1,
            t.stride(1),
            "Rows may be strided, columns may not: call .contiguous().",
        )
    yield (
        x.shape[0] <= capacity,
        CapacityError,
        "tokens on this rank",
        f"at most {capacity} (max_tokens_per_rank)",
        x.shape[0],
        "Raise max_tokens_per_rank, or split the batch the same way on all ranks.",
    )


def _weight_requirements(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, num_valid: Tensor
) -> Iterator[Requirement]:
    """The same for the prepared weights and the mask, against `w13`."""
    cure = "Use the prepared weights of one layer: load_weights makes them."
    names = ("w13", "w13_scale", "w2", "w2_scale")
    for name, t in zip(names, (w13, w13_scale, w2, w2_scale), strict=True):
        yield t.dim() == 3, ValueError, f"{name}.dim()", 3, t.dim(), cure
    experts, rows, hidden = w13.shape
    shapes = (
        (w13_scale, [experts, rows // 128, hidden // 128]),
        (w2, [experts, hidden, rows // 2]),
        (w2_scale, [experts, hidden // 128, rows // 256]),
    )
    for name, (t, shape) in zip(names[1:], shapes, strict=True):
        yield list(t.shape) == shape, ValueError, f"{name}.shape", shape, list(t.shape), cure
    for name, t, dtype in (
        ("w13", w13, torch.float8_e4m3fn if w13.dtype is not torch.uint8 else torch.uint8),
        ("w13_scale", w13_scale, torch.float32),
        ("w2", w2, w13.dtype),
        ("w2_scale", w2_scale, torch.float32),
    ):
        yield t.dtype is dtype, ValueError, f"{name}.dtype", dtype, t.dtype, cure
    yield (
        num_valid.dtype is torch.int32 and num_valid.numel() == 1,
        ValueError,
        "num_valid",
        "one int32",
        f"{num_valid.dtype} {list(num_valid.shape)}",
        "Pass torch.tensor([n], dtype=torch.int32) on the device of hidden_states.",
    )


def _weights_hold(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, num_valid: Tensor
) -> bool:
    """The same conditions as one expression."""
    if w13.dim() != 3:
        return False
    experts, rows, hidden = w13.shape
    return (
        w13_scale.shape == (experts, rows // 128, hidden // 128)
        and w2.shape == (experts, hidden, rows // 2)
        and w2_scale.shape == (experts, hidden // 128, rows // 256)
        and w13.dtype in _FP8_DTYPES
        and w2.dtype is w13.dtype
        and w13_scale.dtype is torch.float32
        and w2_scale.dtype is torch.float32
        and num_valid.dtype is torch.int32
        and num_valid.numel() == 1
    )


def check_weights(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, num_valid: Tensor
) -> None:
    """Raise for the first requirement that does not hold."""
    arguments = (w13, w13_scale, w2, w2_scale, num_valid)
    if not _weights_hold(*arguments):
        for condition, error, *report in _weight_requirements(*arguments):
            if not condition:
                raise error(mismatch(*report))  # type: ignore[arg-type]


_FP8_DTYPES = frozenset((torch.float8_e4m3fn, torch.uint8))
_ID_DTYPES = frozenset((torch.int32, torch.int64))
_WEIGHT_DTYPES = frozenset((torch.float32, torch.bfloat16))


def _all_hold(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, top_k: int, capacity: int
) -> bool:
    """Whether every requirement holds; False may also be a single column's odd stride.

    The same conditions as one expression: making the report's words costs more than a launch.
    """
    shape, slots = x.shape, topk_ids.shape
    return (
        len(shape) == 2
        and len(slots) == 2
        and slots == topk_weights.shape
        and slots[0] == shape[0]
        and slots[1] == top_k
        and shape[0] <= capacity
        and shape[1] == w13.shape[2]
        and x.dtype is torch.bfloat16
        and topk_ids.dtype in _ID_DTYPES
        and topk_weights.dtype in _WEIGHT_DTYPES
        and x.stride(1) == 1
        and topk_ids.stride(1) == 1
        and topk_weights.stride(1) == 1
    )


def check_inputs(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, top_k: int, capacity: int
) -> None:
    """Raise for the first requirement that does not hold."""
    arguments = (x, topk_ids, topk_weights, w13, top_k, capacity)
    if not _all_hold(*arguments):
        for condition, error, *report in _requirements(*arguments):
            if not condition:
                raise error(mismatch(*report))  # type: ignore[arg-type]


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
    num_valid: Tensor,
    launch_count: Tensor,
    context_id: int,
    top_k: int,
    capacity: int,
    layout_version: int,
) -> Tensor:
    runtime = _runtime(context_id, layout_version, w13)
    check_weights(w13, w13_scale, w2, w2_scale, num_valid)
    check_inputs(x, topk_ids, topk_weights, w13, top_k, capacity)
    if w13.dtype is torch.uint8:
        w13, w2 = w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn)
    out = allocate_output(x)
    runtime.launch(
        x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, num_valid, launch_count, out
    )
    return out


def _fused_moe_fake(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    num_valid: Tensor,
    launch_count: Tensor,
    context_id: int,
    top_k: int,
    capacity: int,
    layout_version: int,
) -> Tensor:
    # torch._check, never a Python branch: T may be symbolic, and unbacked.
    for condition, _, *report in itertools.chain(
        _weight_requirements(w13, w13_scale, w2, w2_scale, num_valid),
        _requirements(x, topk_ids, topk_weights, w13, top_k, capacity),
    ):
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
