"""Models that the mega kernel does not compute: Triton's kernels, and small_batch beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    assert_close,
    assert_same,
    make_config,
    make_layer,
    oracle,
    random_inputs,
    refuses,
)
from path_fakes import WHEEL, Machine, make_context, paths_of, stored_file

import megamoe_compile as mm
from megamoe_compile.backends import paths

GPT_OSS = dict(swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0, expert_bias=True)


@pytest.fixture
def triton_machine(machine: Machine) -> Machine:
    machine.backend = "triton"
    return machine


def test_each_bucket_takes_the_faster_of_triton_and_small_batch(triton_machine: Machine) -> None:
    with make_context(**GPT_OSS) as context:
        layer = make_layer(context)
        assert context.backend == "triton" and "small_batch per bucket" in context.reason
        context.warmup([1, 4, 8])
        assert paths_of(context, 0, 1, 4, 8, 64) == "ssstt"
        decision = context.decision_for(8)
        assert decision is not None and decision.path == "triton"
        assert decision.microseconds == {"triton": 150.0, "small_batch": 160.5}
        for tokens, path in ((3, "small_batch"), (8, "triton"), (40, "triton")):
            inputs = random_inputs(context.config, tokens)
            assert triton_machine.launches_of(lambda inputs=inputs: layer(*inputs)) == [
                (path, tokens)
            ]
            group = 64 if path == "small_batch" else 128
            assert context.intermediate_group_for(tokens) == group
            # The biases and the whole activation reach both paths.
            want = oracle(layer, inputs, intermediate_group=group)
            assert_close(layer(*inputs), want, 1e-3, f"{path}, {tokens} tokens")


def test_the_small_kernel_gets_the_arithmetic(triton_machine: Machine) -> None:
    with make_context(**GPT_OSS):
        options = triton_machine.small_batch_options
        assert {name: options[name] for name in GPT_OSS} == GPT_OSS
        assert options["intermediate_size"] == 128, "padded as Triton needs it, not the mega kernel"


def test_times_are_stored_with_what_they_depend_on(
    triton_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with make_context(**GPT_OSS) as context:
            triton_machine.kept.append(make_layer(context))
            context.warmup([1])
    assert triton_machine.timed == [1], "the second start reads"
    content = json.loads(stored_file(tmp_path).read_text())
    assert content["microseconds"] == {"1": {"triton": 60.0, "small_batch": 40.0}}
    facts = content["facts"]
    assert facts["triton"] == WHEEL and "deep_gemm" not in facts  # the fake's version
    assert facts["swiglu"] == [7.0, 1.702, 1.0] and facts["expert_bias"] is True
    changed: list[object] = []
    monkeypatch.setattr(paths, "sources_digest", lambda *files: changed.extend(files) or "other")
    with make_context(**GPT_OSS) as context:
        triton_machine.kept.append(make_layer(context))
        context.warmup([1])
    assert triton_machine.timed == [1, 1], "other sources are timed again"
    assert {"kernel.py", "kernels.py", "tiling.py"} <= {Path(str(file)).name for file in changed}


def test_pins_name_triton_or_small_batch(triton_machine: Machine) -> None:
    with make_context(**GPT_OSS, paths={4: "small_batch", 16: "triton"}) as context:
        assert paths_of(context, 1, 4, 5, 16) == "sstt"
    with refuses(ValueError, "paths[4]", "'triton' or 'small_batch'", "'deep_gemm'"):
        make_context(**GPT_OSS, paths={4: "deep_gemm"})
    triton_machine.max_tokens = 8
    with refuses(ValueError, "at most 8", "Pin larger buckets to triton"):
        make_context(**GPT_OSS, paths={16: "small_batch"})


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "another GPU"])
def test_triton_alone_where_it_was_asked_for_or_on_another_gpu(
    triton_machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    if not asked:
        monkeypatch.setattr(paths, "_is_sm90", lambda device: False)
    options = {"backend": "triton"} if asked else {}
    with make_context(**GPT_OSS, **options) as context:
        triton_machine.kept.append(make_layer(context))
        context.warmup([1])
        assert triton_machine.timed == [] and triton_machine.small_batch_options == {}
        assert paths_of(context, 1) == "t" and context.reason == "an SM90 GPU"
    with refuses(ValueError, "paths[4]", "'triton'", "'small_batch'"):
        make_context(**GPT_OSS, **options, paths={4: "small_batch"})


@pytest.mark.gpu
def test_auto_on_sm90_runs_eager_and_captured() -> None:
    """Both paths against the recipe with fresh data, in eager calls and in replayed graphs."""
    config = make_config(
        **GPT_OSS, hidden_size=512, num_experts=8, num_shared_experts=1, intermediate_size=256
    )
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an SM90 GPU")
    for pins in ({8: "small_batch"}, {8: "triton"}):
        with mm.MegaMoEContext(config, device="cuda", paths=pins) as context:  # type: ignore[arg-type]
            assert context.backend == "triton" and "does not compute" in context.reason
            layer = make_layer(context)
            names = ("hidden_states", "topk_ids", "topk_weights")
            example = dict(zip(names, random_inputs(config, 1, device="cuda"), strict=True))
            runner = mm.GraphRunner(layer, example, [8], context=context)
            runner.capture()
            group = context.intermediate_group_for(8)
            for seed, tokens in enumerate((8, 3, 1, 0)):
                inputs = random_inputs(config, tokens, seed=seed, device="cuda")
                got = layer(*inputs)
                want = oracle(layer, inputs, intermediate_group=group)
                assert_close(got, want, 0.02, f"{pins}, eager, {tokens} tokens")
                replayed = runner(num_tokens=tokens, **dict(zip(names, inputs, strict=True)))
                assert_same(replayed, got, f"{pins}, replayed, {tokens} tokens")
