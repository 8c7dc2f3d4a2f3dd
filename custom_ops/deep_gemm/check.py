"""Run the deep_gemm backend once, for real, in a process of its own.

A wheel built for another torch often imports and then crashes at its first call, so that an import
proves nothing and a call in this process could take it down. `run_check` starts this module as a
child, which launches the kernel for one token of the given shape and compares it with the
reference. A success is remembered in the cache directory, per torch, wheel, GPU and shape.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..call import Call, LayerSpec, Weights
from ..cuda.build import default_cache_dir
from .api import installed_version

CHECK_SECONDS = 180  # a cold check compiles two kernels and the op
MAX_RELATIVE_ERROR = 0.03  # of one token; 0.026 was seen


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int  # padded
    top_k: int
    device_index: int


def run_check(shape: Shape) -> str | None:
    """None if the kernel runs and is right here, else one sentence that says what happened."""
    marker = _marker(shape)
    if marker.exists():
        return None
    # The child must see the same packages, the checkout among them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", __spec__.name, json.dumps(asdict(shape))]
    try:
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"a launch of the kernel did not end within {CHECK_SECONDS} s"
    if child.returncode == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(child.stdout)
        return None
    lines = (child.stderr or child.stdout).strip().splitlines() or ["no output"]
    return f"a launch of the kernel failed (exit code {child.returncode}): {lines[-1]}"


def _marker(shape: Shape) -> Path:
    facts = [
        torch.__version__,
        installed_version(),
        torch.cuda.get_device_name(shape.device_index),
        asdict(shape),
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return default_cache_dir() / "checks" / f"{digest}.json"


def _check(shape: Shape) -> float:
    from ..reference.recipe import interleave_gate_up, moe_reference, quantize_blocks
    from .runtime import DeepGemmRuntime

    device = torch.device("cuda", shape.device_index)
    torch.cuda.set_device(device)
    generator = torch.Generator(device).manual_seed(0)
    h, i, k = shape.hidden_size, shape.intermediate_size, shape.top_k

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

    def expert(rows: int, columns: int, interleave: bool) -> tuple[torch.Tensor, torch.Tensor]:
        w = random(rows, columns) * columns**-0.5
        q, scale = quantize_blocks(w)
        return interleave_gate_up(q) if interleave else q, scale

    first = [expert(2 * i, h, True) for _ in range(k)]
    second = [expert(h, i, False) for _ in range(k)]
    w13, w13_scale = (torch.stack(part) for part in zip(*first, strict=True))
    w2, w2_scale = (torch.stack(part) for part in zip(*second, strict=True))
    weights = Weights(w13, w13_scale, w2, w2_scale)
    runtime = DeepGemmRuntime(LayerSpec(h, i, num_experts=k, top_k=k, capacity=1), device)
    x = random(1, h).bfloat16()
    ids = torch.arange(k, dtype=torch.int32, device=device).reshape(1, k)
    scores = random(1, k).sigmoid()
    out = torch.full_like(x, float("nan"))
    one = torch.ones(1, dtype=torch.int32, device=device)
    runtime.launch(Call(x, ids, scores, weights, one, torch.zeros_like(one), out))
    want = moe_reference(
        x, ids, scores, *weights, intermediate_group=runtime.intermediate_group
    ).float()
    return float((out.float() - want).norm() / want.norm())


def main(argument: str) -> int:
    error = _check(Shape(**json.loads(argument)))
    if not error <= MAX_RELATIVE_ERROR:  # NaN fails too
        print(f"relative error {error}, expected at most {MAX_RELATIVE_ERROR}", file=sys.stderr)
        return 1
    print(json.dumps({"relative_error": error}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
