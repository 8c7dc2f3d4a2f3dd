# mypy: ignore-errors
"""Triton kernels of the `triton` backend; `TritonRuntime` in runtime.py launches them.

After staging (pre_dispatch_triton.py) a launch is: `group_kernel`, `gate_up_kernel`, `down_kernel`,
`combine_kernel`. Grids depend on the number of rows alone, never on where the rows are routed.

A pair is a (row, slot): pair p is slot p % SLOTS of row p // SLOTS. `group_kernel` sorts the pairs
by expert, in order within an expert. A tile is up to BLOCK_M pairs of one expert; each program of
the GEMMs finds its tile from the counts of all experts, and programs behind the last tile leave.

The GEMMs compute weights [rows, k] times pairs [k, BLOCK_M], so that the many rows of the weights,
not the few pairs, fill the long side of the tensor core's tile. All of a pair's numbers stay in its
own column: columns without a pair compute on some other row and are never stored, and NaN or Inf
stay in the row that has them. A weight matrix is read once per tile of its expert.

Numbers are those of reference/; sums over k run in fp32, in blocks.
"""

import triton
import triton.language as tl

from ..staging.pre_dispatch_triton import _encode_e4m3

__all__ = (
    "INTERPRETED",
    "combine_kernel",
    "down_kernel",
    "gate_up_kernel",
    "group_kernel",
)

