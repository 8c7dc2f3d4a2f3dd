"""The one-graph recipe: a step that torch.compile compiles once for every number of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..context import ALL_VALID
from ..errors import CapacityError, mismatch
from .contexts import AnyContext


def compile_one_graph(
    step: Callable[..., Any],
    context: AnyContext,
    token_inputs: Sequence[str],
    **compile_options: Any,
) -> Callable[..., Any]:
    """Compile `step` so that 0, 1 and any other number of tokens share exactly one graph.

    torch.compile specializes on sizes 0 and 1 even with dynamic=True, so that a rare idle step
    compiles hours after start-up. Here the token dimension of each named input is marked unbacked
    with one shared shape id before each call, and an idle step runs as one row of zeros with
    `context.num_valid` at 0, since an unbacked size of 0 breaks Inductor kernels in torch 2.11.

    Args:
        step: must not branch on the number of tokens.
        context: the context, or contexts, of the step's layers.
        token_inputs: names of the tensor arguments whose dimension 0 counts tokens.
        compile_options: for torch.compile; fullgraph=True unless given.

    Returns:
        A callable with the arguments of `step`. Outputs with one row per token have exactly T.

    Raises:
        ValueError: unknown names; at call time, where the named inputs disagree about T.
        CapacityError: at call time, more tokens than `max_tokens_per_rank`.
    """
    compiled = torch.compile(step, **{"fullgraph": True, **compile_options})
    forward = step.forward if isinstance(step, torch.nn.Module) else step
    signature = inspect.signature(forward)
    names = list(token_inputs)
    if not names or set(names) - set(signature.parameters):
        raise ValueError(
            mismatch("token_inputs", f"names of {list(signature.parameters)}", names, "Name them.")
        )
    capacity = context.max_tokens_per_rank

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        counts = {name: arguments[name].shape[0] for name in names}
        tokens = counts[names[0]]
        if any(count != tokens for count in counts.values()):
            raise ValueError(
                mismatch("tokens of the inputs", "one number", counts, "Pass rows of one step.")
            )
        if tokens > capacity:  # an unbacked size would fail in a guard, without our words
            raise CapacityError(
                mismatch(
                    "tokens on this rank",
                    f"at most {capacity} (max_tokens_per_rank)",
                    tokens,
                    "Raise max_tokens_per_rank, or split the batch the same way on all ranks.",
                )
            )
        for name in names:
            given = arguments[name]
            if tokens == 0:
                given = given.new_zeros(1, *given.shape[1:])
            elif not given.requires_grad:
                given = given.data  # the mark goes onto an alias, not onto the caller's tensor
            torch._dynamo.decorators.mark_unbacked(given, 0, shape_id="tokens")
            arguments[name] = given
        if tokens == 0:
            context.num_valid.fill_(0)
        try:
            output = compiled(*bound.args, **bound.kwargs)
        finally:
            if tokens == 0:
                context.num_valid.fill_(ALL_VALID)
        if tokens == 0:
            output = pytree.tree_map_only(
                Tensor, lambda t: t[:0] if t.dim() and t.shape[0] == 1 else t, output
            )
        return output

    return run
