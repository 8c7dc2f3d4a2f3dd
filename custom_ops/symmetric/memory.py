"""A symmetric (peer-mapped) buffer of one group, made once, at construction.

Every step that can fail on one rank alone is followed by an exchange of outcomes, so that all
ranks raise the same error or none does: a rank that gave up must not leave the others waiting.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BackendUnavailable, mismatch

T = TypeVar("T")
OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclasses.dataclass(frozen=True)
class Peer:
    """Where a rank runs."""

    host: str
    device: str  # UUID of the GPU, the same for two processes that share it
    allows_overlap: bool


def agree(group: dist.ProcessGroup | None, what: str, attempt: Callable[[], T]) -> T:
    """Run `attempt` on every rank; raise BackendUnavailable on all if it raised on any."""
    result: T | None = None
    failure: str | None = None
    try:
        result = attempt()
    except Exception as error:  # reported on every rank below
        failure = f"{type(error).__name__}: {error}"
    failures: list[Any] = [failure]
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if failed:
        raise BackendUnavailable(f"{what} failed on {len(failed)} rank(s). " + "; ".join(failed))
    assert result is not None
    return result


def this_peer(device: torch.device) -> Peer:
    """The host (boot, not only name: containers share names) and GPU of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = platform.node() + (f" ({boot.read_text().strip()[:8]})" if boot.exists() else "")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Peer(host, uuid, os.environ.get(OVERLAP_VARIABLE) == "1")


def check_peers(peers: list[Peer]) -> None:
    """Raise unless all ranks are on one host, and on GPUs of their own (or may share)."""
    hosts: dict[str, list[int]] = {}
    devices: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        hosts.setdefault(peer.host, []).append(rank)
        devices.setdefault(peer.device, []).append(rank)
    if len(hosts) > 1:
        raise BackendUnavailable(
            mismatch(
                "hosts of the group",
                "one, whose GPUs NVLink connects",
                ", ".join(f"ranks {ranks} on {host}" for host, ranks in hosts.items()),
                "Peer memory ends at the host: make one expert-parallel group per host.",
            )
        )
    for device, ranks in devices.items():
        if len(ranks) > 1 and not all(peers[rank].allows_overlap for rank in ranks):
            raise BackendUnavailable(
                mismatch(
                    f"GPU {device}",
                    "one rank",
                    f"ranks {ranks}",
                    "Call torch.cuda.set_device(local_rank) first. To share a GPU on purpose (for "
                    f"tests), set {OVERLAP_VARIABLE}=1 before torch is imported.",
                )
            )


def ranks_on_my_device(peers: list[Peer], rank: int) -> int:
    return sum(peer.device == peers[rank].device for peer in peers)


class SymmetricBuffer:
    """`nbytes` of zeroed memory on each rank, mapped into every other rank.

    Args:
        group: None for one rank, which needs plain memory only.

    Attributes:
        tensor: int8 [nbytes]. pointers: this rank's address of every rank's buffer, by rank.
        peers: where the ranks run.

    Raises:
        BackendUnavailable: on every rank, with the ranks that failed and why.
    """

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.nbytes = nbytes
        self.group = group
        self.peers = self._exchange_peers(device, group)
        check_peers(self.peers)
        self._handle: Any = None
        self.tensor: Tensor = agree(
            group, f"allocating {nbytes / 1e9:.2f} GB", lambda: self._allocate(device)
        )
        self.pointers = agree(group, "mapping the peers' buffers", self._rendezvous)
        self.reset()

    @staticmethod
    def _exchange_peers(device: torch.device, group: dist.ProcessGroup | None) -> list[Peer]:
        mine = this_peer(device)
        if group is None:
            return [mine]
        peers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(peers, mine, group=group)
        return peers

    def _allocate(self, device: torch.device) -> Tensor:
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if self.nbytes > free + cached:
            raise MemoryError(
                mismatch(
                    f"memory of {device}",
                    f"{self.nbytes / 1e9:.2f} GB for the symmetric buffer",
                    f"{(free + cached) / 1e9:.2f} GB free",
                    "Lower max_tokens_per_rank: the buffer grows with it.",
                )
            )
        if self.group is None:
            return torch.empty(self.nbytes, dtype=torch.int8, device=device)
        import torch.distributed._symmetric_memory as symm_mem

        return symm_mem.empty(self.nbytes, dtype=torch.int8, device=device)

    def _rendezvous(self) -> list[int]:
        if self.group is None:
            return [self.tensor.data_ptr()]
        import torch.distributed._symmetric_memory as symm_mem

        self._handle = symm_mem.rendezvous(self.tensor, self.group)
        pointers = [int(pointer) for pointer in self._handle.buffer_ptrs]
        check_pointers(pointers)
        return pointers

    def peer(self, rank: int) -> Tensor:
        """int8 [nbytes]: the buffer of `rank`, as it is mapped here."""
        if self._handle is None:
            return self.tensor
        buffer: Tensor = self._handle.get_buffer(rank, (self.nbytes,), torch.int8)
        return buffer

    def barrier(self) -> None:
        """Wait on the device, on the current stream, until every rank has come here. Captures."""
        if self._handle is not None:
            self._handle.barrier()

    def reset(self) -> None:
        """Zero the buffer on all ranks. Collective; every rank must have stopped launching."""
        torch.cuda.synchronize(self.tensor.device)
        if self.group is not None:
            dist.barrier(group=self.group)
        self.tensor.zero_()
        torch.cuda.synchronize(self.tensor.device)
        if self.group is not None:
            dist.barrier(group=self.group)


def check_pointers(pointers: list[int]) -> None:
    """Raise if a peer's memory is not mapped here: the kernel would fault at its first store."""
    missing = [rank for rank, pointer in enumerate(pointers) if pointer == 0]
    if missing:
        raise BackendUnavailable(
            mismatch(
                "peer pointers",
                "one mapped address per rank",
                f"0 for ranks {missing}",
                "Their GPUs must be reachable over NVLink (see `nvidia-smi topo -m`).",
            )
        )
