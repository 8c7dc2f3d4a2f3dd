"""A context with two paths on a CPU: both compute the recipe, and log what they launch.

The backend's stand-in computes the reference; the small-batch kernel's too, but for 64 columns
per scale between the GEMMs. So results show, by their bits, which path a call took.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_config
from torch import Tensor

import megamoe_compile as mm
from megamoe_compile import context
from megamoe_compile.backends import paths
from megamoe_compile.backends.capability import Capability
from megamoe_compile.backends.runtimes import layer_spec
from megamoe_compile.custom_ops.call import Call, idle_call
from megamoe_compile.custom_ops.cuda import timing as graph_timing
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.paths import measured
from megamoe_compile.custom_ops.reference.recipe import moe_reference, stage
from megamoe_compile.custom_ops.reference.runtime import ReferenceRuntime
from megamoe_compile.custom_ops.small_batch import kernel as small_batch_cuda

WHEEL = "0.1.5.post1"
# Of (deep_gemm, small_batch): small_batch wins at 1 and 4, loses at 8 and 32.
TIMES = {1: (60.0, 40.0), 4: (100.0, 90.0), 8: (150.0, 160.5), 32: (200.0, 400.0)}


class FakeMega(ReferenceRuntime):
    """DeepGemmRuntime or TritonRuntime as far as the measured runtime sees it."""

    def __init__(self, machine: Machine, *options: Any) -> None:
        super().__init__(*options)
        self.version = machine.wheel
        self._name = machine.backend
        self.warm: set[int] = set()
        self.closed = False
        self._log = machine.launched

    def launch(self, call: Call) -> None:
        self._log.append((self._name, call.x.shape[0]))
        self.warm.add(call.x.shape[0])
        super().launch(call)

    def warmup(self, token_counts: Any, weights: Any, launch_count: Any) -> None:
        for tokens in sorted({0, *token_counts}):
            self.launch(idle_call(tokens, self.spec.top_k, weights(), launch_count))

    def close(self) -> None:
        self.closed = True


class FakeSmallBatch:
    """SmallBatch: its constructor, its call, `max_tokens` and `workspace_bytes`."""

    workspace_bytes = 1000
    intermediate_group = 64

    def __init__(self, machine: Machine, **options: Any) -> None:
        if machine.small_batch_error is not None:
            raise machine.small_batch_error
        machine.small_batch_options = options
        self.max_tokens = machine.max_tokens
        self._options = options
        self._log = machine.launched

    def reset(self) -> None:
        self._log.append(("reset", 0))

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_valid: Tensor,
        launch_count: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        y: Tensor,
        stream: int,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        assert stream == 0 and x.shape[0] <= self.max_tokens
        self._log.append(("small_batch", x.shape[0]))
        o = self._options
        launch_count += 1
        experts = o["num_experts"]
        routing = dict(num_experts=experts, num_local_experts=experts)
        o["invalid_count"] += stage(x, topk_ids, topk_weights, num_valid, **routing)[-1]
        y.copy_(
            moe_reference(
                *(x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_bias, w2_bias),
                num_valid=int(num_valid),
                swiglu_limit=o["swiglu_limit"],
                swiglu_alpha=o["swiglu_alpha"],
                swiglu_beta=o["swiglu_beta"],
                routed_scaling_factor=o["routed_scaling_factor"],
                num_shared_experts=o["num_shared_experts"],
                intermediate_group=64,
            )
        )


class Machine:
    """What the fakes do, and what was asked of them.

    Attributes:
        backend: what stands beside small_batch.
        times: microseconds by bucket: (backend, small_batch). max_tokens: of the small kernel.
        small_batch_error: raised by its constructor. timed: buckets, as they were timed.
        launched: (path, rows) of every launch. calls: what was timed last, per path.
        kept: for layers that must live.
    """

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float]] = dict(TIMES)
        self.backend = "deep_gemm"
        self.max_tokens = 32
        self.small_batch_error: BackendUnavailable | ValueError | None = None
        self.small_batch_options: dict[str, Any] = {}
        self.wheel = WHEEL
        self.gpu = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
        self.timed: list[int] = []
        self.launched: list[tuple[str, int]] = []
        self.calls: Mapping[str, Sequence[Any]] = {}
        self.kept: list[Any] = []

    def time(self, variants: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """The timer: runs each call once, as a real one runs it often."""
        self.calls = variants
        for calls in variants.values():
            for call in calls:
                call()
        bucket = variants[self.backend][0].args[0].x.shape[0]
        self.timed.append(bucket)
        return dict(zip((self.backend, "small_batch"), self.times[bucket], strict=True))

    def launches_of(self, call: Callable[[], object]) -> list[tuple[str, int]]:
        """What `call` launches."""
        del self.launched[:]
        call()
        return list(self.launched)

    def make_runtime(
        self, backend: str, config: Any, device: Any, group: Any, *options: Any
    ) -> FakeMega:
        assert backend == self.backend
        return FakeMega(self, layer_spec(config, backend), device, group)

    def install(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make the contexts of this process think that they are on an SM90 GPU, on the CPU."""
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(context, "probe", lambda *_: Capability(self.backend, "an SM90 GPU", {}))
        patch.setattr(paths, "_is_sm90", lambda device: True)
        patch.setattr(context, "make_runtime", self.make_runtime)
        patch.setattr(
            small_batch_cuda, "SmallBatch", lambda **options: FakeSmallBatch(self, **options)
        )
        patch.setattr(measured, "CurrentStream", lambda device: lambda: 0)
        patch.setattr(measured, "refuse_cold_capture", lambda tokens, warm: None)
        patch.setattr(graph_timing, "time_in_turn", self.time)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: self.gpu)
        assert paths.default_cache_dir().is_relative_to(cache)


def make_context(**options: Any) -> mm.MegaMoEContext:
    pins, num_sms = options.pop("paths", None), options.pop("num_sms", None)
    config = make_config(**options)
    return mm.MegaMoEContext(config, device="cpu", paths=pins, num_sms=num_sms)


def paths_of(context: mm.MegaMoEContext, *counts: int) -> str:
    """A letter per count: d for deep_gemm, s for small_batch."""
    return "".join(context.backend_for(count)[0] for count in counts)


def stored_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "megamoe_compile" / "paths").iterdir()
    return file
