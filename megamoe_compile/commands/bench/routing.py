"""Comparing two models of which each picks its own experts.

Where two experts nearly tie, a rounding decides which of them a router picks, and the layer's
output is then another one, however exact the arithmetic is. So tokens that took the same experts
in all layers are held to the bound of the arithmetic, and the others, which must be few, to a wide
one: what they show is that a token stayed near, and that nobody routes at random.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..decode.report import Parity
from ..decode.slot_cache import DecodeStep

# Of a token's largest logit, where an expert differs. Seen: up to 0.47, in small models of three
# kinds with 4 of 16 experts, where one weighs more than in a large model. The logits of two
# different tokens differ by 0.7 to 2.7 there, by 1.4 in the median.
REROUTED_TOLERANCE = 0.6
# Of all experts that tokens took. Seen: 0.02 on a GPU with 8 of 128 experts, where many nearly tie.
# Routers that have nothing to do with each other share next to none.
MOST_REROUTED = 0.05

Outputs = tuple[Tensor, Tensor, Tensor]


class RoutedStep(nn.Module):
    """A decode step that also returns which experts each token took.

    Args:
        taken: of `noting_ids` of the step's model.
    """

    def __init__(self, step: DecodeStep, taken: list[Tensor]) -> None:
        super().__init__()
        self.step = step
        self._taken = taken

    def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Outputs:
        """As DecodeStep, and ids [T, L, K] of the L layers with experts, in any order of the K."""
        self._taken.clear()
        logits, tokens = self.step(input_ids, positions, slots)
        return logits, tokens, torch.stack(self._taken, dim=1)


@dataclasses.dataclass
class RoutedParity:
    """A comparison of steps, of tokens routed alike and of the others.

    Args:
        tolerance: of a token's logits where both models took the same experts in this step.
    """

    tolerance: dataclasses.InitVar[float]
    alike: Parity = dataclasses.field(init=False)
    rerouted: Parity = dataclasses.field(init=False)
    taken: int = 0  # experts, over all tokens and layers
    changed: int = 0  # of them, those that the other model did not take

    def __post_init__(self, tolerance: float) -> None:
        self.alike = Parity(tolerance)
        self.rerouted = Parity(REROUTED_TOLERANCE)

    def compare(self, where: str, actual: Outputs, expected: Outputs) -> None:
        """Compare (logits [T, V], tokens [T], ids [T, L, K]) of one step, T >= 1."""
        ids = actual[2]
        changed = (ids[..., :, None] != expected[2][..., None, :]).all(-1)  # [T, L, K]
        self.taken += ids.numel()
        self.changed += int(changed.sum())
        elsewhere = changed.flatten(1).any(-1)
        for parity, mask in ((self.alike, ~elsewhere), (self.rerouted, elsewhere)):
            rows = mask.nonzero()[:, 0]
            if len(rows):
                got = actual[0][rows], actual[1][rows]
                want = expected[0][rows], expected[1][rows]
                parity.compare(where, got, want, rows.tolist())

    @property
    def holds(self) -> bool:
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """The first broken rule, if one is."""
        if self.changed > MOST_REROUTED * self.taken:
            return f"{self.changed} of {self.taken} experts differ"
        if not self.alike.tokens:
            return "no token took the same experts in all layers: take fewer layers"
        return self.alike.first_fault or self.rerouted.first_fault

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "holds": self.holds, "fault": self.fault}

    def text(self) -> str:
        alike, rerouted = self.alike, self.rerouted
        return (
            f"{'holds' if self.holds else 'FAILS'}; max relative error "
            f"{alike.max_relative_error:.4f}, bound {alike.tolerance}; {alike.decided} of "
            f"{alike.tokens} tokens lead by more than the bound"
            + (f"; fault: {self.fault}" if self.fault else " and are equal")
            + f". {rerouted.tokens} more tokens took another expert somewhere ({self.changed} of "
            f"{self.taken} experts): error {rerouted.max_relative_error:.4f}, bound "
            f"{rerouted.tolerance}"
        )
