"""The `deep_gemm` backend: DeepGEMM's SM90 MegaMoE kernel behind the op.

Nothing is decided per call that construction could decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import Call, LayerSpec, Weights, idle_call
from ..cuda.stream import CurrentStream, refuse_cold_capture
from ..errors import BackendUnavailable
from ..staging.pre_dispatch import PreDispatch, Routing, StagingBuffer
from ..symmetric.memory import SymmetricBuffer, agree, ranks_on_my_device
from .api import arithmetic_problem, load_api
from .native import NativeLaunch, TvmCall, current_stream_address, install


class DeepGemmRuntime:
    """One rank's symmetric buffer, staging kernel and mega kernel. Construction is collective.

    Args:
        spec: its intermediate_size is padded to a multiple of 256.
        num_sms: SMs that the kernel's grid takes, even; None for all, or for this rank's share
            where several ranks run on one GPU (the kernel spins until its whole grid is resident).

    Raises:
        BackendUnavailable: no wheel that loads, or arithmetic that its kernel does not have.
    """

    def __init__(
        self,
        spec: LayerSpec,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        num_sms: int | None = None,
    ) -> None:
        problem = arithmetic_problem(spec)
        if problem is not None:
            raise BackendUnavailable(problem)
        self.device = device
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.api = load_api()
        self.version = self.api.wheel
        self.intermediate_group = self.api.intermediate_group
        self.top_k = spec.top_k
        local = spec.num_experts // self.world_size
        rows = local + spec.num_shared_experts
        alignment = self.api.token_alignment()
        padded_capacity = math.ceil(spec.capacity / alignment) * alignment
        layout = (
            self.world_size,
            rows * self.world_size,
            padded_capacity,
            spec.num_slots,
            spec.hidden_size,
            spec.intermediate_size,
            True,
            "swiglu",
        )
        self.buffer_bytes = self.api.buffer_bytes(layout)
        self.buffer = SymmetricBuffer(self.buffer_bytes, device, group)
        self.invalid_count = torch.zeros(1, dtype=torch.int32, device=device)
        x, scale, ids, weights = self.api.input_views(self.buffer.tensor, layout)
        self._stage = PreDispatch(
            StagingBuffer(x, scale, ids, weights),
            Routing(
                spec.num_experts,
                local,
                spec.num_shared_experts,
                self.rank,
                spec.routed_scaling_factor,
            ),
            self.invalid_count,
            # A programmatic launch pays only between kernels that trigger early. Around a mega
            # kernel that does not, it cost 0.25 us per layer on an H200.
            pdl=self.api.early_trigger,
            early_trigger=self.api.early_trigger,
        )
        mega = self.api.bind(
            self.buffer.tensor,
            self.buffer.pointers,
            self.rank,
            padded_capacity,
            rows * self.world_size,
            spec.num_slots,
            spec.swiglu.limit,
        )
        sharers = ranks_on_my_device(self.buffer.peers, self.rank)
        if num_sms is None and sharers > 1:
            all_sms = torch.cuda.get_device_properties(device).multi_processor_count
            num_sms = all_sms // sharers // 2 * 2
        self._mega = mega if num_sms is None else self._with_num_sms(mega, num_sms)
        # The same launches from C++, where the binding has a C interface.
        self.native: NativeLaunch | None = None
        if isinstance(mega, TvmCall):
            what = "the C++ kernel of the op"
            _, c_call = agree(group, what, lambda: (install(), mega.in_c()))
            if num_sms is None:
                self.native = NativeLaunch(
                    stage=self._stage.address,
                    mega=c_call,
                    current_stream=current_stream_address(),
                    device_index=device.index,
                    w13_shape=(rows, 2 * spec.intermediate_size, spec.hidden_size),
                    top_k=spec.top_k,
                    capacity=padded_capacity,
                    keep_alive=self._stage,
                )
        self.warm: set[int] = set()  # numbers of tokens that were launched
        self._stream = CurrentStream(device)

    def _with_num_sms(self, mega: Callable[..., object], num_sms: int) -> Callable[..., object]:
        # DeepGEMM's setting is process-wide: other calls of the process must find their own again.
        get, put = self.api.get_num_sms, self.api.set_num_sms

        def launch(*args: Tensor) -> None:
            before = get()
            put(num_sms)
            try:
                mega(*args)
            finally:
                put(before)

        return launch

    def launch(self, call: Call) -> None:
        """See `library.Runtime`. A number of tokens that was never launched may compile here."""
        tokens = call.x.shape[0]
        first = tokens not in self.warm
        if first:
            refuse_cold_capture(tokens, self.warm)
            self.warm.add(tokens)
        self._stage(*call[:3], call.num_valid, call.launch_count, self._stream())
        self._mega(call.out, *call.weights[:4])
        if first and self.native is not None:
            self.native.warm(tokens)

    def warmup(
        self, token_counts: Sequence[int], weights: Callable[[], Weights], launch_count: Tensor
    ) -> None:
        """Compile and load every kernel that these numbers of tokens reach. Collective.

        In each round the ranks launch different numbers of tokens, so that they compile different
        variants at the same time and find the others' in the cache on disk.
        """
        counts = sorted({0, *token_counts})
        any_weights = weights()
        for turn in range(len(counts)):
            tokens = counts[(turn + self.rank) % len(counts)]
            self.launch(idle_call(tokens, self.top_k, any_weights, launch_count))
            torch.cuda.synchronize(self.device)
            if self.group is not None:
                dist.barrier(group=self.group)

    def reset(self) -> None:
        """Zero the buffer on all ranks. Collective."""
        self.buffer.reset()

    def close(self) -> None:
        """Wait for this rank's launches, then let go of the buffer. Never waits for a peer."""
        if self.native is not None:
            self.native.leave()
        torch.cuda.synchronize(self.device)
