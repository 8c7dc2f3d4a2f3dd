"""The tensors that captured graphs hold by address, and a check that none of them moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .custom_ops.errors import MegaMoEError, mismatch


class WatchedTensors:
    """Parameters and buffers of `modules`, by the names of the modules.

    A graph replays with the addresses it was captured with: a tensor that was replaced would be
    ignored, or its freed memory read.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._tensors = list(_tensors_of(modules))
        self._addresses = [owner[key].data_ptr() for _, owner, key in self._tensors]
        # The same for `_same_addresses`: every entry of the dictionaries, and which are tensors.
        self._owners: list[dict[str, Any]] = []
        for _, owner, _ in self._tensors:
            if not self._owners or self._owners[-1] is not owner:
                self._owners.append(owner)
        entries = self._entries()
        self._places = [place for place, entry in enumerate(entries) if entry is not None]
        self._expected = [None if entry is None else entry.data_ptr() for entry in entries]

    def _entries(self) -> list[Tensor | None]:
        return [*itertools.chain.from_iterable(map(dict.values, self._owners))]

    def check(self) -> None:
        """Raise a MegaMoEError that names the first tensor whose storage is another now."""
        try:
            if _same_addresses(self._entries(), self._expected, self._places):
                return
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass  # an entry came or went
        for (name, owner, key), address in zip(self._tensors, self._addresses, strict=True):
            tensor = owner.get(key)
            if tensor is None or tensor.data_ptr() != address:
                raise MegaMoEError(
                    mismatch(
                        f"address of {name}",
                        "the captured one",
                        "another",
                        "It was replaced after capture(): write into the old storage "
                        "(load_weights does), or capture again.",
                    )
                )


def _each_address(
    entries: list[Tensor | None], expected: list[int | None], places: list[int]
) -> bool:
    return [entries[place].data_ptr() for place in places] == [expected[p] for p in places]  # type: ignore[union-attr]


# Made for the same check in torch's own graph trees, and there in CUDA builds: a model has hundreds
# of tensors, and one call for all costs a fifth of a call each.
_same_addresses: Callable[[list[Tensor | None], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _each_address
)


def _tensors_of(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, dict[str, Any], str]]:
    seen: set[tuple[int, str]] = set()
    for name, module in modules.items():
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and (id(owner), key) not in seen:
                    seen.add((id(owner), key))
                    yield f"{name}.{key}", owner, key
