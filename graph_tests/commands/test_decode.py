"""megamoe decode: its parts, its verdict, and that the verdict can be no."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, refuses
from torch import Tensor, nn

import megamoe_compile as mm
from megamoe_compile.commands import cli
from megamoe_compile.commands.decode import command as decode
from megamoe_compile.commands.decode.batch import Batch, batch_sizes
from megamoe_compile.commands.decode.report import DecodeReport, Parity
from megamoe_compile.commands.decode.slot_cache import DecodeStep, SlotCache, SlotView

BUCKETS = [1, 2, 4, 8]


def needs_transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra: megamoe-compile[hf]")


# -- the schedule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [[1, 2, 4, 8], [8], [3, 7], [1]])
def test_sizes_rise_fall_run_empty_and_pad(buckets: list[int]) -> None:
    sizes = batch_sizes(64, buckets, seed=3)
    assert len(sizes) == 64
    assert set(buckets) <= set(sizes), "every bucket is full once"
    assert all(0 in batch_sizes(40, buckets, seed) for seed in range(10))
    assert max(sizes) == buckets[-1]
    if buckets != [1]:
        assert set(sizes) - set(buckets) - {0}, "some size is between two buckets"
    steps = [b - a for a, b in itertools.pairwise(sizes)]
    assert min(steps) < 0 < max(steps)
    assert batch_sizes(64, buckets, seed=3) == sizes
    assert len({tuple(batch_sizes(64, buckets, seed)) for seed in range(4)}) > (buckets != [1])
    assert len(batch_sizes(1, buckets)) == 1


def test_batch_keeps_each_request_in_its_slot() -> None:
    batch = Batch(num_slots=8, max_length=6, vocab_size=50, seed=1)
    fed: dict[int, list[int]] = {}  # slot -> tokens of the request that owns it
    lengths, orders = [], set()
    for number, size in enumerate(batch_sizes(200, BUCKETS, seed=1)):
        batch.resize(size)
        inputs = batch.inputs(torch.device("cpu"))
        slots = inputs["slots"].tolist()
        assert len(set(slots)) == len(slots) == size
        assert all(0 <= slot < 8 for slot in slots)
        orders.add(slots == sorted(slots))
        columns = (inputs[name].flatten().tolist() for name in ("positions", "input_ids"))
        rows = zip(slots, *columns, strict=True)
        for slot, position, token in rows:
            if position == 0:
                fed[slot] = []
            assert position == len(fed[slot]) < 6, "a request feeds one position after the other"
            fed[slot].append(token)
            lengths.append(position)
        for request, row in zip(batch.requests, slots, strict=True):
            tokens, prompt = fed[row], request.prompt
            assert tokens[: len(prompt)] == prompt[: len(tokens)]
            if len(tokens) > len(prompt):
                assert tokens[-1] >= 1000, "after the prompt it feeds what the model chose"
        batch.advance(torch.arange(size) + 1000 + number)
    assert max(lengths) == 5, "some request filled its slot"
    assert orders == {True, False}, "rows are not in the order of slots"


# -- the step --------------------------------------------------------------------------------------


class FakeOutput(NamedTuple):
    logits: Tensor


class FakeModel(nn.Module):
    """Attention alone: keys are the tokens, so that logits show exactly what a row may see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.config: Any = type("Config", (), {})()

    def forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: SlotView) -> Any:
        states = torch.stack([input_ids, positions], dim=-1).float()[:, None]  # [R, 1, W, 2]
        keys, _ = cache.update(states, states, 0)
        seen = torch.where(mask == 0, keys[:, :, None, :, 0], -1.0)  # [R, 1, W, L]
        return FakeOutput(seen[:, 0])


def make_step(num_slots: int = 3, width: int = 1) -> tuple[DecodeStep, Tensor]:
    num_valid = torch.full((1,), 1000, dtype=torch.int32)
    step = DecodeStep(FakeModel(), SlotCache(num_slots, 4), num_valid, width)
    return step, num_valid


def run(step: DecodeStep, *columns: list[int]) -> list[list[float]]:
    with torch.no_grad():
        return step(*(torch.tensor(column) for column in columns))[0].tolist()


def test_a_row_sees_its_own_slot_up_to_its_position() -> None:
    step, _ = make_step()
    assert run(step, [10, 20], [0, 0], [2, 0]) == [[10, -1, -1, -1], [20, -1, -1, -1]]
    assert run(step, [21, 11], [1, 1], [0, 2]) == [[20, 21, -1, -1], [10, 11, -1, -1]]
    # A new request in an old slot sees nothing of the last one.
    assert run(step, [30], [0], [2]) == [[30, -1, -1, -1]]


