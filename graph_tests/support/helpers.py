"""What the tests share: random layers, comparisons that name the first bad place, measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import multiprocessing.connection
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import megamoe_compile as mm
from megamoe_compile.custom_ops.reference.recipe import moe_reference, quantize_blocks

SMALL: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_experts": 4,
    "top_k": 2,
    "max_tokens_per_rank": 64,
}

GPU_SHAPE: Mapping[str, Any] = {  # the smallest that all kernels of one rank take
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_experts": 16,
    "top_k": 4,
    "max_tokens_per_rank": 384,
}

# -- layers and inputs ----------------------------------------------------------------------------


def make_config(**changes: Any) -> mm.MegaMoEConfig:
    return mm.MegaMoEConfig(**{**SMALL, **changes})


@dataclasses.dataclass
class Checkpoint:
    """Weights as a checkpoint holds them, in the order of `MegaMoE.load_weights`."""

    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.w13, self.w13_scale, self.w2, self.w2_scale))

    def clone(self) -> Checkpoint:
        return Checkpoint(*(None if t is None else t.clone() for t in self))  # type: ignore[arg-type]

    def __getitem__(self, expert: int | slice) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t[expert] for t in self)


def random_checkpoint(
    config: mm.MegaMoEConfig, *, seed: int = 0, fp8: bool = True, experts: int | None = None
) -> Checkpoint:
    """All routed experts of `config`, FP8 with fp32 scales, or bf16."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i = experts or config.num_experts, config.hidden_size, config.intermediate_size
    w13 = torch.randn(e, 2 * i, h, generator=generator).mul_(h**-0.5).bfloat16()
    w2 = torch.randn(e, h, i, generator=generator).mul_(i**-0.5).bfloat16()
    if not fp8:
        return Checkpoint(w13, None, w2, None)
    (q13, s13), (q2, s2) = (_quantize_all(w) for w in (w13, w2))
    return Checkpoint(q13, s13, q2, s2)


