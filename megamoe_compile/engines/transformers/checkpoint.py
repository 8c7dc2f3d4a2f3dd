"""A local safetensors checkpoint, streamed expert by expert into a model's MegaMoE layers.

    model, context = load_checkpoint(directory, device="cuda", max_tokens_per_rank=64)

The model is built without memory (on the meta device), its layers take the experts one at a time,
and every other weight goes straight to the device. So the peak is the loaded weights and a few
experts. Checkpoints are those with one tensor per projection and expert, in bf16 or, as those of
DeepSeek-V3, in e4m3 with a `weight_scale_inv` per 128x128 block. Linear layers outside of the
experts that are in FP8 are dequantized to bf16.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...capture.contexts import AnyContext
from ...custom_ops.reference.recipe import BLOCK, FP8
from ...errors import mismatch
from ...models.hf_config import moe_top_k
from .experts import HFExperts, find_experts, is_experts
from .model import prepare_empty

T = TypeVar("T")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALE = "_scale_inv"
# Gate, up and down as families name them.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
EXPERT = re.compile(r"\.experts\.\d+\.")
CURE = "Pass the directory of a complete checkpoint."


class ExpertTensors(NamedTuple):
    """One expert as in a checkpoint: [2I, H] with gate rows first, [H, I], scales per 128x128."""

    w13: Tensor
    w13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None


class Checkpoint:
    """The tensors of a directory of safetensors files, by name. Use it as a `with` block.

    Args:
        directory: with model.safetensors.index.json, or one model.safetensors.
        device: where tensors are read to.

    Raises:
        ValueError: no such files, or a shard that the index names is missing.
    """

    def __init__(self, directory: Path, device: torch.device | str = "cpu") -> None:
        self.directory = directory
        self.device = torch.device(device)
        self._files: dict[str, Any] = {}
        self._file_of = _file_of_each(directory)
        shards = sorted(set(self._file_of.values()))
        missing = [name for name in shards if not (directory / name).is_file()]
        if missing:
            raise ValueError(
                mismatch(
                    f"files in {directory}",
                    f"the {len(shards)} that {INDEX} names",
                    f"no {', '.join(missing)}",
                    CURE,
                )
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.__exit__(kind, error, trace)
        self._files = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, on the device. ValueError: not in the checkpoint."""
        file_name = self._file_of.get(name)
        if file_name is None:
            raise ValueError(mismatch(f"tensor {name}", "in the checkpoint", "none", CURE))
        from safetensors import SafetensorError, safe_open

        try:
            file = self._files.get(file_name)
            if file is None:
                opened = cast(Any, safe_open)(
                    str(self.directory / file_name), framework="pt", device=str(self.device)
                )
                file = self._files[file_name] = opened.__enter__()
            return cast(Tensor, file.get_tensor(name))
        except SafetensorError as error:  # cut off, or without this tensor; it names no file
            raise ValueError(
                mismatch(f"{self.directory / file_name}", f"a file with {name}", error, CURE)
            ) from error

    def read_dense(self, name: str) -> Tensor:
        """As `read`; an FP8 weight comes dequantized, in bf16."""
        weight = self.read(name)
        if weight.dtype != FP8:
            return weight
        if name + SCALE not in self:
            raise ValueError(
                mismatch(f"{name}{SCALE}", "one scale per 128x128 block", "none", CURE)
            )
        return dequantize(weight, self.read(name + SCALE))

    def expert(self, prefix: str, expert: int) -> ExpertTensors:
        """Expert `expert` of the experts module `prefix`, e.g. model.layers.3.mlp.experts."""
        for names in PROJECTIONS:
            keys = [f"{prefix}.{expert}.{name}.weight" for name in names]
            if keys[0] in self:
                break
        else:
            raise ValueError(
                mismatch(
                    f"{prefix}.{expert}",
                    f"projections {' or '.join('/'.join(names) for names in PROJECTIONS)}",
                    "none of them",
                    "Only checkpoints with one tensor per expert and projection are streamed.",
                )
            )
        gate, up, down = map(self.read, keys)
        for key, tensor, shape in zip(
            keys[1:], (up, down), (gate.shape, gate.T.shape), strict=True
        ):
            if tensor.shape != shape or tensor.dtype != gate.dtype:
                raise ValueError(
                    mismatch(
                        key,
                        f"{list(shape)} {gate.dtype}, as {keys[0]} has it",
                        f"{list(tensor.shape)} {tensor.dtype}",
                        CURE,
                    )
                )
        w13 = torch.cat([gate, up])
        if gate.dtype != FP8:
            return ExpertTensors(w13, None, down, None)
        scales = [self.read(key + SCALE) for key in keys]
        return ExpertTensors(w13, torch.cat(scales[:2]), down, scales[2])


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 [N, C] of e4m3 [N, C] and its scales [ceil(N/128), ceil(C/128)]: edges may be ragged."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    scale = scale.float()
    # By block rows: the fp32 of a whole weight would be four times its size.
    per_column = scale.repeat_interleave(BLOCK, dim=1)[:, :columns]
    for block, start in enumerate(range(0, rows, BLOCK)):
        part = weight[start : start + BLOCK].float()
        out[start : start + BLOCK] = part * per_column[block]
    return out


