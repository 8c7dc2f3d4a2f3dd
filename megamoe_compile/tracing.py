"""What a layer that is compiled on its own hands to torch.compile, so that few graphs do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

F = TypeVar("F", bound=Callable[..., object])


def begins_graph() -> bool:
    """Whether a Python function called now is compiled, as the start of a graph.

    In what torch.compile traces it is not called, as `torch.compiler.is_compiling()` is true there.
    """
    return get_eval_frame_callback() is not None


def begin_below(*functions: Callable[..., object]) -> None:
    """Let no graph begin at these functions, but at what they call; inside a graph they are traced.

    torch.compile guards all strides of the tensors that a graph's first function is given and, for
    a view, the sizes of the tensor behind it. What runs before that function can even them out.
    """
    from torch._dynamo.eval_frame import skip_code  # its import takes a second

    for function in functions:
        skip_code(function.__code__)


def copy_of(function: F, name: str) -> F:
    """The same function with a code object of its own.

    torch.compile counts graphs per code object, and at most 8.
    """
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__)
    return cast(F, copy)


def as_graph_input(t: Tensor, *, own_rows: bool) -> Tensor:
    """The same values as a tensor that is no view and, where it can be, has contiguous rows.

    It is a copy only where own_rows is set and the rows are strided. Marks for the compiler are
    kept. What the op refuses (columns that are strided) stays as it is, to be refused.
    """
    plain = t
    if t.dim() == 2 and t.stride() != (t.shape[1], 1) and 1 in (t.stride(1), t.shape[1]):
        if t.shape[0] <= 1:  # its row stride says nothing
            plain = t.as_strided(t.shape, (t.shape[1], 1))
        elif own_rows:
            plain = t.clone(memory_format=torch.contiguous_format)
    if plain._is_view() and not t.requires_grad:
        plain = plain.data
    if plain is not t:
        plain.__dict__.update(t.__dict__)
    return plain