def test_pad_rows_write_nowhere_that_matters() -> None:
    step, num_valid = make_step()
    run(step, [10, 20, 30], [0, 0, 0], [0, 1, 2])
    num_valid.fill_(1)
    # Rows 1 and 2 hold what an earlier step left in the static buffers.
    run(step, [11, 99, 99], [1, 0, 1], [0, 1, 0])
    num_valid.fill_(1000)
    assert run(step, [12, 21], [2, 1], [0, 1]) == [[10, 11, 12, -1], [20, 21, -1, -1]]
    keys, values = step.cache.layer(0)
    assert keys.shape == values.shape == (4, 1, 4, 2)
    assert int(keys[step.cache.pad_slot].count_nonzero()) > 0, "pad rows went to the pad slot"


def test_rows_of_several_tokens() -> None:
    step, num_valid = make_step(width=2)
    logits = run(step, [10, 11, 20, 21], [0, 1, 0, 1], [1, 0])
    assert logits == [
        [10, -1, -1, -1], [10, 11, -1, -1], [20, -1, -1, -1], [20, 21, -1, -1]
    ]  # fmt: skip
    num_valid.fill_(2)  # tokens: the second request is padding
    run(step, [12, 13, 99, 99], [2, 3, 0, 1], [1, 0])
    num_valid.fill_(1000)
    assert run(step, [22, 23], [2, 3], [0])[1] == [20, 21, 22, 23]


def test_the_step_compiles_to_one_graph_for_all_sizes() -> None:
    step, _ = make_step()
    run(step, [0], [0], [0])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    other, _ = make_step()
    for columns in ([[5, 6], [0, 0], [1, 2]], [[7, 8, 9], [1, 0, 1], [1, 0, 2]]):
        assert run(compiled, *columns) == run(other, *columns)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_no_attention_kernel_is_chosen_in_a_step() -> None:
    """torch 2.11 cannot trace the choice for a batch of unknown size."""
    step, _ = make_step()
    chosen: list[tuple[bool, ...]] = []

    def look(*_: Any) -> None:
        sdp = torch.backends.cuda
        kernels = (sdp.flash_sdp_enabled, sdp.mem_efficient_sdp_enabled, sdp.cudnn_sdp_enabled)
        chosen.append((*(enabled() for enabled in kernels), sdp.math_sdp_enabled()))

    step.model.register_forward_pre_hook(look)
    run(step, [0], [0], [0])
    look()
    assert chosen[0] == (False, False, False, True)
    assert chosen[1] != chosen[0], "the step leaves the setting of the process as it was"


def test_cache_is_allocated_before_compilation() -> None:
    step, _ = make_step()
    with pytest.raises(Exception, match="Call the step once eagerly"):
        run(torch.compile(step, fullgraph=True, backend="eager"), [0], [0], [0])