def load_checkpoint(
    directory: Path | str,
    *,
    device: torch.device | str,
    max_tokens_per_rank: int,
    group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
    model_config: Any = None,
    **config_changes: Any,
) -> tuple[nn.Module, AnyContext]:
    """Build the causal language model of a local checkpoint with MegaMoE experts. Collective.

    Args:
        directory: config.json and safetensors files, one tensor per expert and projection.
        device: of the model and its experts.
        max_tokens_per_rank, group, config_changes: as in `prepare`. Each rank reads its own
            experts only.
        progress: show a bar of experts; default: on rank 0 of an interactive terminal.
        model_config: a configuration in place of the directory's, e.g. with fewer layers.

    Returns:
        (the model in evaluation mode, the context or MegaMoEContexts of all its layers)

    Raises:
        ValueError: not a checkpoint of a MoE model that the kernels compute, or tensors missing.
        BackendUnavailable: see MegaMoEContext.
    """
    directory, device = Path(directory), torch.device(device)
    if model_config is None:
        moe_top_k(directory)  # the better message
        from transformers import AutoConfig

        model_config = cast(Any, AutoConfig).from_pretrained(directory, local_files_only=True)
    _check_format(model_config)
    model = empty_model(model_config)
    experts = find_experts(model)
    context = prepare_empty(
        model,
        device=device,
        max_tokens_per_rank=max_tokens_per_rank,
        group=group,
        **config_changes,
    )
    if progress is None:
        progress = context.rank == 0 and sys.stderr.isatty()
    try:
        with Checkpoint(directory, context.device) as checkpoint:
            fill(model, context.device, checkpoint.read_dense)
            todo = [
                (name, layer, expert)
                for name, layer in ((n, cast(HFExperts, m.megamoe)) for n, m in experts.items())
                for expert in layer.context.weight_geometry.local_experts
            ]
            for name, layer, expert in _bar(todo, progress):
                tensors = checkpoint.expert(name, expert)
                try:
                    layer.load_expert(expert, *tensors)
                except ValueError as error:
                    raise ValueError(f"{name}.{expert}: {error}") from error
    except BaseException:
        context.close()
        raise
    return model.eval(), context


def has_separate_experts(directory: Path) -> bool:
    """Whether `load_checkpoint` can stream it: safetensors with one tensor per expert."""
    try:
        return any(map(EXPERT.search, _file_of_each(directory)))
    except ValueError:
        return False


def empty_model(config: Any, attention: str | None = None) -> nn.Module:
    """The causal language model of a configuration in bf16, on the meta device: no memory."""
    from transformers import AutoModelForCausalLM

    # A model keeps its implementations of attention and experts in its configuration.
    config = copy.deepcopy(config)
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16, **options)
    return cast(nn.Module, model.eval())


@torch.no_grad()
def fill(model: nn.Module, device: torch.device, value_of: Callable[[str], Tensor]) -> None:
    """Give every weight that is still on the meta device the value of its name, experts aside.

    Buffers that no checkpoint has, e.g. the frequencies of rotary embeddings, come from building
    their module again.
    """
    tied = _tied(model)
    for name, module in list(model.named_modules()):
        if any(
            b is not None and b.is_meta and key in module._non_persistent_buffers_set
            for key, b in module._buffers.items()
        ):
            parent, _, child = name.rpartition(".")
            with torch.device(device):
                rebuilt = cast(Any, type(module))(cast(Any, model).config)
            setattr(model.get_submodule(parent), child, rebuilt)
    for prefix, module in model.named_modules():
        if is_experts(module):
            continue
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or not tensor.is_meta or name in tied:
                    continue
                got = value_of(name)
                if got.shape != tensor.shape:
                    raise ValueError(
                        mismatch(f"{name}.shape", list(tensor.shape), list(got.shape), CURE)
                    )
                # A buffer keeps its dtype: a router's correction bias is fp32 on purpose.
                dtype = tensor.dtype if store is module._parameters else got.dtype
                got = got.to(device=device, dtype=dtype)
                store[key] = (
                    nn.Parameter(got, requires_grad=False) if store is module._parameters else got
                )
    if tied:
        cast(Any, model).tie_weights()


def _check_format(config: Any) -> None:
    """Refuse what is stored in another format than bf16 and FP8, before anything is built."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    method = (stored if isinstance(stored, dict) else stored.to_dict()).get("quant_method")
    if getattr(method, "value", method) != "fp8":
        raise ValueError(
            mismatch(
                f"format of the checkpoint ({config.model_type})",
                "bf16, or fp8 with a scale per 128x128 block",
                method,
                "Let transformers load it in bf16, where it can dequantize, and call "
                "prepare(model, ...).",
            )
        )


def _tied(model: nn.Module) -> set[str]:
    """Names whose weight is another one's: no checkpoint needs them."""
    config = cast(Any, model).config
    keys = getattr(model, "_tied_weights_keys", None) or ()
    return set(keys) if getattr(config, "tie_word_embeddings", False) else set()


def _file_of_each(directory: Path) -> dict[str, str]:
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                mismatch(str(index), "an object with a weight_map", error, CURE)
            ) from error
    if single.is_file():
        from safetensors import safe_open

        with cast(Any, safe_open)(str(single), framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise ValueError(mismatch(f"files in {directory}", f"{INDEX} or {SINGLE}", "neither", CURE))


def _bar(items: list[T], show: bool) -> Iterable[T] | Iterator[T]:
    if not show:
        return items
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is a courtesy, not a dependency
        return items
    return cast(Iterable[T], tqdm(items, desc="load", unit="expert"))