def random_biases(
    config: mm.MegaMoEConfig, experts: int, *, seed: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """w13_bias [E, 2I] and w2_bias [E, H] in fp32, of the size of what they are added to."""
    if not config.expert_bias:
        return None, None
    generator = torch.Generator().manual_seed(seed + 7)
    return (
        torch.randn(experts, 2 * config.intermediate_size, generator=generator),
        torch.randn(experts, config.hidden_size, generator=generator),
    )


def _quantize_all(w: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = zip(*(quantize_blocks(expert) for expert in w), strict=True)
    return torch.stack(quantized), torch.stack(scales)


def make_layer(context: mm.MegaMoEContext, *, seed: int = 0, **options: Any) -> mm.MegaMoE:
    """A layer with random routed (and shared) experts."""
    layer = mm.MegaMoE(context, **options)
    config = context.config
    fp8 = not config.num_shared_experts and config.intermediate_size % 128 == 0
    checkpoint = random_checkpoint(config, seed=seed, fp8=fp8)
    layer.load_weights(*checkpoint, *random_biases(config, config.num_experts, seed=seed))
    if config.num_shared_experts:
        shared: Any = random_checkpoint(config, seed=seed + 1000, experts=config.num_shared_experts)
        biases = random_biases(config, config.num_shared_experts, seed=seed + 1000)
        for number in range(config.num_shared_experts):
            own = (None if bias is None else bias[number] for bias in biases)
            layer.load_expert(config.num_experts + number, *shared[number], *own)
    return layer


Inputs = tuple[Tensor, Tensor, Tensor]


def named(inputs: Inputs) -> dict[str, Tensor]:
    """A layer's inputs by the names of its arguments, as a runner takes them."""
    return dict(zip(("hidden_states", "topk_ids", "topk_weights"), inputs, strict=True))


def random_inputs(
    config: mm.MegaMoEConfig,
    tokens: int,
    *,
    seed: int = 0,
    ids_dtype: torch.dtype = torch.int64,
    weights_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """hidden_states, topk_ids (distinct in a row) and topk_weights (a row sums to 1)."""
    generator = torch.Generator().manual_seed(seed * 1009 + tokens)
    x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(tokens, config.num_experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(config.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return x.to(device), ids.to(device, ids_dtype), weights.to(device, weights_dtype)


def oracle(
    layer: mm.MegaMoE, inputs: Inputs, *, num_valid: int | None = None, **options: Any
) -> Tensor:
    """The fp32 reference of a one-rank layer."""
    config = layer.context.config
    return moe_reference(
        *inputs,
        layer.w13,
        layer.w13_scale,
        layer.w2,
        layer.w2_scale,
        layer.w13_bias,
        layer.w2_bias,
        num_valid=num_valid,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
        routed_scaling_factor=config.routed_scaling_factor,
        num_shared_experts=config.num_shared_experts,
        **options,
    )


def op_arguments(layer: mm.MegaMoE, inputs: Inputs, *, as_bytes: bool = False) -> tuple[Any, ...]:
    """The arguments of torch.ops.megamoe.fused_moe; weights as uint8 views with `as_bytes`."""
    w13, w2 = layer.w13, layer.w2
    if as_bytes:
        w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    return (
        *inputs,
        w13,
        layer.w13_scale,
        w2,
        layer.w2_scale,
        layer.w13_bias,
        layer.w2_bias,
        layer.num_valid,
        layer.launch_count,
        layer._context_id,
        *layer._constants,
    )


# -- comparisons ----------------------------------------------------------------------------------


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in bad.nonzero()[0])


def assert_same(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Bitwise equal (any NaN equals any NaN); names the first coordinate that is not."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    a, b = actual.detach().float(), expected.detach().float()
    bad = ~((a == b) | (a.isnan() & b.isnan()))
    if bool(bad.any()):
        at = _first(bad)
        pytest.fail(
            f"{what}{list(at)}: {a[at].item()} != {b[at].item()}; "
            f"{int(bad.sum())} of {bad.numel()} differ"
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; 0 for two zeros."""
    a, b = actual.detach().double(), expected.detach().double()
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float(a.norm())


def assert_close(actual: Tensor, expected: Tensor, bound: float, what: str = "tensor") -> None:
    """Relative error at most `bound`, nothing non-finite; names the worst coordinate."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    finite = actual.isfinite()
    if not bool(finite.all()):
        pytest.fail(f"{what}{list(_first(~finite))} is not finite")
    error = relative_error(actual, expected)
    if error > bound:
        difference = (actual.double() - expected.double()).abs()
        at = _first(difference == difference.max())
        pytest.fail(
            f"{what}: relative error {error:.4g} above {bound}; worst at {list(at)}: "
            f"{actual[at].item()} against {expected[at].item()}"
        )


def assert_one_sentence(message: str, *words: str) -> None:
    """The message has what was expected, what was got and a cure, and names `words`."""
    assert re.search(r": expected .+, got .+\. \S.*\S", message, re.DOTALL), message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


@contextlib.contextmanager
def refuses(
    error: type[BaseException], *words: str
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """pytest.raises(error), with expected, got, cure and `words` in the message."""
    with pytest.raises(error) as caught:
        yield caught
    assert_one_sentence(str(caught.value), *words)


@contextlib.contextmanager
def no_launch(context: mm.MegaMoEContext) -> Iterator[None]:
    """Nothing in the block launches the op, and the step state is as it was."""
    before, valid = int(context.launch_count), int(context.num_valid)
    yield
    assert int(context.launch_count) == before, "a refused call launched"
    assert int(context.num_valid) == valid, "a refused call left num_valid changed"


# -- memory ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_allocator() -> Iterator[None]:
    """torch.empty and its family give NaN (integers: the largest) instead of chance memory."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    assert bool(torch.empty(3).isnan().all())
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class PeakStorage(TorchDispatchMode):
    """Bytes of tensor storage made inside the block: `live` now, `peak` at worst.

    Every storage that an operator returns and did not get is new; it counts until it is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        self._live = {key: it for key, it in self._live.items() if not it[0].expired()}
        for t in _tensors(result):
            storage = t.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]


def assert_same_choices(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> None:
    """Two greedy decodes, logits [B, V] per step, agree as far as they see the same tokens.

    Logits differ by at most `tolerance` of a row's largest, and the choice is equal wherever the
    first leads by more. A row is compared up to its first choice that rounding may turn.
    """
    assert len(got) == len(want)
    for row in range(want[0].shape[0]):
        for step, (g, w) in enumerate(zip(got, want, strict=True)):
            mine, other = g[row].float(), w[row].float()
            scale = other.abs().max()
            error = ((mine - other).abs().max() / scale).item()
            assert error <= tolerance, f"row {row}, step {step}: logits differ by {error:.3g}"
            first, second = other.topk(2).values
            same = bool(mine.argmax() == other.argmax())
            assert same or (first - second) / scale <= tolerance, f"row {row}, step {step}"
            if not same:
                break


# -- ranks ----------------------------------------------------------------------------------------


GRACE = 15  # seconds that ranks get after one of them has failed


def triton_interprets() -> bool:
    """Whether kernels of this process run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


class RankPool:
    """One process per rank, joined by a group; `run` calls a module-level function on all ranks.

    A rank that hangs or dies fails the test that ran it; the next test gets new processes.
    """

    def __init__(
        self, world_size: int, folder: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.world_size = world_size
        self._folder = folder
        self._environment = dict(environment or {})
        self._generation = 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        self._generation += 1
        store = self._folder / f"store{self._generation}"
        # A fork server imports torch once for all ranks of all pools; an environment that torch
        # reads at import needs processes of its own.
        method = "spawn" if self._environment else "forkserver"
        spawn: Any = torch.multiprocessing.get_context(method)
        if method == "forkserver":
            spawn.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])
        saved = dict(os.environ)
        os.environ.update(self._environment)  # before the children import torch
        try:
            for rank in range(self.world_size):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=_rank_main,
                    args=(rank, self.world_size, str(store), theirs),
                    daemon=True,
                )
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(saved)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(rank, world_size, *args) on every rank -> the results in rank order."""
        if not self._processes:
            self._start()
            timeout += 60  # the start imports torch once per rank
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < self.world_size:
            waiting = {self._pipes[r]: r for r in range(self.world_size) if r not in replies}
            left = deadline - time.monotonic()
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), max(left, 0))
            if not ready:
                replies |= dict.fromkeys(waiting.values(), (False, f"{function.__name__} hangs"))
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    replies[rank] = torch.load(io.BytesIO(pipe.recv()), weights_only=False)
                except EOFError:
                    replies[rank] = (False, "the process died")
                if not replies[rank][0]:  # the others may now wait for it in vain
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed := {rank: text for rank, (fine, text) in replies.items() if not fine}:
            self.close()
            pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return [replies[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._processes, self._pipes = [], []


def _rank_main(rank: int, world_size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        function, args = pipe.recv()
        reply: tuple[bool, Any]
        try:
            reply = (True, function(rank, world_size, *args))
        except BaseException:
            reply = (False, traceback.format_exc())
        buffer = io.BytesIO()
        torch.save(reply, buffer)
        pipe.send(buffer.getvalue())


def outcome(call: Callable[[], Any]) -> str:
    """'' where `call` returns, else 'ErrorName: message'."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