@pytest.mark.parametrize(
    "fields",
    [{"sliding_window": 16}, {"layer_types": ["full_attention", "linear_attention"]}],
)
def test_other_attention_is_refused(fields: dict[str, Any]) -> None:
    model = FakeModel()
    vars(model.config).update(fields)
    with refuses(ValueError, "full attention in all layers"):
        DecodeStep(model, SlotCache(1, 4), torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_slots_give_what_the_model_gives_without_a_cache(family: str) -> None:
    """The eager half of `decode` against transformers alone: the whole sequence in one call."""
    needs_transformers()
    from hf_models import make_model

    model = make_model(family)
    step = DecodeStep(model, SlotCache(8, 16), torch.full((1,), 99, dtype=torch.int32))
    batch = Batch(8, 16, model.config.vocab_size, seed=2)
    history: dict[int, list[tuple[int, Tensor]]] = {}
    checked = 0
    with torch.no_grad():
        for size in batch_sizes(40, BUCKETS, seed=2):
            batch.resize(size)
            inputs = batch.inputs(torch.device("cpu"))
            if size:
                logits, tokens = step(**inputs)
                assert tokens.tolist() == logits.argmax(-1).tolist()
                batch.advance(tokens)
            for row in range(size):
                slot, position = int(inputs["slots"][row]), int(inputs["positions"][row])
                history[slot] = (history[slot] if position else []) + [
                    (int(inputs["input_ids"][row]), logits[row])
                ]
                if position == 9:  # long enough, and not at the end of all requests
                    ids = torch.tensor([[token for token, _ in history[slot]]])
                    whole = model(ids, use_cache=False).logits[0]
                    ours = torch.stack([logits for _, logits in history[slot]])
                    assert_close(ours, whole, 0.05, f"slot {slot}")
                    checked += 1
    assert checked


# -- parity ----------------------------------------------------------------------------------------


def outputs(logits: list[list[float]], tokens: list[int] | None = None) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(logits)
    return rows, rows.argmax(-1) if tokens is None else torch.tensor(tokens)


@pytest.mark.parametrize(
    ("actual", "holds", "words"),
    [
        (outputs([[1.0, 5.0, -10.0]]), True, ""),
        (outputs([[1.0, 5.4, -10.0]]), True, ""),
        (outputs([[1.0, 5.0, -9.0]]), False, "logits differ by 0.1"),
        (outputs([[1.0, 5.0, math.nan]], [1]), False, "logits differ by nan"),
        (outputs([[1.0, 5.0, math.inf]], [1]), False, "logits differ by inf"),
        (outputs([[1.0, 5.0, -10.0]], [0]), False, "token 0, not 1"),
        (outputs([[1.0, 5.0, -10.0]] * 2), False, "shape [2, 3], not [1, 3]"),
    ],
)
def test_parity(actual: tuple[Tensor, Tensor], holds: bool, words: str) -> None:
    parity = Parity(tolerance=0.05)
    parity.compare("step 7", actual, outputs([[1.0, 5.0, -10.0]]))
    assert parity.holds == holds
    assert holds or (words in str(parity.first_fault) and "step 7" in str(parity.first_fault))
    if words.endswith(("nan", "inf")):
        assert parity.max_relative_error == math.inf
    parity.compare("step 8", outputs([[1.0, 5.0, -10.0]]), outputs([[1.0, 5.0, -10.0]]))
    assert parity.holds == holds, "a later good step changes nothing"


def test_near_ties_may_fall_either_way() -> None:
    parity = Parity(tolerance=0.05)
    parity.compare("", outputs([[9.9, 10.0]], [0]), outputs([[9.9, 10.0]]))
    assert (parity.holds, parity.tokens, parity.decided) == (True, 1, 0)
    assert not Parity(tolerance=0.05).holds, "nothing compared is no parity"


# -- the whole -------------------------------------------------------------------------------------


def decode_small(**changes: Any) -> DecodeReport:
    """`decode` on the small random model; with aot_eager, which compiles in a second."""
    from megamoe_compile.engines.transformers.model import prepare

    model = decode.random_model()
    with prepare(model, max_tokens_per_rank=8) as context:
        return decode.decode(model, context, **{"steps": 40, "max_length": 16, **changes})


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_step(step: nn.Module, context: mm.MegaMoEContext, inputs: list[str]) -> Any:
        return mm.compile_one_graph(step, context, inputs, backend="aot_eager")

    monkeypatch.setattr(decode, "_compile", compile_step)


@pytest.mark.usefixtures("aot_eager")
def test_decode_reports_every_bucket() -> None:
    needs_transformers()
    report = decode_small(buckets=[2, 8])
    assert report.parity, report.verdict()
    assert report.max_relative_error <= 1e-6, "the same kernels, so the same logits"
    sizes = batch_sizes(40, [2, 8])
    small, large = report.buckets
    assert (small.bucket, large.bucket) == (2, 8)
    assert small.steps == sum(size <= 2 for size in sizes)
    assert small.idle == sum(size == 0 for size in sizes) > 0
    assert large.tokens == sum(size for size in sizes if size > 2)
    assert report.tokens == sum(sizes)
    assert 0.3 * report.tokens < report.decided_tokens <= report.tokens
    assert (report.graphs_compiled, report.backend, report.steps) == (1, "reference", 40)
    assert report.tokens_per_second > 0
    rows = report.table().splitlines()
    assert len(rows) == 4
    assert "1 graph(s) compiled" in rows[-1]
    assert report.verdict().startswith("PARITY: ")


# Each breaks the captured half only, as a bug there would; the check has to see it.
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[function.__name__] = function
    return function


class CapturedStep(DecodeStep):
    """Tells the first of the two steps that `decode` makes, the captured one."""

    made = 0
    broken: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured = CapturedStep.made % 2 == 0
        CapturedStep.made += 1


@fault
def pad_rows_write_into_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(CapturedStep):
        def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
            num_valid = self.num_valid
            if self.captured:
                self.num_valid = torch.full_like(num_valid, 1000)
            result = super().forward(input_ids, positions, slots)
            self.num_valid = num_valid
            return result

    monkeypatch.setattr(decode, "DecodeStep", Step)


@fault
def a_row_sees_one_position_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(CapturedStep):
        def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
            return super().forward(input_ids, positions + int(self.captured), slots)

    monkeypatch.setattr(decode, "DecodeStep", Step)


@fault
def logits_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(CapturedStep):
        def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
            logits, tokens = super().forward(input_ids, positions, slots)
            return (logits.roll(1, 0), tokens.roll(1, 0)) if self.captured else (logits, tokens)

    monkeypatch.setattr(decode, "DecodeStep", Step)


@fault
def a_token_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(CapturedStep):
        def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
            logits, tokens = super().forward(input_ids, positions, slots)
            return logits, tokens + 1 if self.captured else tokens

    monkeypatch.setattr(decode, "DecodeStep", Step)


@fault
def an_expert_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(CapturedStep):
        def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
            if not self.captured:
                return super().forward(input_ids, positions, slots)
            expert = self.model.model.layers[0].mlp.experts.megamoe.w2[3]
            saved = expert.clone()
            expert.zero_()  # in place: the runner sees to it that nothing moves
            result = super().forward(input_ids, positions, slots)
            expert.copy_(saved)
            return result

    monkeypatch.setattr(decode, "DecodeStep", Step)


@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_faults_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_transformers()

    def uncompiled(step: nn.Module, context: mm.MegaMoEContext, inputs: list[str]) -> Any:
        return step

    monkeypatch.setattr(decode, "_compile", uncompiled)
    CapturedStep.made = 0
    if name != "none":
        FAULTS[name](monkeypatch)
    arguments = ["decode", "--device", "cpu", "--max-length", "16", "--steps", "32"]
    status = cli.main(arguments)
    output = capsys.readouterr().out
    if name == "none":
        assert status == 0
        assert "PARITY: captured equals eager; max relative error 0," in output
    else:
        assert status == 1
        assert output.splitlines()[-1].startswith("NO PARITY: step ")


def test_decode_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The default run, with Inductor."""
    needs_transformers()
    assert cli.main(["decode", "--device", "cpu", "--json", "--steps", "48", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, "one JSON object and nothing else"
    result = json.loads(lines[0])
    assert result["parity"] is True
    assert 0 <= result["max_relative_error"] <= result["tolerance"] == 0.05
    assert result["backend"] == "reference"
    assert result["steps"] == 48
    assert result["tokens_per_second"] > 0
    assert result["graphs_compiled"] == 1
    assert [bucket["bucket"] for bucket in result["buckets"]] == BUCKETS
    assert all(bucket["path"] == "compiled" for bucket in result["buckets"])


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_decode_of_a_local_checkpoint(
    family: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_transformers()
    from hf_models import make_model

    make_model(family).save_pretrained(tmp_path)
    arguments = ["decode", "--model", str(tmp_path), "--buckets", "1,3,8", "--steps", "24"]
    assert cli.main([*arguments, "--device", "cpu", "--max-length", "8"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"model {tmp_path}; backend reference on cpu: ")
    assert [line.split()[0] for line in output[2:5]] == ["1", "3", "8"]
    assert output[-1].startswith("PARITY: captured equals eager; max relative error ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--buckets", "4,2"], "expected ascending numbers, got 4,2"),
        (["--buckets", "0,2"], "expected a number of at least 1, got 0"),
        (["--buckets", "two"], "--buckets"),
        (["--steps", "0"], "expected a number of at least 1, got 0"),
        (["--ranks", "many"], "expected a number of at least 1, got many"),
        (["--device", "gpu9000"], "expected cpu, cuda or cuda:N, got gpu9000"),
        (["--device", "meta"], "expected cpu, cuda or cuda:N, got meta"),
        (["--model", "/does/not/exist"], "expected a file /does/not/exist"),
        (["--backend", "magic"], "--backend"),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_transformers()
    with pytest.raises(SystemExit) as caught:
        cli.main(["decode", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_bad_numbers_are_refused() -> None:
    needs_transformers()
    with refuses(ValueError, "steps and max_length", "at least 1", "(0, 16)"):
        decode_small(steps=0)
    with refuses(mm.CapacityError, "at most 8", "16"):
        decode_small(buckets=[16])
    with refuses(ValueError, "ascending", "[]"):
        decode_small(buckets=[])
