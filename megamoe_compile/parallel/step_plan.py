"""StepPlan: one step as all ranks agree on it, and every size that follows from it.

Ranks that take part in one launch, one replay or one gather must come to the same decision. So a
decision here depends only on what all ranks know: all ranks' numbers of tokens, and settings that
are the same everywhere. What only one rank knows, such as that its own count is bad, travels with
the counts, and every rank raises the same error.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import as_int, is_int, mismatch
from .agreement import check_group, check_member, check_same, exchange, fingerprint, wait_for_all
from .step_settings import (
    Mode,
    Settings,
    as_ints,
    check_replicas,
    check_rows,
    count_problem,
)

# Rows of a slot behind the longest rank's, in sum_len mode: torch.compile makes graphs of their own
# for the sizes 0 and 1, and so the padding of a rank must have neither.
SPARE_ROWS = 2


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One decode or prefill step. Made by `agree`, `from_counts` or `of_bucket`.

    Attributes:
        num_tokens: real tokens of this rank. tokens_per_rank: of every rank, in rank order.
        bucket: the bucket that every rank replays; None: every rank runs eagerly.
        padded_tokens: rows that every rank brings in max_len mode: the bucket, or the largest
            count of all ranks.
        mode: how `dp_gather` lays out the rows of all ranks. "max_len": padded_tokens rows per
            rank. "sum_len": each rank's real rows, without padding between them.
        rank: this rank. width: tokens of a request, 1 + draft tokens.
        num_chunks: launches of an eager step at the capacity that the plan was made with, the same
            on every rank; 1 unless a rank is over it.
        attn_tp: ranks in a row that hold the same tokens, and split them before the experts.
        slot_rows: rows of one rank in the exchange of `dp_gather`.
    """

    num_tokens: int
    tokens_per_rank: tuple[int, ...]
    bucket: int | None
    padded_tokens: int
    mode: Mode
    rank: int
    width: int
    num_chunks: int
    attn_tp: int = 1
    slot_rows: int = 0
    # As tensors, because torch.compile would make a graph for each pattern of counts of 0 and 1.
    # max_len: num_tokens; None in of_bucket, where all rows count.
    _count: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    # sum_len: where the real rows of all ranks, and of this rank among them, stand.
    _gathered_at: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    _own_at: Tensor | None = dataclasses.field(default=None, compare=False, repr=False)

    # -- making one ------------------------------------------------------------------------------

    @classmethod
    def agree(
        cls,
        num_tokens: int,
        group: dist.ProcessGroup | None = None,
        buckets: Sequence[int] = (),
        width: int = 1,
        *,
        mode: Mode = "max_len",
        capacity: int | None = None,
        attn_tp: int = 1,
        problem: Exception | None = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> StepPlan:
        """Agree on a step with one small CPU collective. Every rank calls it, an idle one with 0.

        Args:
            num_tokens: this rank's real tokens, a multiple of width.
            group: over the ranks of the step, able to do collectives of CPU tensors; None means
                one rank.
            buckets: ascending numbers of tokens (requests x width); empty: never replay.
            width: tokens of a request, 1 + draft tokens.
            capacity: max_tokens_per_rank of the context, for num_chunks.
            attn_tp: size of the attention TP groups where it is above 1. Each is `attn_tp` ranks
                in a row, which hold the same tokens, pass the same count, and split the tokens
                before the experts (`attn_tp_split`).
            problem: an error that this rank's own checks of the step found. It is raised on every
                rank, instead of on this one with the others waiting.
            verify: also find out, and name, ranks that don't come (where the group is gloo), and
                check that all ranks hold the same plan. Two more exchanges.
            timeout: seconds to wait for the other ranks; default: the group's own timeout.

        Raises:
            ValueError: the same on every rank: a bad count or setting of any rank, or settings that
                differ. Or, before the collective, a group without CPU collectives.
            MegaMoEError: the other ranks did not come in time.
        """
        settings = Settings.of(buckets, width, mode, capacity, attn_tp)
        count, own_problem = 0, problem or settings.problem
        if own_problem is None:
            own_problem = count_problem("num_tokens", num_tokens, settings.width)
        if own_problem is None:
            count = int(num_tokens)
        check_group(group)
        if verify:
            wait_for_all(group, timeout)
        replies = exchange(group, (count, settings.fingerprint), own_problem, timeout=timeout)
        if any(reply[1] != replies[0][1] for reply in replies):
            check_same(group, "(buckets, width, mode, capacity, attn_tp)", settings.values)
        counts = tuple(reply[0] for reply in replies)
        plan = cls._decide(counts, 0 if group is None else dist.get_rank(group), settings)
        if verify:
            plan.check(group)
        return plan

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[int] | Tensor,
        rank: int | None = None,
        buckets: Sequence[int] = (),
        width: int = 1,
        *,
        mode: Mode = "max_len",
        capacity: int | None = None,
        attn_tp: int = 1,
        group: dist.ProcessGroup | None = None,
        num_ranks: int | None = None,
    ) -> StepPlan:
        """Make the plan from the counts of all ranks, which the engine has exchanged already.

        Args:
            counts: real tokens of every rank, in rank order: a list, a tuple or a CPU tensor.
            rank: this rank; default: from `group`, or 0 where there is one count.
            group: for rank and num_ranks; nothing is exchanged.
            num_ranks: what the length of counts must be; default: from `group`, else not checked.

        The other arguments are those of `agree`.

        Raises:
            ValueError: counts of another length, a bad count, a bad setting.
        """
        settings = Settings.of(buckets, width, mode, capacity, attn_tp)
        if settings.problem is not None:
            raise settings.problem
        if group is not None:
            check_member(group)
            num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        values = as_ints(counts)
        num_ranks = None if num_ranks is None else as_int("num_ranks", num_ranks)
        if num_ranks is not None and len(values) != num_ranks:
            raise ValueError(
                mismatch(
                    "len(counts)",
                    f"{num_ranks}, one count per rank",
                    len(values),
                    "Gather the counts over the ranks of the step, not of another group.",
                )
            )
        if rank is None and len(values) == 1:
            rank = 0
        if not is_int(rank) or not 0 <= rank < len(values):  # type: ignore[operator]
            raise ValueError(
                mismatch(
                    "rank",
                    f"0 to {len(values) - 1}, for {len(values)} counts",
                    rank,
                    "Pass this rank, and one count for every rank.",
                )
            )
        for index, value in enumerate(values):
            problem = count_problem(f"counts[{index}]", value, settings.width)
            if problem is not None:
                raise problem
        return cls._decide(tuple(map(int, values)), int(rank), settings)  # type: ignore[arg-type]

    @classmethod
    def of_bucket(cls, bucket: int, num_ranks: int = 1, rank: int = 0, width: int = 1) -> StepPlan:
        """What a captured graph of `bucket` is laid out for: every rank brings `bucket` rows."""
        bucket, rank = as_int("bucket", bucket), as_int("rank", rank)
        num_ranks = as_int("num_ranks", num_ranks, "an int >= 1", 1)
        width = as_int("width", width, "an int >= 1", 1)
        counts = (bucket,) * num_ranks
        return cls(bucket, counts, bucket, bucket, "max_len", rank, width, 1, slot_rows=bucket)

    @classmethod
    def _decide(cls, counts: tuple[int, ...], rank: int, settings: Settings) -> StepPlan:
        """The one place where a step is decided: from the largest count of all ranks."""
        check_replicas(counts, settings.attn_tp)
        longest = max(counts)
        at = bisect.bisect_left(settings.buckets, longest)
        bucket = settings.buckets[at] if at < len(settings.buckets) else None
        padded = longest if bucket is None else bucket
        slot, count, gathered_at, own_at = padded, None, None, None
        if settings.mode == "max_len":
            count = torch.tensor(counts[rank], dtype=torch.int64, device="cpu")
        else:
            slot = longest + SPARE_ROWS
            gathered_at = torch.cat([_range(n) + r * slot for r, n in enumerate(counts)])
            own_at = _range(counts[rank]) + sum(counts[:rank])
        return cls(
            counts[rank],
            counts,
            bucket,
            padded,
            settings.mode,
            rank,
            settings.width,
            _chunks(longest, settings.attn_tp, settings.capacity),
            settings.attn_tp,
            slot,
            count,
            gathered_at,
            own_at,
        )

    # -- what follows from it --------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """This rank has no tokens. It takes part all the same."""
        return self.num_tokens == 0

    @property
    def all_idle(self) -> bool:
        """No rank has tokens: all of them may leave the step out, together."""
        return self.max_tokens == 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens_per_rank)

    @property
    def max_tokens(self) -> int:
        """The largest count of all ranks: the only thing that decisions depend on."""
        return max(self.tokens_per_rank)

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens_per_rank)

    @property
    def local_rows(self) -> int:
        """Rows that this rank brings to `dp_gather`, and that `dp_scatter` gives back."""
        return self.padded_tokens if self.mode == "max_len" else self.num_tokens

    @property
    def gathered_rows(self) -> int:
        """Rows of the buffer that `dp_gather` gives."""
        if self.mode == "max_len":
            return self.num_ranks * self.padded_tokens
        return self.total_tokens

    def rows_of(self, rank: int) -> range:
        """The rows of the gathered buffer that hold the real tokens of `rank`."""
        if self.mode == "max_len":
            first = rank * self.padded_tokens
        else:
            first = sum(self.tokens_per_rank[:rank])
        return range(first, first + self.tokens_per_rank[rank])

    def real_rows(self, device: torch.device | str | None = None) -> Tensor:
        """Bool [gathered_rows], by default on the CPU: which rows of that buffer hold a token.

        A local count is no bound of a gathered buffer: in max_len mode each rank has its own
        padded slot. In a captured graph use `real_rows_of` with a device tensor of counts.
        """
        if self.mode == "sum_len":
            return torch.ones(self.gathered_rows, dtype=torch.bool, device=device or "cpu")
        return real_rows_of(self.counts(), self.padded_tokens).to(device or "cpu")

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """int32 [num_ranks], by default on the CPU: tokens_per_rank."""
        return torch.tensor(self.tokens_per_rank, dtype=torch.int32, device=device or "cpu")

    def chunks(self, capacity: int | None) -> int:
        """Launches of an eager step at `capacity` tokens per launch, the same on every rank."""
        return _chunks(self.max_tokens, self.attn_tp, capacity)

    def pad(self, rows: Tensor, fill: float = 0) -> Tensor:
        """This rank's [num_tokens, ...] rows with `fill` rows behind: [local_rows, ...], a copy."""
        check_rows("rows of the tensor to pad", rows.shape[0], self.num_tokens, "plan.num_tokens")
        missing = self.local_rows - self.num_tokens
        return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])

    def across_dp(self) -> StepPlan:
        """The plan of this rank's DP group: the ranks with the same place in their attention TP
        groups. For `dp_gather` over that group where attn_tp is above 1.
        """
        counts = self.tokens_per_rank[:: self.attn_tp]
        rank = self.rank // self.attn_tp
        settings = Settings.of((), self.width, self.mode, None, 1)
        plan = StepPlan._decide(counts, rank, settings)
        slot = self.padded_tokens if self.mode == "max_len" else plan.slot_rows
        return dataclasses.replace(
            plan,
            bucket=self.bucket,
            padded_tokens=self.padded_tokens,
            num_chunks=self.num_chunks,
            slot_rows=slot,
        )

    def check(self, group: dist.ProcessGroup | None) -> None:
        """Check that all ranks hold the same plan, each as its own rank: one small CPU collective.

        Raises:
            ValueError: on every rank, with the ranks whose plan is another than rank 0's.
        """
        check_group(group)
        values = (*self.agreed, self.num_ranks)
        problem = None
        own, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if (self.rank, self.num_ranks) != (own, size):
            problem = ValueError(
                mismatch(
                    "rank and num_ranks of the plan",
                    f"{(own, size)}, as in the group",
                    (self.rank, self.num_ranks),
                    "Make the plan over the ranks of this group.",
                )
            )
        replies = exchange(group, (fingerprint(values),), problem)
        if any(reply != replies[0] for reply in replies):
            check_same(group, "plan", values)

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return (
            self.tokens_per_rank,
            self.bucket,
            self.padded_tokens,
            self.mode,
            self.width,
            self.num_chunks,
            self.attn_tp,
        )


def real_rows_of(counts: Tensor, padded_tokens: int) -> Tensor:
    """Bool [R * padded_tokens]: which rows of a max_len buffer hold a token.

    Args:
        counts: integer [R] on the device. It may change between replays of a captured graph.
    """
    row = torch.arange(padded_tokens, dtype=torch.int64, device=counts.device)
    return (row < counts[:, None]).reshape(-1)


def _range(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _chunks(longest: int, attn_tp: int, capacity: int | None) -> int:
    """Launches for `longest` tokens of a rank, at least one: an idle rank launches too."""
    return 1 if capacity is None else max(1, -(-longest // (capacity * attn_tp)))
