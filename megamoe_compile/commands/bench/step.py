"""One decode step of a causal language model of transformers over a static KV cache.

All columns of the bench run this same step; only their experts differ. Every request has the same
position, an input tensor. The layers are compiled one by one: they share one compiled code per
batch size, so that 48 layers cost the compile time of one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import MegaMoEError, mismatch

ATTENTION = "megamoe_bench"
MIN_GEMMS = 128  # about the multiprocessors of a GPU


def register_attention() -> None:
    """Make `decode_attention` known to transformers as the implementation "megamoe_bench"."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, decode_attention)


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per request, as batched GEMMs.

    SDPA with a mask repeats keys and values for every query head and gives one thread block to each
    head. Here the query heads of one key head are the rows of one GEMM, and the second GEMM is cut
    along the cache, so that a batch of one fills the GPU too.

    Args:
        query: [B, Q, 1, D]. key: [B, K, L, D], value: [B, K, L, Dv], Q a multiple of K.
        attention_mask: [1 or B, 1, 1, L] fp32, added to the scores.

    Returns:
        ([B, 1, Q, Dv], None)
    """
    batch, heads, _, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    pairs, groups = batch * kv_heads, heads // kv_heads
    rows = query.reshape(pairs, groups, dim)
    scores = torch.bmm(rows, key.reshape(pairs, length, dim).transpose(1, 2))
    scores = scores.view(batch, kv_heads, groups, length).float() * scaling + attention_mask
    weights = scores.softmax(-1).to(query.dtype)
    parts = 1
    while pairs * parts < MIN_GEMMS and length % (2 * parts) == 0 and length // parts > 64:
        parts *= 2
    split = length // parts
    weights = weights.view(pairs, groups, parts, split).transpose(1, 2)
    out = torch.bmm(
        weights.reshape(pairs * parts, groups, split), value.reshape(pairs * parts, split, -1)
    )
    if parts > 1:
        out = out.view(pairs, parts, groups, -1).float().sum(1).to(query.dtype)
    return out.reshape(batch, 1, heads, -1), None


class LayerCache:
    """Keys and values of one layer for one step; transformers calls `update` in its attention.

    Args:
        owner: holds the layer's two buffers, or allocates them in a first, eager step.
        rows: requests of the step. position: int64 [1], of the new token.
    """

    def __init__(self, owner: LayerStore, rows: int, position: Tensor) -> None:
        self.owner = owner
        self.rows = rows
        self.position = position
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if owner.keys is not None:
            self.keys, self.values = owner.keys[:rows], cast(Tensor, owner.values)[:rows]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, 1, D] at the position; returns all [B, heads, L, D]."""
        if self.keys is None or self.values is None:
            self.owner.allocate(keys, values)
            assert self.owner.keys is not None
            assert self.owner.values is not None
            self.keys, self.values = self.owner.keys[: self.rows], self.owner.values[: self.rows]
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


class LayerStore(nn.Module):
    """The static keys and values of one layer, [max_batch, heads, length, D]."""

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, max_batch: int, length: int, seed: int) -> None:
        super().__init__()
        self.size = (max_batch, length)
        self.seed = seed
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("values", None, persistent=False)

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Random contents: a past that the step attends to, equal for equal seeds."""
        if torch.compiler.is_compiling():
            raise MegaMoEError(
                mismatch("KV cache", "allocated", "none", "Call the step once eagerly.")
            )
        generator = torch.Generator(keys.device).manual_seed(self.seed)
        batch, length = self.size
        for name, like in (("keys", keys), ("values", values)):
            shape = (batch, like.shape[1], length, like.shape[3])
            with torch.inference_mode(False):
                buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
                setattr(self, name, buffer.normal_(generator=generator))


class BenchStep(nn.Module):
    """A decode step of `model` for any batch up to max_batch.

    Args:
        model: of transformers, with weights.
        length: L, positions of the cache; attention always reads all of them.
    """

    def __init__(self, model: nn.Module, max_batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self.length = length
        self.body: Any = cast(Any, model).model
        self.stores = nn.ModuleList(
            LayerStore(max_batch, length, seed=index) for index in range(len(self.body.layers))
        )
        self.begin: Any = self._begin
        self.end: Any = self._end

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what runs before the layers, every layer, and what runs after them."""
        options = {"fullgraph": True, "dynamic": False, **kwargs}
        self.begin = torch.compile(self._begin, *args, **options)
        self.end = torch.compile(self._end, *args, **options)
        for layer in self.body.layers:
            layer.compile(*args, **options)

    def forward(self, input_ids: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Run the step.

        Args:
            input_ids: int64 [B]. position: int64 [1].

        Returns:
            (logits [B, V] bf16, the most likely tokens, int64 [B])
        """
        hidden, mask, rope = self.begin(input_ids, position)
        places = position[None]
        for layer, store in zip(self.body.layers, self.stores, strict=True):
            cache = LayerCache(cast(LayerStore, store), input_ids.shape[0], position)
            # By position: the name of the fourth differs among versions of transformers.
            hidden = layer(hidden, mask, places, cache, False, rope)
        return cast(tuple[Tensor, Tensor], self.end(hidden))

    def _begin(
        self, input_ids: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        hidden = self.body.embed_tokens(input_ids)[:, None]
        reach = torch.arange(self.length, dtype=torch.int64, device=position.device)
        hidden_from = torch.full((), -torch.inf, dtype=torch.float32, device=position.device)
        mask = torch.where(reach <= position, 0.0, hidden_from)[None, None, None]
        return hidden, mask, self.body.rotary_emb(hidden, position[None])

    def _end(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = cast(Any, self.model).lm_head(self.body.norm(hidden)[:, 0])
        return logits, logits.argmax(-1)