SCALE_GROUP = tl.constexpr(128)  # columns per scale, and rows and columns of a weight's scale
INTERLEAVE = tl.constexpr(8)  # rows of gate, then rows of up


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def group_kernel(
    ids_ptr,
    first_ptr,
    count_ptr,
    pairs_ptr,
    num_pairs,
    first_expert,
    SLOTS: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort the pairs by expert. Grid: (experts of this rank,). Counting sort, one expert each.

    Writes pairs[first[e] + i], the i-th pair of expert e in ascending order, first[e] and count[e].
    """
    expert = tl.program_id(0)
    before = 0
    count = 0
    for start in range(0, num_pairs, CHUNK):
        local = _local_experts(ids_ptr, start, num_pairs, first_expert, SLOTS, IDS_STRIDE, CHUNK)
        before += tl.sum(((local >= 0) & (local < expert)).to(tl.int32), axis=0)
        count += tl.sum((local == expert).to(tl.int32), axis=0)
    tl.store(first_ptr + expert, before)
    tl.store(count_ptr + expert, count)
    if count > 0:
        place = before
        for start in range(0, num_pairs, CHUNK):
            local = _local_experts(
                ids_ptr, start, num_pairs, first_expert, SLOTS, IDS_STRIDE, CHUNK
            )
            mine = (local == expert).to(tl.int32)
            at = place + tl.cumsum(mine, axis=0) - 1
            tl.store(pairs_ptr + at, start + tl.arange(0, CHUNK), mask=mine == 1)
            place += tl.sum(mine, axis=0)


@triton.jit
def _local_experts(
    ids_ptr,
    start,
    num_pairs,
    first_expert,
    SLOTS: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Expert minus first_expert of CHUNK pairs; negative where a pair is not routed."""
    pair = start + tl.arange(0, CHUNK)
    row = (pair // SLOTS).to(tl.int64)
    ids = tl.load(ids_ptr + row * IDS_STRIDE + pair % SLOTS, mask=pair < num_pairs, other=-1)
    return tl.where(ids < 0, -1, ids - first_expert).to(tl.int32)


@triton.jit
def _find_tile(
    count_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_P2: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of a tile, EXPERTS_P2 where there is none, and the tile's first pair in it.

    Tiles of one expert are neighbours, so that programs that read the same weights run together.
    """
    experts = tl.arange(0, EXPERTS_P2)
    counts = tl.load(count_ptr + experts, mask=experts < EXPERTS, other=0)
    ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    part = tile - tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    return expert, part * BLOCK_M


@triton.jit
def _operand(code, FP8_DOT: tl.constexpr):
    """e4m3 as it is, or its bits (uint8) as fp16, which holds every e4m3 number."""
    if FP8_DOT:
        operand = code
    else:
        bits = code.to(tl.uint16)
        magnitude = bits & 0x7F
        # Shifted into fp16's place the exponent is 8 too small, for subnormal numbers too.
        value = ((bits & 0x80) << 8 | magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        operand = tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)
    return operand


@triton.jit
def _gate_row(column):
    """The row of w13 that has the gate of a column of the intermediate; up is INTERLEAVE on."""
    return column // INTERLEAVE * (2 * INTERLEAVE) + column % INTERLEAVE


@triton.jit
def _store_hidden(
    gate,
    up,
    w13_bias_ptr,
    expert,
    routing,
    limit,
    place,
    live,
    group,
    hidden_ptr,
    hidden_scale_ptr,
    INTERMEDIATE: tl.constexpr,
    CLAMP: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
):
    """Bias, SwiGLU, routing weight and quantization of one group: fp32 gate, up [128, BLOCK_M]."""
    column = group * SCALE_GROUP + tl.arange(0, SCALE_GROUP)
    if w13_bias_ptr is not None:
        bias_ptrs = w13_bias_ptr + expert * (2 * INTERMEDIATE) + _gate_row(column)
        gate += tl.load(bias_ptrs)[:, None]
        up += tl.load(bias_ptrs + INTERLEAVE)[:, None]
    if CLAMP:  # with `where`, which keeps a NaN; a minimum may drop it
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    if BETA != 0.0:
        up += BETA
    exponent = -gate if ALPHA == 1.0 else -ALPHA * gate
    hidden = gate / (1.0 + tl.exp(exponent)) * up * routing[None, :]
    magnitude = tl.abs(hidden)
    # A NaN does not enter the maximum, on no target.
    amax = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis=0)
    # `/` is approximate on a GPU; the recipe divides exactly.
    scale = tl.div_rn(tl.maximum(amax, 1e-10), tl.full(amax.shape, 448.0, tl.float32))
    inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    code = _encode_e4m3(hidden * inverse[None, :]).to(tl.uint8)
    at = place.to(tl.int64) * INTERMEDIATE
    tl.store(hidden_ptr + at[None, :] + column[:, None], code, mask=live[None, :])
    tl.store(hidden_scale_ptr + place * (INTERMEDIATE // SCALE_GROUP) + group, scale, mask=live)


@triton.jit(do_not_specialize=["num_places"])
def gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    routing_ptr,
    first_ptr,
    count_ptr,
    pairs_ptr,
    w13_ptr,
    w13_scale_ptr,
    w13_bias_ptr,
    partial_ptr,
    arrived_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    limit,
    num_places,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROUTING_STRIDE: tl.constexpr,
    CLAMP: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    FP8_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of the intermediate: as many rows of gate, and of up
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the sum over k
    STAGES: tl.constexpr,
):
    """hidden = quantize(swiglu(x @ w13) * routing). Grid: (tiles, INTERMEDIATE / BLOCK_N, SPLITS).

    With BLOCK_N 128 and SPLITS 1 a program has all columns of its scale. Else each program writes
    its part of the sums to `partial`, and the last to arrive adds them, in order, and quantizes.
    `arrived` is zero before and after.

    Args:
        x_ptr, x_scale_ptr, routing_ptr: of the staged rows, with row strides. w13: prepared.
        w13_bias_ptr: prepared, or None.
        partial_ptr: fp32 [SPLITS, num_places, 2, INTERMEDIATE].
        arrived_ptr: int32 [tiles, INTERMEDIATE / 128].
        hidden_ptr, hidden_scale_ptr: [num_places, INTERMEDIATE] e4m3 bits, and scales; a pair is
            at its place in the sorted order.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    expert, start = _find_tile(count_ptr, tile, EXPERTS, EXPERTS_P2, BLOCK_M)
    if expert < EXPERTS:
        member = start + tl.arange(0, BLOCK_M)
        live = member < tl.load(count_ptr + expert)
        place = tl.load(first_ptr + expert) + member
        pair = tl.load(pairs_ptr + place, mask=live, other=0)
        row = (pair // SLOTS).to(tl.int64)
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + row[None, :] * X_STRIDE + k[:, None]
        x_scale_ptrs = x_scale_ptr + row * SCALE_STRIDE
        w_ptrs = w13_ptr + expert.to(tl.int64) * (2 * INTERMEDIATE * HIDDEN)
        w_ptrs += _gate_row(column)[:, None] * HIDDEN + k[None, :]
        groups: tl.constexpr = HIDDEN // SCALE_GROUP
        scale_row = expert * (2 * INTERMEDIATE // SCALE_GROUP) + block * BLOCK_N // SCALE_GROUP
        # One number, as a vector: vector loads are pipelined, scalar ones are not.
        w_scale_ptrs = w13_scale_ptr + scale_row * groups + tl.zeros([BLOCK_M], tl.int32)
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        share: tl.constexpr = (groups + SPLITS - 1) // SPLITS * SCALE_GROUP
        end = tl.minimum((split + 1) * share, HIDDEN)
        for at in tl.range(split * share, end, BLOCK_K, num_stages=STAGES):
            group = at // SCALE_GROUP
            # Weights first: their addresses are known before the pairs' rows.
            w_gate = tl.load(w_ptrs + at)
            w_up = tl.load(w_ptrs + INTERLEAVE * HIDDEN + at)
            x = _operand(tl.load(x_ptrs + at), FP8_DOT)
            x_scale = tl.load(x_scale_ptrs + group)
            gate_scale = tl.load(w_scale_ptrs + group) * x_scale
            up_scale = tl.load(w_scale_ptrs + INTERMEDIATE // SCALE_GROUP * groups + group)
            gate += tl.dot(_operand(w_gate, FP8_DOT), x) * gate_scale[None, :]
            up += tl.dot(_operand(w_up, FP8_DOT), x) * (up_scale * x_scale)[None, :]
        weight_at = row * ROUTING_STRIDE + pair % SLOTS
        routing = tl.load(routing_ptr + weight_at, mask=live, other=0.0)
        if SPLITS == 1 and BLOCK_N == SCALE_GROUP:
            _store_hidden(
                gate, up, w13_bias_ptr, expert, routing, limit, place, live, block,
                hidden_ptr, hidden_scale_ptr, INTERMEDIATE, CLAMP, ALPHA, BETA,
            )  # fmt: skip
        else:
            sums = partial_ptr + place[None, :].to(tl.int64) * (2 * INTERMEDIATE)
            per_split = num_places.to(tl.int64) * (2 * INTERMEDIATE)
            own = sums + split * per_split + column[:, None]
            tl.store(own, gate, mask=live[None, :])
            tl.store(own + INTERMEDIATE, up, mask=live[None, :])
            tl.debug_barrier()  # all of this program's stores come before its arrival
            scale_group = block * BLOCK_N // SCALE_GROUP
            counter = arrived_ptr + tile * (INTERMEDIATE // SCALE_GROUP) + scale_group
            programs: tl.constexpr = SPLITS * (SCALE_GROUP // BLOCK_N)
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1:
                tl.debug_barrier()
                whole = scale_group * SCALE_GROUP + tl.arange(0, SCALE_GROUP)
                gate_sum = tl.zeros([SCALE_GROUP, BLOCK_M], tl.float32)
                up_sum = tl.zeros([SCALE_GROUP, BLOCK_M], tl.float32)
                for part in tl.static_range(SPLITS):
                    ptrs = sums + part * per_split + whole[:, None]
                    # Past L1, which is not coherent.
                    gate_sum += tl.load(ptrs, mask=live[None, :], other=0.0, cache_modifier=".cg")
                    up_sum += tl.load(
                        ptrs + INTERMEDIATE, mask=live[None, :], other=0.0, cache_modifier=".cg"
                    )
                _store_hidden(
                    gate_sum, up_sum, w13_bias_ptr, expert, routing, limit, place, live,
                    scale_group, hidden_ptr, hidden_scale_ptr, INTERMEDIATE, CLAMP, ALPHA, BETA,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    first_ptr,
    count_ptr,
    pairs_ptr,
    w2_ptr,
    w2_scale_ptr,
    w2_bias_ptr,
    routing_ptr,
    slots_ptr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUTING_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    FP8_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """slots[pair] = hidden[place of the pair] @ w2, bf16. Grid: (tiles, HIDDEN / BLOCK_N).

    With a `w2_bias_ptr` that is not None, plus the pair's routing weight times the bias.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert, start = _find_tile(count_ptr, tile, EXPERTS, EXPERTS_P2, BLOCK_M)
    if expert < EXPERTS:
        member = start + tl.arange(0, BLOCK_M)
        first = tl.load(first_ptr + expert)
        live = member < tl.load(count_ptr + expert)
        pair = tl.load(pairs_ptr + first + member, mask=live, other=0).to(tl.int64)
        # Columns without a pair read the tile's first: there is no row behind the last place.
        place = (first + tl.where(live, member, start)).to(tl.int64)
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        groups: tl.constexpr = INTERMEDIATE // SCALE_GROUP
        x_ptrs = hidden_ptr + place[None, :] * INTERMEDIATE + k[:, None]
        x_scale_ptrs = hidden_scale_ptr + place * groups
        w_ptrs = w2_ptr + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        w_ptrs += column[:, None] * INTERMEDIATE + k[None, :]
        scale_row = expert * (HIDDEN // SCALE_GROUP) + block * BLOCK_N // SCALE_GROUP
        w_scale_ptrs = w2_scale_ptr + scale_row * groups + tl.zeros([BLOCK_M], tl.int32)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in tl.range(0, INTERMEDIATE, BLOCK_K, num_stages=STAGES):
            group = at // SCALE_GROUP
            w = _operand(tl.load(w_ptrs + at), FP8_DOT)
            x = _operand(tl.load(x_ptrs + at), FP8_DOT)
            scale = tl.load(w_scale_ptrs + group) * tl.load(x_scale_ptrs + group)
            total += tl.dot(w, x) * scale[None, :]
        if w2_bias_ptr is not None:
            bias = tl.load(w2_bias_ptr + expert * HIDDEN + column)
            weight_at = pair // SLOTS * ROUTING_STRIDE + pair % SLOTS
            routing = tl.load(routing_ptr + weight_at, mask=live, other=0.0)
            total += bias[:, None] * routing[None, :]
        out = slots_ptr + pair[None, :] * HIDDEN + column[:, None]
        tl.store(out, total.to(tl.bfloat16), mask=live[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def combine_kernel(
    slots_ptr,
    ids_ptr,
    out_ptr,
    first_expert,
    HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = sum of this rank's slots, fp32, in slot order. Grid: (rows, HIDDEN / BLOCK up).

    Slots of other ranks, or of no expert, were not written and are not read.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        local = tl.load(ids_ptr + row * IDS_STRIDE + slot) - first_expert
        mine = (local >= 0) & (local < EXPERTS)
        value = tl.load(
            slots_ptr + (row * SLOTS + slot) * HIDDEN + column, mask=inside & mine, other=0.0
        )
        total += value.to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


# Whether this process's triton interprets kernels, on CPU tensors, for tests.
INTERPRETED = not isinstance(group_kernel, triton.JITFunction)
