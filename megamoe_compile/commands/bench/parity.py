"""`megamoe bench --parity`: captured MegaMoE against the bf16 model and against the FP8 recipe.

Three copies of one model with the same weights decode the same requests: captured megamoe picks the
tokens, and the two others, eager and with KV caches of their own, see the same steps:

- `bf16`: the experts dequantized, computed by transformers as it is. Only the quantization of
  activations separates it from megamoe, and the bound is what that may cost.
- `recipe`: the same FP8 numbers in plain PyTorch (custom_ops/reference/), MegaMoE off. What is left
  are roundings of bf16 and orders of sums, and the bound is tighter.

Requests come and go, so that the batch size changes at nearly every step. A bound is on a row's
largest logit difference, relative to its largest logit. Greedy tokens must be equal wherever the
first leads the second by more than the bound. Each model has its own routers: tokens that took the
same experts are held to the bound, and what holds for the others is in routing.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...capture.runner import GraphRunner
from ...context import MegaMoEContext
from ...custom_ops.reference.recipe import moe_reference
from ...engines.transformers.activation import swiglu_limit
from ...engines.transformers.experts import find_experts
from ...weights import adopt
from ..decode.batch import Batch, rank_sizes
from ..decode.slot_cache import DecodeStep, SlotCache
from .columns import Options, Say
from .models import model_without_experts, noting_ids, set_bf16_experts, set_fp8_experts
from .report import with_ending
from .routing import RoutedParity, RoutedStep

BF16_TOLERANCE = 0.1
RECIPE_TOLERANCE = 0.06
MAX_LENGTH = 64  # positions of a request
RECIPE = "megamoe_bench_recipe"


@dataclasses.dataclass
class ParityReport:
    """The comparisons by name, and how many steps and tokens they saw."""

    steps: int
    sizes: list[int]  # different batch sizes
    buckets: list[int]
    backend: str
    comparisons: dict[str, RoutedParity]

    @property
    def holds(self) -> bool:
        return all(parity.holds for parity in self.comparisons.values())

    def as_dict(self) -> dict[str, Any]:
        comparisons = {name: parity.as_dict() for name, parity in self.comparisons.items()}
        return {**dataclasses.asdict(self), "comparisons": comparisons, "holds": self.holds}

    def text(self) -> str:
        lines = [f"- {name}: {parity.text()}" for name, parity in self.comparisons.items()]
        return (
            f"{self.steps} steps, {len(self.sizes)} batch sizes up to {self.sizes[-1]}, buckets "
            f"{self.buckets}, backend {self.backend}\n" + "\n".join(lines) + "\n"
        )


def run_parity(
    options: Options, facts: Mapping[str, Any], out: Path | None, as_json: bool, say: Say
) -> int:
    """Compare, write and print; 0 if both bounds hold."""
    with torch.no_grad():
        report = compare(options, say)
    if out is not None:
        data = json.dumps({**facts, **report.as_dict()}, indent=1, default=str) + "\n"
        with_ending(out, ".json").write_text(data)
    print(json.dumps({**facts, **report.as_dict()}, default=str) if as_json else report.text())
    return 0 if report.holds else 1


def compare(options: Options, say: Say) -> ParityReport:
    """Decode `options.steps` steps with all three."""
    most = options.buckets[-1]
    with contextlib.ExitStack() as stack:
        # One compiled code per bucket, of which dynamo would keep 8.
        limit = max(64, 2 * len(options.buckets))
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        megamoe, context = _megamoe(options, stack)

        def routed(model: nn.Module) -> RoutedStep:
            cache = SlotCache(most, MAX_LENGTH)
            taken = stack.enter_context(noting_ids(model))
            return RoutedStep(DecodeStep(model, cache, context.num_valid), taken)

        eager = {"bf16": routed(_bf16(options)), "recipe": routed(_recipe(options, context))}
        say("three models built")
        runner = _captured(routed(megamoe), context, options, say)
        comparisons = {
            "bf16": RoutedParity(BF16_TOLERANCE),
            "recipe": RoutedParity(RECIPE_TOLERANCE),
        }
        vocabulary = options.source.config.get_text_config().vocab_size
        batch = Batch(most, MAX_LENGTH, vocabulary, options.seed)
        sizes = set()
        for number, (size,) in enumerate(
            rank_sizes(options.steps, runner.buckets, 1, options.seed)
        ):
            batch.resize(size)
            sizes.add(size)
            inputs = batch.inputs(options.device)
            output = cast(Any, runner)(num_tokens=size, **inputs)
            for name, step in eager.items() if size else ():
                comparisons[name].compare(f"step {number}, batch {size}", output, step(**inputs))
            batch.advance(output[1])
        return ParityReport(
            options.steps, sorted(sizes), runner.buckets, context.backend, comparisons
        )


def _captured(step: RoutedStep, context: MegaMoEContext, options: Options, say: Say) -> GraphRunner:
    """The step compiled once per bucket, captured."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=options.device)
    example = {"input_ids": tokens, "positions": tokens, "slots": tokens[:, 0]}
    context.warmup(list(options.buckets))
    step(**example)  # allocates its cache, before anything is compiled
    # Rounding to bf16 where eager does: what is compared is the experts.
    compiled = torch.compile(
        step, fullgraph=True, dynamic=False, options={"emulate_precision_casts": True}
    )
    runner = GraphRunner(compiled, example, options.buckets, context, module=step)
    runner.capture(progress=False)
    say(f"captured {len(options.buckets)} buckets")
    return runner


def _megamoe(options: Options, stack: contextlib.ExitStack) -> tuple[nn.Module, MegaMoEContext]:
    from ...engines.transformers.model import prepare
    from ...engines.transformers.routers import fuse_routers

    model = model_without_experts(options.source, options.device, "sdpa")
    set_fp8_experts(model, options.source, options.device)
    context = prepare(model, max_tokens_per_rank=options.buckets[-1], backend=options.backend)
    stack.callback(context.close)
    assert isinstance(context, MegaMoEContext), "a source has one shape"
    if options.fuse_routers:
        fuse_routers(model)
    return model, context


def _bf16(options: Options) -> nn.Module:
    model = model_without_experts(options.source, options.device, "sdpa")
    set_bf16_experts(model, options.source, options.device)
    cast(Any, model).set_experts_implementation("eager")
    return model


def _recipe(options: Options, context: MegaMoEContext) -> nn.Module:
    """The model whose experts run the recipe in PyTorch, on prepared weights.

    With the scales of the path that `context` takes for as many tokens.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        prepared = (
            module.gate_up_proj,
            module.gate_up_proj_scale_inv,
            module.down_proj,
            module.down_proj_scale_inv,
        )
        return moe_reference(
            x,
            ids,
            weights,
            *prepared,
            swiglu_limit=module.megamoe_bench_limit,
            intermediate_group=context.intermediate_group_for(x.shape[0]),
        )

    ALL_EXPERTS_FUNCTIONS.register(RECIPE, forward)
    model = model_without_experts(options.source, options.device, "sdpa")
    set_fp8_experts(model, options.source, options.device)
    for prefix, experts in find_experts(model).items():
        adopt(
            experts.gate_up_proj,
            experts.gate_up_proj_scale_inv,
            experts.down_proj,
            experts.down_proj_scale_inv,
        )
        experts.config._experts_implementation = RECIPE
        experts.megamoe_bench_limit = swiglu_limit(experts, prefix)
    return model
