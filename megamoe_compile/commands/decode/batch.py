"""Which requests are in flight at each decode step, and what they feed to it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_PROMPT = 4  # tokens, fed like all others: decode is the only kind of step here
SHARES = (0.0, 0.25, 0.5, 1.0)  # of a rank, of the busiest rank's requests
KEEP_SHARES = 5  # steps


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


def rank_sizes(
    steps: int, buckets: Sequence[int], ranks: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Requests in flight on every rank at each step; the same on every rank that asks.

    The busiest rank has `batch_sizes`. Which one that is, and what share of it the others have,
    stays for a few steps: a rank without a share is idle while others are not.
    """
    rng = random.Random(f"shares {seed}")
    rows, shares = [], [1.0]
    for number, size in enumerate(batch_sizes(steps, buckets, seed)):
        if number % KEEP_SHARES == 0:
            shares = [1.0, *(rng.choice(SHARES) for _ in range(ranks - 1))]
            rng.shuffle(shares)
        rows.append(tuple(round(share * size) for share in shares))
    return rows


@dataclasses.dataclass
class Request:
    slot: int
    prompt: list[int]
    position: int = 0  # of the next token to feed
    known: list[int] = dataclasses.field(default_factory=list)  # the prompt and the chosen tokens

    def __post_init__(self) -> None:
        self.known = self.known or list(self.prompt)

    def feed(self, width: int) -> list[int]:
        """`width` tokens from `position` on: what is known, and drafts after it."""
        tokens = list(self.known)
        while len(tokens) < self.position + width:
            tokens.append(_draft(tokens))
        return tokens[self.position : self.position + width]

    def accept(self, chosen: Sequence[int]) -> int:
        """Keep the longest prefix of what was fed that the model agrees with; returns its length.

        Args:
            chosen: the model's choice after each token that was fed. The first token is always
                right; another is if it is of the prompt or what the model chose before it.
        """
        fed, kept = self.feed(len(chosen)), 1
        sure = len(self.known) - self.position
        while kept < len(fed) and (kept < sure or fed[kept] == chosen[kept - 1]):
            kept += 1
        self.position += kept
        self.known += fed[sure:kept]
        if len(self.known) == self.position:
            self.known.append(chosen[kept - 1])
        return kept


def _draft(tokens: Sequence[int]) -> int:
    """A cheap guess: what followed the last token when it stood before, or the same once more."""
    for at in range(len(tokens) - 2, -1, -1):
        if tokens[at] == tokens[-1]:
            return tokens[at + 1]
    return tokens[-1]


class Batch:
    """The requests in flight, in row order. Neither rows nor slots say when a request came.

    Args:
        max_length: tokens of a request, after which it leaves. Up to width - 1 drafts stand behind
            them, so that a slot has max_length + width - 1 positions.
        width: W, tokens that a request feeds per step: 1 + drafts.
    """

    def __init__(
        self, num_slots: int, max_length: int, vocab_size: int, seed: int = 0, width: int = 1
    ) -> None:
        self.requests: list[Request] = []
        self.width = width
        self._free = list(range(num_slots))
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def resize(self, size: int) -> None:
        """Let finished requests leave, then others, or new ones arrive, until there are `size`."""
        for row in reversed(range(len(self.requests))):
            if self.requests[row].position >= self._max_length:
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
        """input_ids and positions [R, W], slots [R]."""
        rows, width = len(self.requests), self.width
        columns = {
            "input_ids": [request.feed(width) for request in self.requests],
            "positions": [[r.position + i for i in range(width)] for r in self.requests],
            "slots": [request.slot for request in self.requests],
        }
        shapes = {"input_ids": (rows, width), "positions": (rows, width), "slots": (rows,)}
        return {
            name: torch.tensor(column, dtype=torch.int64, device=device).reshape(shapes[name])
            for name, column in columns.items()
        }

    def advance(self, tokens: Tensor) -> int:
        """Take the chosen tokens [R * W]; returns how many of the fed tokens are kept."""
        chosen = tokens.view(-1, self.width).tolist()
        return sum(
            request.accept(choices) for request, choices in zip(self.requests, chosen, strict=True)
        )
