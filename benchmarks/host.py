"""Host time of an eager call and of a replay, part by part, from C++ and from Python.

    python -m benchmarks.host [--preset deepseek-v4-flash] [--local-experts 8] [--tokens 8]

The same process measures both ways, one after the other: with the C++ kernel of the op and the copy
kernel of the runner, then without. Host times do not depend on the number of experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

import megamoe_compile as mm
from benchmarks.layer import Bench, raw_calls
from benchmarks.timing import host_time, markdown
from megamoe_compile.custom_ops import library
from megamoe_compile.custom_ops.call import Call
from megamoe_compile.custom_ops.cuda.replay_copy import TorchInputCopier

CALLS = 1000


def timed(parts: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    return {name: host_time(call, CALLS) for name, call in parts.items()}


def breakdown(bench: Bench, tokens: int) -> list[dict[str, Any]]:
    """Rows of (part, C++ or kernel, Python or torch), in microseconds."""
    context, layer = bench.context, bench.layers[0]
    runtime: Any = context._runtime
    (a,) = bench.inputs(tokens, calls=1)
    kwargs = dict(zip(("hidden_states", "topk_ids", "topk_weights"), a, strict=True))
    weights = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    state = (layer.num_valid, layer.launch_count)
    arguments = (*a, *layer.prepared, *state, layer._context_id, *layer._constants)
    y = torch.empty_like(a[0])
    call = Call(*a, layer.prepared, *state, y)
    stream = torch.cuda.current_stream().cuda_stream
    runner = mm.GraphRunner(layer, kwargs, [tokens], context)
    views = mm.GraphRunner(layer, kwargs, [tokens], context, copy_outputs=False)
    for one in (runner, views):
        one.capture(progress=False)
    pre_dispatch, mega = raw_calls(bench)

    def both_ways() -> dict[str, float]:
        write = runner._expect(tokens).write
        return timed(
            {
                "layer(...)": lambda: layer(*a),
                "the op": lambda: library.fused_moe(*arguments),
                "runner(...)": lambda: runner(num_tokens=tokens, **kwargs),
                "runner(...), views of outputs": lambda: views(num_tokens=tokens, **kwargs),
                "copy of inputs, num_valid": lambda: write(a),
            }
        )

    with torch.no_grad():
        fast = both_ways()
        native = runtime.native
        if native is not None:
            taken = native.launches
            library.fused_moe(*arguments)
            assert native.launches == taken + 1, "the call did not take the C++ path"
            native.leave()
        for one in (runner, views):
            one._copier = TorchInputCopier(context.num_valid)
            one._inputs.clear()
        slow = both_ways()
        parts = timed(
            {
                "Python kernel of the op": lambda: library._fused_moe(*arguments),
                "launch from Python": lambda: runtime.launch(call),
                "staging from Python": lambda: runtime._stage(*a, *state, stream),
                "mega kernel from Python": lambda: runtime._mega(y, *weights),
                "DeepGEMM's pre-dispatch": lambda: pre_dispatch(*a),
                "DeepGEMM's mega call": lambda: mega(y, layer),
                "new_empty of the output": lambda: a[0].new_empty(a[0].shape),
                "bare graph replay": runner._captured[tokens].run,
                "clone of the output": y.clone,
                "check of watched tensors": runner._watched.check,
            }
        )
    rows: list[dict[str, Any]] = [
        {"part": name, "now, us": fast[name], "without, us": slow[name]} for name in fast
    ]
    rows += [{"part": name, "now, us": value, "without, us": ""} for name, value in parts.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="deepseek-v4-flash")
    parser.add_argument("--local-experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    config = mm.MegaMoEConfig.preset(
        args.preset,
        max_tokens_per_rank=max(args.tokens, 128),
        num_experts=args.local_experts,
        backend="deep_gemm",
    )
    bench = Bench.make(config)
    with bench.context:
        bench.context.warmup([args.tokens])
        print(markdown(breakdown(bench, args.tokens)))


if __name__ == "__main__":
    main()
