"""Every model type of the installed transformers whose experts dispatch by name, tried out.

    python graph_tests/support/model_types.py > docs/support-models.md

The types come from transformers' own registries, and those whose code has dispatching experts are
built, without memory, from their default configuration made small. One experts module of each kind
then gets random weights, and runs in transformers' eager implementation in fp32 and in ours, on the
same rows, ids and weights.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from megamoe_compile.config import BLOCK
from megamoe_compile.engines.transformers import prepare
from megamoe_compile.engines.transformers.experts import is_experts

RESULTS = ("computed", "refused", "not built")
MAX_ERROR, MIN_COSINE = 0.08, 0.997
TOKENS = 24
LAYERS = 2
# What a refusal may say, by a word of its message.
REASONS = {
    "has_gate": "no gate",
    "has_post_expert_norm": "a norm behind each expert",
    "unsupported activation": "another activation",
}
# The models of a type, the whole ones first.
KINDS = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "TOKEN_CLASSIFICATION")
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_num_experts", "num_moe_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 128),
    **dict.fromkeys(("intermediate_size", "moe_latent_size", "routed_expert_hidden_size"), 128),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    "enable_moe_block": True,
}
TOP_K = dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
)
HIDDEN: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "text_hidden_size", "out_hidden_size"), 128),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
}
TEXT: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEPTH = {"num_hidden_layers": LAYERS}
# What some configurations leave open, for a checkpoint to say.
OPEN: dict[str, Any] = {
    "head_dim": 32,
    "n_shared_experts": 1,
    "layer_types": ["full_attention"] * LAYERS,
    **dict.fromkeys(("indexer_n_heads", "indexer_kv_heads", "indexer_compress_ratio"), 4),
    **dict.fromkeys(("indexer_head_dim", "indexer_budget", "ple_embed_dim"), 32),
}
# Some configurations hold rules between fields: the first of these that builds is taken.
SHRUNK: tuple[dict[str, Any], ...] = (
    {**TEXT, **EXPERTS, **TOP_K, **HIDDEN, **DEPTH},
    {**TEXT, **EXPERTS, **TOP_K, **HIDDEN},
    {**TEXT, **EXPERTS, **TOP_K, **DEPTH},
    {**TEXT, **EXPERTS, **TOP_K},
    {**EXPERTS, **DEPTH},
    EXPERTS,
    {**TEXT, **EXPERTS, **TOP_K, **HIDDEN, **DEPTH, **OPEN},
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out for one kind of experts of one model type."""

    model_type: str
    experts: str  # the class
    result: Literal["computed", "refused", "not built", "without experts"]
    reason: str = ""
    error: float = math.nan  # Frobenius norm of the difference over that of the fp32 result
    cosine: float = math.nan

    def row(self) -> str:
        number = f"error {self.error:.3f}, cosine {self.cosine:.4f}"
        said = "; ".join(filter(None, (number if self.result == "computed" else "", self.reason)))
        experts = f"`{self.experts}`" if self.experts else "-"
        return f"| `{self.model_type}` | {experts} | {self.result} | {said} |"


def model_types() -> list[str]:
    """Types that have a model, and in whose code experts dispatch by name."""
    folder = Path(transformers.__file__).parent / "models"
    return [
        name
        for name in CONFIG_MAPPING_NAMES
        if model_class(name) is not None
        and any(
            "@use_experts_implementation" in file.read_text(encoding="utf-8")
            for file in (folder / model_type_to_module_name(name)).glob("modeling_*.py")
        )
    ]


def model_class(model_type: str) -> str | None:
    """Name of the class that is most of a model of this type."""
    for kind in (*(f"MODEL_FOR_{kind}" for kind in KINDS), "MODEL"):
        found = getattr(modeling_auto, f"{kind}_MAPPING_NAMES", {}).get(model_type)
        if found is not None:
            return str(found if isinstance(found, str) else found[0])
    return None


