"""A decode step for continuous batching: every request owns a slot of a static KV cache.

All shapes follow from the number of tokens, all writes go to addresses that never change, and what
varies (which slots, which positions, how many rows are real) is read from tensors: one compiled
step, or one captured graph, serves every batch of its size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import MegaMoEError, mismatch


class SlotCache(nn.Module):
    """Keys and values of `num_slots` requests, and one more slot that takes what pad rows write.

    Args:
        num_slots: S, requests that may be alive at once.
        max_length: L, positions of a slot. A slot is reused without being cleared: a request never
            attends to a position that it hasn't written.

    Attention memory is S+1 slots per layer. A step gathers the slots of its rows into [R, heads, L,
    D], which is right and simple, and reads the cache twice.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.max_length = max_length
        self.num_layers = 0

    @property
    def pad_slot(self) -> int:
        return self.num_slots

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Append a layer whose rows are like keys [*, heads, *, D] and values [*, heads, *, Dv]."""
        for name, like in (("keys", keys), ("values", values)):
            shape = (self.num_slots + 1, like.shape[1], self.max_length, like.shape[3])
            # Zeros: a masked position has weight 0, and 0 times chance memory may be NaN.
            self.register_buffer(f"{name}_{self.num_layers}", like.new_zeros(shape), False)
        self.num_layers += 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return cast(Tensor, self._buffers[f"keys_{index}"]), cast(
            Tensor, self._buffers[f"values_{index}"]
        )


class SlotView:
    """The cache as one step sees it; transformers calls `update` in each attention layer.

    Args:
        slots: [R], the slot of each row. positions: [R, W], where its W tokens stand.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor) -> None:
        self.cache = cache
        self.slots = slots
        self.positions = positions

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [R, heads, W, D] and values; returns all of the rows' slots, [R, heads, L, D].

        Raises:
            MegaMoEError: a layer that the first, eager step did not reach.
        """
        if layer_idx == self.cache.num_layers and not torch.compiler.is_compiling():
            self.cache.allocate(keys, values)
        if layer_idx >= self.cache.num_layers:
            raise MegaMoEError(
                mismatch(
                    "KV cache",
                    "allocated by an eager step before compilation",
                    f"no layer {layer_idx}",
                    "Call the step once eagerly.",
                )
            )
        stored = self.cache.layer(layer_idx)
        for buffer, new in zip(stored, (keys, values), strict=True):
            # Indices around a slice put the indexed dimensions first: [R, W, heads, D].
            buffer[self.slots[:, None], :, self.positions] = new.transpose(1, 2)
        return stored[0][self.slots], stored[1][self.slots]


class DecodeStep(nn.Module):
    """One decode step of a causal language model of transformers over slots.

    Args:
        model: called as model(input_ids, attention_mask, position_ids, cache), by position: the
            name of the last one differs among versions of transformers.
        num_valid: int32 [1], as in MegaMoEContext: rows at or above it are padding.
        width: W, tokens of one request.

    Raises:
        ValueError: a model with layers that don't attend to all positions before a token's own.
    """

    num_valid: Tensor

    def __init__(
        self, model: nn.Module, cache: SlotCache, num_valid: Tensor, width: int = 1
    ) -> None:
        super().__init__()
        _check_attention(cast(Any, model).config)
        self.model = model
        self.cache = cache
        self.width = width
        self.register_buffer("num_valid", num_valid, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Run the step.

        Args:
            input_ids, positions: int64 [R, W], or [T], T = R * W. slots: int64 [R]. Rows of padding
                may hold anything: they write to the cache's pad slot and nothing reads them.

        Returns:
            (logits [T, V] in the model's dtype, the most likely tokens, int64 [T])
        """
        rows = slots.shape[0]
        request = torch.arange(rows, dtype=torch.int64, device=slots.device)
        real = request * self.width < self.num_valid
        # Static buffers keep what an earlier step left in them. Without this a pad row would write
        # its old token into a slot that another request owns by now.
        slots = torch.where(real, slots, self.cache.pad_slot)
        positions = torch.where(real[:, None], positions.view(rows, self.width), 0)
        reach = torch.arange(self.cache.max_length, dtype=torch.int64, device=slots.device)
        visible = reach <= positions[:, None, :, None]  # [R, 1, W, L]
        dtype = next(self.model.parameters()).dtype
        least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=slots.device)
        mask = torch.where(visible, 0.0, least)
        view = SlotView(self.cache, slots, positions)
        # Choosing among the attention kernels asks whether the batch is 1: torch 2.11 cannot trace
        # that for a batch of unknown size. The plain one, of matmuls in fp32, asks nothing.
        with sdpa_kernel(SDPBackend.MATH):
            output = self.model(input_ids.view(rows, self.width), mask, positions, view)
        logits = output.logits.flatten(0, 1)
        return logits, logits.argmax(-1)


def _check_attention(config: Any) -> None:
    """Only full attention keeps nothing but keys and values, and takes our mask."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention"})
    if window is not None or other:
        raise ValueError(
            mismatch(
                f"attention of {type(config).__name__}",
                "full attention in all layers",
                ", ".join(other) or f"a sliding window of {window}",
                "Decode this model with its own cache.",
            )
        )
