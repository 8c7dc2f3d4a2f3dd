"""What a runner hands out of a step's outputs: the real rows, as copies or as views."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Nest = Callable[[list[Any]], Any]


class GraphOutputs:
    """Cuts outputs to the real rows.

    Args:
        outputs: per bucket, what the step returned.
        width: tokens per request.
        copy: hand out copies, which the next call does not overwrite.
        static: a bucket's output is the same object in every call, so that the views of a number
            of tokens are made once.
    """

    def __init__(self, outputs: Mapping[int, Any], width: int, *, copy: bool, static: bool) -> None:
        self._width = width
        self._copy = copy
        self._static = static
        # Per output: tokens of one of its rows in every bucket, or 0 for a fixed shape.
        self._tokens_per_row = _tokens_per_row(
            {bucket: pytree.tree_leaves(output) for bucket, output in outputs.items()}, width
        )
        self._views: dict[tuple[int, int], tuple[list[Any], Nest]] = {}

    def real(self, bucket: int, output: Any, num_tokens: int) -> Any:
        """The part of a call's output that num_tokens tokens made."""
        views = self._views.get((bucket, num_tokens))
        if views is None:
            views = self._cut(output, num_tokens)
            if self._static:
                self._views[bucket, num_tokens] = views
        leaves, nest = views
        if self._copy:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return nest(leaves)

    def _cut(self, output: Any, num_tokens: int) -> tuple[list[Any], Nest]:
        """The views, and what nests them as the output is nested."""
        leaves, tree = pytree.tree_flatten(output)
        return [
            leaf[: num_tokens // tokens] if tokens else leaf
            for leaf, tokens in zip(leaves, self._tokens_per_row, strict=True)
        ], _nest(output, tree)


def _nest(output: Any, tree: pytree.TreeSpec) -> Nest:
    """pytree takes microseconds for what most steps return: a tensor, or a tuple of tensors."""
    if type(output) is Tensor:
        return operator.itemgetter(0)
    if type(output) is tuple and all(type(item) is Tensor for item in output):
        return tuple
    return functools.partial(pytree.tree_unflatten, treespec=tree)


def _tokens_per_row(outputs: Mapping[int, list[Any]], width: int) -> list[int]:
    """1, `width` or 0 per output."""

    def fits(index: int, tokens: int) -> bool:
        return all(
            isinstance(leaves[index], Tensor)
            and leaves[index].dim() > 0
            and leaves[index].shape[0] == bucket // tokens
            for bucket, leaves in outputs.items()
        )

    (first, *_) = outputs.values()
    return [
        1 if fits(index, 1) else width if fits(index, width) else 0 for index in range(len(first))
    ]
