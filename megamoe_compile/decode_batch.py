"""Which requests are in flight at each decode step, and what they feed to it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_PROMPT = 4  # tokens, fed one per step: decode is the only kind of step here


def batch_sizes(steps: int, buckets: Sequence[int], seed: int = 0) -> list[int]:
    """Requests in flight at each step: rising, falling, 0, full buckets and between buckets."""
    rng = random.Random(seed)
    sizes: list[int] = []
    while len(sizes) < steps:
        between = [rng.randint(low + 1, high) for low, high in itertools.pairwise(buckets)]
        sizes += sorted([*buckets, *between])
        sizes += [rng.randint(0, buckets[-1]) for _ in range(4)]
        sizes += sorted({*between, buckets[0], buckets[-1]}, reverse=True)
        sizes += [0] * rng.randint(1, 2)
    return sizes[:steps]


@dataclasses.dataclass
class Request:
    slot: int
    prompt: list[int]
    position: int = 0  # of the next token to feed
    last: int = 0  # the token that the model chose last

    @property
    def token(self) -> int:
        return self.prompt[self.position] if self.position < len(self.prompt) else self.last


class Batch:
    """The requests in flight, in row order. Neither rows nor slots say when a request came."""

    def __init__(self, num_slots: int, max_length: int, vocab_size: int, seed: int = 0) -> None:
        self.requests: list[Request] = []
        self._free = list(range(num_slots))
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def resize(self, size: int) -> None:
        """Let finished requests leave, then others, or new ones arrive, until there are `size`."""
        for row in reversed(range(len(self.requests))):
            if self.requests[row].position == self._max_length:
                self._leave(row)
        while len(self.requests) > size:
            self._leave(self._rng.randrange(len(self.requests)))
        while len(self.requests) < size:
            slot = self._free.pop(self._rng.randrange(len(self._free)))
            length = self._rng.randint(1, min(MAX_PROMPT, self._max_length))
            prompt = [self._rng.randrange(self._vocab_size) for _ in range(length)]
            self.requests.append(Request(slot, prompt))

    def _leave(self, row: int) -> None:
        # As engines do it: the last row moves into the gap.
        self._free.append(self.requests[row].slot)
        self.requests[row] = self.requests[-1]
        self.requests.pop()

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        columns = {
            "input_ids": [request.token for request in self.requests],
            "positions": [request.position for request in self.requests],
            "slots": [request.slot for request in self.requests],
        }
        return {
            name: torch.tensor(column, dtype=torch.int64, device=device)
            for name, column in columns.items()
        }

    def advance(self, tokens: Tensor) -> None:
        """Take the chosen tokens [R], one per row."""
        for request, token in zip(self.requests, tokens.tolist(), strict=True):
            request.position += 1
            request.last = token
