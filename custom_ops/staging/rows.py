"""What a launcher takes as the rows of a call, and what it says of others."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CapacityError, mismatch, require

# dtypes of x, ids, weights -> what the kernels take for them: bit 1, the ids are int64; bit 0, the
# weights are bf16.
DTYPE_BITS = {
    (torch.bfloat16, torch.int32, torch.float32): 0,
    (torch.bfloat16, torch.int32, torch.bfloat16): 1,
    (torch.bfloat16, torch.int64, torch.float32): 2,
    (torch.bfloat16, torch.int64, torch.bfloat16): 3,
}
_DTYPES = [tuple(dict.fromkeys(dtypes)) for dtypes in zip(*DTYPE_BITS, strict=True)]


def check_rows(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    hidden_size: int,
    top_k: int,
    most: int,
    cure: str = "Raise max_tokens_per_rank, or split the batch the same way on all ranks.",
) -> None:
    """Raise what is wrong with the rows of a call, if anything is.

    Args:
        x: [T, H] bf16. topk_ids: [T, K] int32 or int64. topk_weights: [T, K] fp32 or bf16.
            Columns are dense, rows may be strided.
        most: the largest T. cure: for more.

    Raises:
        CapacityError: more rows than `most`. ValueError: a shape, dtype or stride.
    """
    tokens = x.shape[0]
    if tokens > most:
        raise CapacityError(mismatch("tokens on this rank", f"at most {most}", tokens, cure))
    for name, view, columns, dtypes in (
        ("x", x, hidden_size, _DTYPES[0]),
        ("topk_ids", topk_ids, top_k, _DTYPES[1]),
        ("topk_weights", topk_weights, top_k, _DTYPES[2]),
    ):
        require(
            tuple(view.shape) == (tokens, columns),
            f"{name}.shape",
            (tokens, columns),
            tuple(view.shape),
            "T must agree among the inputs, the columns with the buffer or geometry.",
        )
        require(view.dtype in dtypes, f"{name}.dtype", dtypes, view.dtype, "Cast it.")
        require(
            columns == 1 or view.stride(1) == 1,
            f"{name}.stride(1)",
            1,
            view.stride(1),
            "Rows may be strided, columns may not: call .contiguous().",
        )
