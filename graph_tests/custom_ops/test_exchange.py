"""The ops of the symmetric exchange, over stand-ins for peer memory: one process, and several."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import whole_numbers
from helpers import assert_same, make_layer, outcome, random_inputs, refuses
from step_helpers import WORLDS, Ranks, plan_of
from torch import Tensor
from torch._dynamo.utils import counters

import megamoe_compile as mm
from megamoe_compile.custom_ops.symmetric import exchange
from megamoe_compile.custom_ops.symmetric.exchange import SymmetricExchange


def rows_of(count: int, *columns: int) -> Tensor:
    return torch.randn(count, *(columns or (4,)))


# -- one process, three ranks ---------------------------------------------------------------------


class Echo(exchange.Transport):
    """Three ranks in one: every peer brings what this one does, scaled by its number."""

    def gather(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(torch.cat([rows, rows * 2, rows * 3]))

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(sum(rows.chunk(3)))


class EchoExchange(SymmetricExchange):
    def _connect(self, device: torch.device, group: Any) -> exchange.Transport:
        self.num_ranks = 3
        return Echo()


@pytest.fixture
def echo() -> Iterator[EchoExchange]:
    made = EchoExchange(8, 16, device="cpu")
    yield made
    made.close()


OPS = pytest.mark.parametrize("op", [exchange.gather_rows, exchange.reduce_scatter_rows], ids=str)


@OPS
@pytest.mark.parametrize("rows", [0, 3, 6])
def test_opcheck(op: Any, rows: int, echo: EchoExchange) -> None:
    for x in (rows_of(rows), rows_of(rows, 2, 2), rows_of(2 * rows)[::2], rows_of(rows, 8)[:, 2:6]):
        torch.library.opcheck(op, (x, *echo._arguments()))


@OPS
def test_exchange_ops_alias_nothing_and_mutate_only_the_order(op: Any) -> None:
    schema = op._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None] == ["order"]
    assert all(result.alias_info is None for result in schema.returns)
    assert torch.Tag.cudagraph_unsafe not in op.tags


def test_ten_exchanges_share_one_graph() -> None:
    def step(exchange: EchoExchange, x: Tensor) -> Tensor:
        return exchange.reduce_scatter(exchange.gather(x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exchange = EchoExchange(8, 16, device="cpu")

        def forward(self, x: Tensor) -> Tensor:
            return step(self.exchange, x)

    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        counters.clear()
        for number in range(10):
            model, x = Model(), rows_of(3) + number
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            assert_same(compiled(x), model(x))
            model.exchange.close()
            with refuses(mm.ContextClosed):
                compiled(x)
        assert counters["stats"]["unique_graphs"] == 1


def test_exchange_in_a_compiled_step(echo: EchoExchange) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = echo.gather(x)
        echo.gather(x)  # unused, and equal to the first: both stay
        return gathered, echo.reduce_scatter(gathered)

    calls = []
    transport = echo._transport
    assert isinstance(transport, Echo)
    gather = transport.gather
    transport.gather = lambda *a: (calls.append(1), gather(*a))  # type: ignore
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 3, 0, 1, 8):
        x = rows_of(rows)
        calls.clear()
        gathered, own = compiled(x)
        assert len(calls) == 2
        assert torch.equal(gathered, torch.cat([x, x * 2, x * 3]))
        assert torch.allclose(own, x * 6)
    assert counters["stats"]["unique_graphs"] <= 3


def test_helpers_over_an_exchange(echo: EchoExchange) -> None:
    for mode in ("max_len", "sum_len"):
        plan = plan_of([2, 2, 2], 0, [4], mode=mode)  # type: ignore[arg-type]
        x = plan.pad(rows_of(2))
        gathered = mm.dp_gather(x, plan, echo)
        assert torch.equal(gathered, torch.cat([x, x * 2, x * 3]))
        assert torch.equal(mm.dp_scatter(gathered, plan, echo), x)
        assert torch.allclose(mm.dp_scatter(gathered, plan, echo, reduce=True), x * 6)
    x = rows_of(7)
    assert mm.attn_tp_split(x, echo).shape == (3, 4)
    assert mm.attn_tp_gather(x[:3], 7, echo).shape == (7, 4)
    with refuses(ValueError, "rows of y", "3 (num_tokens over the ranks"):
        mm.attn_tp_gather(x[:2], 7, echo)


class Pair(SymmetricExchange):
    """Two ranks in one."""

    def _connect(self, device: torch.device, group: Any) -> exchange.Transport:
        self.num_ranks = 2
        transport = Echo()
        transport.gather = lambda rows, out: out.copy_(torch.cat([rows, rows]))  # type: ignore
        return transport


def test_one_compiled_function_over_exchanges_of_other_sizes(echo: EchoExchange) -> None:
    """torch.compile then takes their numbers of ranks for symbolic: no message may format them."""

    def step(x: Tensor, group: SymmetricExchange) -> Tensor:
        return mm.attn_tp_gather(mm.attn_tp_split(x, group), x.shape[0], group)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for group in (echo, Pair(8, 16, device="cpu"), Pair(16, 16, device="cpu"), echo):
        for rows in (6, 7):
            x = rows_of(rows)
            assert torch.equal(compiled(x, group), step(x, group))


def test_exchange_refuses_what_does_not_fit(echo: EchoExchange) -> None:
    echo.gather(rows_of(8))
    with refuses(ValueError, "at most 128", "144", "largest step"):
        echo.gather(rows_of(9))
    with refuses(ValueError, "a multiple of 3", "4"):
        echo.reduce_scatter(rows_of(4))
    with refuses(ValueError, "at most 128", "144"):
        echo.reduce_scatter(rows_of(27))
    with pytest.raises(Exception, match="at most 128"):
        torch.compile(echo.gather, fullgraph=True, backend="aot_eager")(rows_of(9))
    with refuses(ValueError, "max_rows and row_bytes"):
        EchoExchange(0, 16, device="cpu")
    with refuses(ValueError, "a CUDA device", "cpu", "gloo group itself"):
        SymmetricExchange(8, 16, device="cpu")


def test_a_closed_or_lost_exchange_raises() -> None:
    first, second = EchoExchange(8, 16, device="cpu"), EchoExchange(8, 16, device="cpu")
    assert first.exchange_id != second.exchange_id
    first.close()
    first.close()
    with refuses(mm.ContextClosed, f"exchange {first.exchange_id}"):
        first.gather(rows_of(2))
    arguments = second._arguments()
    assert exchange.gather_rows(rows_of(2), *arguments).shape == (6, 4)
    del second
    gc.collect()
    with refuses(mm.ContextClosed):
        exchange.gather_rows(rows_of(2), *arguments)


def test_an_exchange_can_share_the_order_of_the_layers(context: mm.MegaMoEContext) -> None:
    """Inductor then keeps exchanges and launches in program order; no launch is counted."""
    layer = make_layer(context)
    exchanged = EchoExchange(64, 256, device="cpu", order=context.launch_count)
    runtime, transport, events = context._runtime, exchanged._transport, []
    assert runtime is not None and isinstance(transport, Echo)
    launch, gather = runtime.launch, transport.gather
    runtime.launch = lambda *a: (events.append("launch"), launch(*a))  # type: ignore
    transport.gather = lambda *a: (events.append("gather"), gather(*a))  # type: ignore

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        exchanged.gather(x)
        y: Tensor = layer(x, ids, weights)
        exchanged.gather(ids)
        return y

    inputs = random_inputs(context.config, 3)
    with torch.no_grad():
        assert torch.equal(torch.compile(step, fullgraph=True)(*inputs), layer(*inputs))
    assert events == ["gather", "launch", "gather", "launch"]
    assert int(context.launch_count) == 2


# -- several processes, whose buffers are mapped files ---------------------------------------------


class MappedFiles:
    """A SymmetricBuffer without a GPU: every rank maps every rank's file."""

    def __init__(self, folder: str, nbytes: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.tensors = [
            torch.from_file(f"{folder}/{rank}", shared=True, size=nbytes, dtype=torch.int8)
            for rank in range(dist.get_world_size(group))
        ]
        dist.barrier(group)

    def peer(self, rank: int) -> Tensor:
        return self.tensors[rank]

    def barrier(self) -> None:
        dist.barrier(self.group)


class SlowReader(exchange.SymmetricTransport):
    """The rank whose turn it is reads late what it has received: nobody may overwrite it."""

    calls = 0

    def _exchange(self, parts: list[Tensor]) -> Tensor:
        received = super()._exchange(parts)
        self.calls += 1
        if self.calls % self.num_ranks == self.rank:
            time.sleep(0.02)
        return received


class FileExchange(SymmetricExchange):
    def __init__(self, folder: str, max_rows: int, row_bytes: int, **options: Any) -> None:
        self._folder = folder
        super().__init__(max_rows, row_bytes, device="cpu", **options)

    def _connect(self, device: torch.device, group: Any) -> exchange.Transport:
        before = exchange.SymmetricBuffer
        exchange.SymmetricBuffer = lambda n, d, g: MappedFiles(self._folder, n, g)  # type: ignore
        try:
            return SlowReader(self.slot_bytes, device, group)
        finally:
            exchange.SymmetricBuffer = before  # type: ignore[misc]


def exchange_steps(rank: int, world_size: int, folder: str) -> None:
    """Back to back, of changing sizes and types, some ranks late: each call gets its own rows."""
    group = dist.group.WORLD
    exchanged = FileExchange(folder, 12, 32, group=group)
    assert (exchanged.rank, exchanged.num_ranks, exchanged.slot_bytes) == (rank, world_size, 384)
    generator = torch.Generator().manual_seed(0)
    for step in range(16):
        counts = torch.randint(0, 9, (world_size,), generator=generator).tolist()
        dtype = (torch.float32, torch.bfloat16, torch.int64)[step % 3]
        own = [
            (torch.arange(4 * n).view(n, 4) % 7 + 10 * r + step).to(dtype)
            for r, n in enumerate(counts)
        ]
        for mode in ("max_len", "sum_len"):
            plan = plan_of(counts, rank, [8], mode=mode)  # type: ignore[arg-type]
            gathered = mm.dp_gather(plan.pad(own[rank]), plan, exchanged)
            assert torch.equal(gathered[plan.real_rows()], torch.cat(own)), f"{step}: {counts}"
            summed = mm.dp_scatter(gathered * (rank + 1), plan, exchanged, reduce=True)
            total = world_size * (world_size + 1) // 2
            wanted = (own[rank].double() * total).to(dtype)
            assert torch.equal(summed[: plan.num_tokens], wanted), f"{step}: {counts}"
        part = mm.attn_tp_split(own[0], exchanged)
        assert torch.equal(mm.attn_tp_gather(part, counts[0], exchanged), own[0])
    if rank == 0:
        assert "at most 384" in outcome(lambda: exchanged.gather(torch.zeros(13, 4).double()))
    exchanged.gather(torch.zeros(12, 4).double())
    exchanged.close()


@pytest.mark.multirank
@WORLDS
def test_s25_exchanges_back_to_back(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    ranks(world_size).run(exchange_steps, str(tmp_path))


def test_whole_numbers_of_the_gpu_tests_are_exact_and_differ() -> None:
    """Sums over 8 ranks are exact in bf16, in any order; rows that come from elsewhere show."""
    rows: set[tuple[float, ...]] = set()
    for step in range(40):
        ranks = [whole_numbers(rank, 33, step, "cpu") for rank in range(8)]
        total = sum(
            ((rank + 1) * x for rank, x in enumerate(ranks)), torch.zeros(33, 64).bfloat16()
        )
        exact = sum((rank + 1) * x.int() for rank, x in enumerate(ranks))
        assert torch.equal(total.int(), torch.as_tensor(exact))
        assert all(int(x.max()) == 7 and len(x.unique(dim=1)[0]) == 64 for x in ranks)
        rows |= {tuple(row.tolist()) for x in ranks for row in x}
    assert len(rows) == 40 * 8 * 33
