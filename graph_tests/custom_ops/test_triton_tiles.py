"""The triton backend's sizes of tiles, and its kernels compiled for GPUs that are not here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from megamoe_compile.custom_ops.triton.tiling import Device, Tiling

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
FP8 = Device(132, 232448, fp8_dot=True)  # an H200


@pytest.mark.parametrize("experts", [1, 3, 32, 256])
def test_tiles_hold_every_routing(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    for pairs in (1, 2, 17, 63, 64, 192, 1000, 5000):
        tiling = Tiling.of(pairs, experts, 4096, 2048, FP8)
        worst = torch.ones(experts, dtype=torch.long)
        worst[0] += max(pairs - experts, 0)
        worst[pairs:] = 0
        for counts in (
            worst,
            torch.bincount(torch.randint(experts, (pairs,), generator=generator)),
        ):
            assert int(counts.sum()) == pairs
            assert int((-(-counts // tiling.block_m)).sum()) <= tiling.tiles


def test_small_batches_fill_the_gpu() -> None:
    for hidden, intermediate, pairs in ((4096, 2048, 6), (2048, 768, 8), (7168, 2048, 8)):
        tiling = Tiling.of(pairs, 256, hidden, intermediate, FP8)
        assert tiling.tiles * (intermediate // tiling.block_n) * tiling.splits >= 132
        assert tiling.tiles * (hidden // tiling.down_block_n) >= 132


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_gemms_compile_for(arch: int, bias: bool) -> None:
    """16-byte asynchronous loads, this GPU's tensor core instruction, its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    from megamoe_compile.custom_ops.triton import kernels as triton_moe

    shared_memory = {80: 166912, 89: 101376, 90: 232448}[arch]
    gpu = Device(108, shared_memory, fp8_dot=arch >= 89)
    code = "fp8e4nv" if gpu.fp8_dot else "u8"
    tiling = Tiling.of(8 * 6, 256, 4096, 2048, gpu)
    geometry = dict(HIDDEN=4096, INTERMEDIATE=2048, EXPERTS=256, EXPERTS_P2=256)
    geometry |= dict(FP8_DOT=gpu.fp8_dot, BLOCK_M=tiling.block_m, BLOCK_K=tiling.block_k)
    geometry |= dict(SLOTS=6, ROUTING_STRIDE=1088)
    row = dict(X_STRIDE=4352, SCALE_STRIDE=1088, CLAMP=True, ALPHA=1.0, BETA=0.0)
    if bias:
        row |= dict(ALPHA=1.702, BETA=1.0)
    int32 = dict.fromkeys(("first_ptr", "count_ptr", "pairs_ptr", "arrived_ptr"), "*i32")
    types = int32 | {"limit": "fp32", "num_places": "i32", "slots_ptr": "*bf16"}
    types |= dict.fromkeys(("x_ptr", "w13_ptr", "w2_ptr"), f"*{code}")
    for kernel, constants, warps in (
        (
            triton_moe.gate_up_kernel,
            geometry | row | dict(BLOCK_N=tiling.block_n, SPLITS=2, STAGES=tiling.gate_up_stages),
            tiling.gate_up_warps,
        ),
        (
            triton_moe.down_kernel,
            geometry | dict(BLOCK_N=tiling.down_block_n, STAGES=tiling.down_stages),
            tiling.down_warps,
        ),
    ):
        hidden = "*u8" if kernel is triton_moe.gate_up_kernel else f"*{code}"
        names = kernel.arg_names
        if not bias:
            constants |= {name: None for name in names if name.endswith("_bias_ptr")}
        source = triton.compiler.ASTSource(
            kernel,
            {
                name: "constexpr"
                if name in constants
                else (types | {"hidden_ptr": hidden}).get(name, "*fp32")
                for name in names
            },
            constants,
            {
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(names)
                if name.endswith("_ptr") and name not in constants
            },
        )
        built = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}
        )
        ptx = built.asm["ptx"]
        assert built.metadata.shared <= shared_memory
        assert "cp.async.cg.shared.global" in ptx
        assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx
        assert ("e4m3" in ptx) == gpu.fp8_dot