def shrink(fields: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration and of those that it nests, with the small values."""
    layers = fields.get("num_hidden_layers")
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and name.endswith("config"):
            value = shrink(value, small)
        elif name in small and isinstance(value, list) and not isinstance(small[name], list):
            value = [small[name]] * len(value)
        elif name in small and (value is not None or name in {**EXPERTS, **TOP_K, **OPEN}):
            value = small[name]
        if isinstance(value, list) and len(value) == layers and "num_hidden_layers" in small:
            value = value[-LAYERS:]  # the first layers are often dense
        out[name] = value
    return out


def build(model_type: str) -> nn.Module:
    """A small model of this type on the meta device, with experts where any try has some.

    Raises:
        the error of the first try, where none builds.
    """
    config_class = CONFIG_MAPPING[model_type]
    cls = getattr(transformers, str(model_class(model_type)))
    first, built = None, None
    for small in SHRUNK:
        try:
            fields = shrink(config_class().to_dict(), small)
            for name in ("transformers_version", "architectures", "model_type", "dtype"):
                fields.pop(name, None)
            with torch.device("meta"):
                built = cls(config_class(**fields))
        except Exception as error:
            first = first or error
            continue
        if any(map(is_experts, built.modules())):
            return built
    if built is None:
        assert first is not None
        raise first
    return built


def kinds_of(model: nn.Module) -> list[Any]:
    """One experts module of each class and limit."""
    found: dict[Any, Any] = {}
    for module in filter(is_experts, model.modules()):
        limit = getattr(module, "limit", None) or getattr(module, "swiglu_limit", None)
        found.setdefault((type(module), limit), module)
    return list(found.values())


def fill(experts: Any) -> None:
    """Random bf16 weights, in place of those without memory."""
    experts.to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        fan_in = parameter.shape[-2 if experts.is_transposed else -1]
        scale = fan_in**-0.5 if parameter.dim() == 3 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(scale).bfloat16()


def compare(model_type: str, experts: Any) -> Verdict:
    """transformers' eager experts in fp32 against ours, on the reference backend."""
    name = type(experts).__name__
    fill(experts)
    own = copy.deepcopy(experts).float().eval()  # its configuration too
    own.config._experts_implementation = "eager"
    holder = nn.ModuleDict({"experts": experts})
    try:
        context = prepare(holder, max_tokens_per_rank=TOKENS, backend="reference", device="cpu")
    except ValueError as error:
        assert str(error).startswith(("experts.", "unsupported activation of experts:")), error
        return Verdict(model_type, name, "refused", reason_of(str(error)))
    with context, torch.no_grad():
        config = context.contexts[0].config if hasattr(context, "contexts") else context.config
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(TOKENS, config.hidden_size, generator=generator).bfloat16()
        scores = torch.rand(TOKENS, config.num_experts, generator=generator)
        weights, ids = scores.softmax(-1).topk(config.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        want, got = own(x.float(), ids, weights), experts(x, ids, weights)
    return Verdict(model_type, name, "computed", "", *distance(got, want))


def distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(relative error, cosine), each over the whole tensor."""
    a, b = got.double().flatten(), want.double().flatten()
    return float((a - b).norm() / b.norm()), float(a @ b / (a.norm() * b.norm()))


def reason_of(message: str) -> str:
    """What the table says of a refusal: our words for known ones, else the whole message."""
    return next((ours for word, ours in REASONS.items() if word in message), message)


@functools.cache
def verdicts(model_type: str) -> list[Verdict]:
    """One for each kind of experts of this type; one that says so, where there are none."""
    with quiet():
        try:
            model = build(model_type)
        except Exception as error:
            said = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").replace("|", "or")
            return [Verdict(model_type, "", "not built", said)]
        found = [compare(model_type, experts) for experts in kinds_of(model)]
        width = getattr(CONFIG_MAPPING[model_type]().get_text_config(), "hidden_size", 0)
    if isinstance(width, int) and width % BLOCK:
        note = f"but the hidden size {width} of the default configuration is refused"
        found = [v if v.reason else dataclasses.replace(v, reason=note) for v in found]
    return found or [Verdict(model_type, "", "without experts")]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says about default configurations."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def page(rows: list[Verdict]) -> str:
    """The table, and of which transformers it is."""
    rows = [row for row in rows if row.result != "without experts"]
    counts = collections.Counter(row.result for row in rows)
    types = len({row.model_type for row in rows})
    said = ", ".join(f"{counts[result]} {result}" for result in RESULTS)
    return f"""# Model types of transformers

The {types} model types of transformers {transformers.__version__} whose experts take an
`experts_implementation`, each tried as a small model with random weights on a CPU: {said}.

- computed: error is the norm of the difference of our experts (FP8 weights and activations, the
  reference backend) from the model's own in fp32, over the norm of the latter; same rows, ids and
  weights. It has to be below {MAX_ERROR}, the cosine above {MIN_COSINE}.
- refused: `prepare` raises a ValueError that names the module and the reason.
- not built: transformers cannot build the model from its default configuration made small, which
  says nothing about the experts.

`make support-table` writes this page; `make test` compares anew and fails where a verdict differs.

| model type | experts | result | error and cosine, or the reason |
|---|---|---|---|
""" + "".join(f"{row.row()}\n" for row in rows)


def keys_of(page: str) -> set[tuple[str, str, str, str]]:
    """What must not change unnoticed: types, classes, verdicts, and reasons where they are ours."""
    keys = set()
    for line in page.splitlines():
        if line.startswith("| `"):
            name, experts, result, said = line.strip("| ").split(" | ")
            if result != "refused":  # digits, or the words of some version of Python
                said = said.partition("; ")[2] if result == "computed" else ""
            keys.add((name.strip("`"), experts.strip("`"), result, said))
    return keys


def main() -> None:
    found = [row for model_type in model_types() for row in verdicts(model_type)]
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main()
