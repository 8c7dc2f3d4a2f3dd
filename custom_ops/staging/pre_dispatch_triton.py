# mypy: ignore-errors
"""The Triton twin of csrc/staging/pre_dispatch.cu, which `TritonPreDispatch` launches.

`TritonRuntime` launches it too, into rows that hold a token's everything side by side. A module of
its own, so that only who asks for the twin imports triton. It encodes e4m3 in integer
arithmetic: GPUs before SM89 have no conversion instruction, and so every GPU and the interpreter
give the same bits.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # columns per scale


@triton.jit
def _encode_e4m3(values):
    """fp32 -> e4m3 bits as int32: nearest even, saturating at 448, NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448.0; integers order like non-negative floats
    # Normal numbers: round at bit 20, then move the exponent's bias from 127 to 7.
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the unit is 2**-9, which is the last bit of a float32 at 2**14: add rounds there.
    shifted = clamped.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit(
    do_not_specialize=["x_stride", "ids_stride", "weights_stride", "num_tokens", "num_rows"],
    do_not_specialize_on_alignment=[
        *("x_ptr", "ids_ptr", "weights_ptr"),
        *("num_valid_ptr", "launch_count_ptr"),
    ],
)
def pre_dispatch_kernel(
    x_ptr,
    x_stride,
    ids_ptr,
    ids_stride,
    weights_ptr,
    weights_stride,
    num_valid_ptr,
    launch_count_ptr,
    num_tokens,
    num_rows,
    buf_x_ptr,
    buf_scale_ptr,
    buf_ids_ptr,
    buf_weights_ptr,
    invalid_count_ptr,
    routed_scaling_factor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    FIRST_SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,  # scales per program
    SLOTS: tl.constexpr,  # power of two, at least TOP_K + NUM_SHARED
    X_STRIDE: tl.constexpr,  # elements from row to row of the buffer
    SCALE_STRIDE: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
):
    """Grid: (max(num_rows, 1), ceil(HIDDEN / 128 / GROUPS)). See `stage` for what it writes.

    Rows from num_tokens up to num_rows get ids -1 and weights 0.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if (row == 0) & (part == 0):
        tl.atomic_add(launch_count_ptr, 1)
    if row < num_rows:
        valid = (row < num_tokens) & (row < tl.load(num_valid_ptr))
        if part == 0:
            slot = tl.arange(0, SLOTS)
            routed = (slot < TOP_K) & valid
            ids = tl.load(ids_ptr + row * ids_stride + slot, mask=routed, other=-1).to(tl.int64)
            weights = tl.load(weights_ptr + row * weights_stride + slot, mask=routed, other=0.0)
            weights = weights.to(tl.float32) * routed_scaling_factor
            in_range = (ids >= 0) & (ids < NUM_EXPERTS) & valid
            invalid = tl.sum((valid & ~in_range & (ids != -1)).to(tl.int32), axis=0)
            if invalid > 0:
                tl.atomic_add(invalid_count_ptr, invalid)
            ids = tl.where(in_range, ids + ids // NUM_LOCAL * NUM_SHARED, -1)
            weights = tl.where(in_range, weights, 0.0)
            shared = valid & (slot >= TOP_K)
            ids = tl.where(shared, FIRST_SHARED + slot - TOP_K, ids)
            weights = tl.where(shared, 1.0, weights)
            inside = slot < TOP_K + NUM_SHARED
            tl.store(buf_ids_ptr + row * IDS_STRIDE + slot, ids, mask=inside)
            tl.store(buf_weights_ptr + row * WEIGHTS_STRIDE + slot, weights, mask=inside)
        if valid:
            group = part * GROUPS + tl.arange(0, GROUPS)
            in_row = group < HIDDEN // GROUP
            columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x_ptrs = x_ptr + row * x_stride + columns
            if ALIGNED:  # 16-byte loads
                x_ptrs = tl.max_contiguous(tl.multiple_of(x_ptrs, [1, 16]), [1, 8])
            values = tl.load(x_ptrs, mask=in_row[:, None], other=0.0).to(tl.float32)
            magnitude = tl.abs(values)
            # A NaN does not enter the maximum, on no target.
            amax = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis=1)
            # `/` is approximate on a GPU; the recipe divides exactly.
            scale = tl.div_rn(tl.maximum(amax, 1e-10), tl.full([GROUPS], 448.0, tl.float32))
            inverse = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)
            code = _encode_e4m3(values * inverse[:, None]).to(tl.uint8)
            tl.store(buf_x_ptr + row * X_STRIDE + columns, code, mask=in_row[:, None])
            tl.store(buf_scale_ptr + row * SCALE_STRIDE + group, scale, mask=in_row)
