"""What of the deep_gemm backend needs no GPU: versions, cures, and the calls of each generation.

The wheels from 0.2.3 on cannot run with the torch of the hardware at hand. Their ops are recorded
here as the schemas that the wheels register, so that a wrong number, order or type of argument
fails; nothing here says that their kernels compute right.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers import assert_one_sentence, make_config, refuses

import megamoe_compile as mm
from megamoe_compile.backends import capability
from megamoe_compile.backends.runtimes import layer_spec
from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.deep_gemm import api as deep_gemm
from megamoe_compile.custom_ops.deep_gemm import check as deep_gemm_check
from megamoe_compile.custom_ops.deep_gemm.runtime import DeepGemmRuntime
from megamoe_compile.custom_ops.errors import BackendUnavailable
from megamoe_compile.custom_ops.symmetric import memory as symmetric
from megamoe_compile.custom_ops.symmetric.memory import Peer, check_peers, check_pointers

COMMON = """
get_num_sms() -> int
set_num_sms(int new_num_sms) -> ()
get_token_alignment_for_mega_moe() -> int
get_symm_buffer_size_for_sm90_mega_moe(int num_ranks, int num_experts, int num_max_tokens_per_rank, int num_topk, int hidden, int intermediate_hidden, bool use_fp8_dispatch, str activation) -> int
slice_symm_buffer_for_sm90_mega_moe(Tensor(a) buffer, int num_ranks, int num_experts, int num_max_tokens_per_rank, int num_topk, int hidden, int intermediate_hidden, bool use_fp8_dispatch, str activation) -> Tensor(a)[]
"""  # noqa: E501
MEGA = (
    "fp8_mega_moe(Tensor(a!) y, Tensor l1_weights, Tensor l1_weights_sf, Tensor l2_weights, "
    "Tensor l2_weights_sf, Tensor(b!)? cumulative_local_expert_recv_stats, Tensor(c!) sym_buffer, "
    "int[] sym_buffer_ptrs, int rank_idx, int num_max_tokens_per_rank, int num_experts, "
    "int num_topk, int[] recipe, str activation, float? activation_clamp, bool fast_math"
)
SCHEMAS = {
    "0.2.3": f"{COMMON}{MEGA}) -> ()",
    "0.2.5": f"{COMMON}{MEGA}, int num_tokens_bound=0) -> ()\n"
    "get_token_alignment_for_sm90_mega_moe() -> int",
}


class Recorder:
    """Ops with a wheel's recorded schemas in a namespace of their own, that log their calls."""

    def __init__(self, wheel: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        name = f"recorded_{wheel.replace('.', '_')}"
        self.library = torch.library.Library(name, "DEF")
        for schema in SCHEMAS[wheel].strip().splitlines():
            op = schema.split("(")[0]
            self.library.define(schema)
            self.library.impl(op, self._logged(op), "CompositeExplicitAutograd")
        self.ops = getattr(torch.ops, name)

    def _logged(self, op: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((op, args))
            if op.startswith("get_"):
                return 384
            if op.startswith("slice_"):
                return [args[0].narrow(0, 8 * part, 8) for part in range(8)]
            return None

        return call


@pytest.fixture(params=["0.2.3", "0.2.5"])
def recorded(request: pytest.FixtureRequest) -> Iterator[tuple[str, Recorder, deep_gemm.Api]]:
    recorder = Recorder(request.param)
    kind = deep_gemm.BoundedApi if request.param == "0.2.5" else deep_gemm.TorchOpsApi
    yield request.param, recorder, kind(request.param, recorder.ops)
    recorder.library._destroy()


LAYOUT = (1, 16, 384, 4, 512, 256, True, "swiglu")


def test_torch_ops_generations_call_what_their_wheels_register(
    recorded: tuple[str, Recorder, deep_gemm.Api],
) -> None:
    wheel, recorder, api = recorded
    buffer = torch.zeros(64, dtype=torch.int8)
    assert api.token_alignment() == api.buffer_bytes(LAYOUT) == api.get_num_sms() == 384
    assert len(api.input_views(buffer, LAYOUT)) == 4
    api.set_num_sms(64)
    launch = api.bind(buffer, [1], 0, 384, 16, 4, 10.0)
    y = torch.zeros(3, 512, dtype=torch.bfloat16)
    weights = [torch.full((1,), float(number)) for number in range(4)]
    launch(y, *weights)
    op, args = recorder.calls[-1]
    assert op == "fp8_mega_moe"
    assert args[0].data_ptr() == y.data_ptr()
    assert [float(w) for w in args[1:5]] == [0, 1, 2, 3]
    assert args[5] is None and args[6].data_ptr() == buffer.data_ptr()
    assert list(args[7]) == [1] and args[8:12] == (0, 384, 16, 4)
    assert list(args[12]) == [128, 128, 128] and args[13:16] == ("swiglu", 10.0, True)
    assert args[16:] == ((3,) if wheel == "0.2.5" else ())


def test_with_several_ranks_the_bound_is_left_open(
    recorded: tuple[str, Recorder, deep_gemm.Api],
) -> None:
    """A rank knows its own tokens only; a bound below a peer's would be wrong."""
    _, recorder, api = recorded
    launch = api.bind(torch.zeros(1, dtype=torch.int8), [1, 2], 1, 384, 16, 4, None)
    launch(torch.zeros(3, 512), *[torch.zeros(1)] * 4)
    _, args = recorder.calls[-1]
    assert args[14] is None and args[16:] in ((), (0,))


def test_tvm_ffi_generation_converts_its_constants_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[object] = []
    ffi: Any = types.ModuleType("tvm_ffi")
    ffi.from_dlpack = lambda t: converted.append(t) or ("ffi", t.data_ptr())
    ffi.convert = lambda value: converted.append(value) or ("ffi", tuple(value))
    monkeypatch.setitem(sys.modules, "tvm_ffi", ffi)
    calls: list[tuple[Any, ...]] = []
    binding = types.SimpleNamespace(
        fp8_mega_moe=lambda *args: calls.append(args),
        get_token_alignment_for_mega_moe=lambda: 384,
        get_symm_buffer_size_for_sm90_mega_moe=lambda *layout: (
            1000,
            lambda buffer: [buffer.narrow(0, 8 * part, 8) for part in range(8)],
        ),
        get_num_sms=lambda: 132,
        set_num_sms=lambda count: None,
    )
    api = deep_gemm.TvmFfiApi("0.1.5.post1", types.SimpleNamespace(_C=binding))
    assert (api.token_alignment(), api.buffer_bytes(LAYOUT), api.get_num_sms()) == (384, 1000, 132)
    buffer = torch.zeros(64, dtype=torch.uint8)
    assert api.input_views(buffer, LAYOUT)[0].dtype == torch.float8_e4m3fn
    launch = api.bind(buffer, [7], 0, 384, 16, 4, None)
    for _ in range(3):
        launch(*(torch.zeros(1) for _ in range(5)))
    assert len(converted) == 3 and len(calls) == 3
    assert calls[0][6:] == (
        ("ffi", buffer.data_ptr()),
        ("ffi", (7,)),
        0,
        384,
        16,
        4,
        ("ffi", (128, 128, 128)),
        "swiglu",
        None,
        True,
    )


# -- versions and cures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_version", "wheel"),
    [
        ("2.11.0+cu130", "0.1.5.post1"),
        ("2.11.0+cu130", "0.1.5"),
        ("2.13.0", "0.2.0"),
        ("2.14.1+cu130", "0.2.5"),
        ("2.14.1", "0.2.3.post2"),
        ("2.15.0", "0.3.0"),
    ],
)
def test_pairs_that_fit(torch_version: str, wheel: str) -> None:
    assert deep_gemm.wheel_problem(wheel, torch_version) is None


@pytest.mark.parametrize(
    ("torch_version", "wheel", "right"),
    [
        ("2.11.0+cu130", "0.2.0", "==0.1.5.post1"),
        ("2.11.0+cu130", "0.1.5.post3", "==0.1.5.post1"),
        ("2.13.0", "0.1.5.post1", "==0.2.0"),
        ("2.14.1", "0.2.0", "==0.2.5"),
        ("2.14.1", None, "==0.2.5"),
        ("2.11.0", None, "==0.1.5.post1"),
    ],
)
def test_pairs_that_do_not_fit_name_the_wheel_that_does(
    torch_version: str, wheel: str | None, right: str
) -> None:
    text = deep_gemm.wheel_problem(wheel, torch_version)
    assert text is not None
    assert_one_sentence(text, right, "--no-deps", wheel or "none installed")


def test_without_a_wheel_on_an_unknown_torch_there_is_a_reason_too() -> None:
    assert "2.12" not in deep_gemm.WHEELS
    text = deep_gemm.wheel_problem(None, "2.12.0")
    assert text is not None and "2.11" in text and "2.14" in text


@pytest.mark.parametrize(
    ("wheel", "h", "i", "slots", "ranks", "word"),
    [
        ("0.1.5.post1", 4096, 4352, 6, 1, "intermediate_size"),
        ("0.1.5.post1", 4096, 1408, 6, 1, "intermediate_size"),
        ("0.2.5", 4224, 2048, 6, 1, "hidden_size"),
        ("0.1.5.post1", 256, 256, 4, 1, "hidden_size"),
        ("0.1.5.post1", 4096, 2048, 33, 1, "top_k"),
    ],
)
def test_shapes_that_the_kernel_refuses(
    wheel: str, h: int, i: int, slots: int, ranks: int, word: str
) -> None:
    text = deep_gemm.shape_problem(wheel, h, i, slots, ranks)
    assert text is not None
    assert_one_sentence(text, word)
    assert "backend=" not in text  # the probe says that, once
    assert deep_gemm.shape_problem("0.1.5.post1", 4608, 2048, 6, 8) is None


def test_load_api_raises_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "installed_version", lambda: None)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with refuses(BackendUnavailable, "sgl-deep-gemm==0.1.5.post1"):
        deep_gemm.load_api()


@pytest.mark.parametrize(
    ("wheel", "torch_version", "kind"),
    [
        ("0.1.5.post1", "2.11.0", deep_gemm.TvmFfiApi),
        ("0.2.2", "2.14.1", deep_gemm.TvmFfiApi),
        ("0.2.3.post2", "2.14.1", deep_gemm.TorchOpsApi),
        ("0.2.5", "2.14.1", deep_gemm.BoundedApi),
    ],
)
def test_the_generation_is_chosen_by_version(
    monkeypatch: pytest.MonkeyPatch, wheel: str, torch_version: str, kind: type
) -> None:
    monkeypatch.setattr(deep_gemm, "installed_version", lambda: wheel)
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(_C=None))
    assert type(deep_gemm.load_api()) is kind


def test_an_import_that_fails_is_reported_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "installed_version", lambda: "0.2.5")
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # an import of it raises
    with refuses(BackendUnavailable, "0.2.5", "2.14.1", "--no-deps"):
        deep_gemm.load_api()


def test_the_jit_cache_can_be_set_before_deep_gemm_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(cuda_build.JIT_CACHE_VARIABLE, "before")
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    mm.set_jit_cache_dir(tmp_path)
    assert os.environ[cuda_build.JIT_CACHE_VARIABLE] == str(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace())
    with refuses(mm.MegaMoEError, "set_jit_cache_dir", "imported already"):
        mm.set_jit_cache_dir("elsewhere")
    assert os.environ[cuda_build.JIT_CACHE_VARIABLE] == str(tmp_path)


# -- the probe, on a GPU that is not there --------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch and the wheel look like a working SM90 machine; a test then breaks one thing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(deep_gemm, "installed_version", lambda: "0.1.5.post1")
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
    monkeypatch.setattr(deep_gemm_check, "run_check", lambda shape: None)
    return monkeypatch


FITS: dict[str, Any] = dict(hidden_size=512, intermediate_size=256, num_experts=8)


def verdict(**changes: Any) -> capability.Capability:
    return mm.probe(make_config(**{**FITS, **changes}), "cuda:0")


def test_auto_takes_deep_gemm_on_sm90(hopper: pytest.MonkeyPatch) -> None:
    found = verdict()
    assert found.backend == "deep_gemm" and found.details["deep_gemm"] == "0.1.5.post1"


def test_each_thing_that_is_missing_has_its_cure_and_no_fallback(
    hopper: pytest.MonkeyPatch,
) -> None:
    with hopper.context() as m:
        m.setattr(deep_gemm, "installed_version", lambda: None)
        assert verdict().backend is None and "0.1.5.post1" in verdict().reason
        assert "backend='triton'" in verdict().reason
    with hopper.context() as m:
        m.setattr(torch, "__version__", "2.14.1")
        assert verdict().backend is None and "0.2.5" in verdict().reason
    with hopper.context() as m:

        def no_nvcc() -> None:
            raise BackendUnavailable("nvcc: expected one, got none. Install the CUDA toolkit.")

        m.setattr(cuda_build, "find_nvcc", no_nvcc)
        assert verdict().backend is None and "CUDA toolkit" in verdict().reason
    with hopper.context() as m:
        m.setattr(deep_gemm_check, "run_check", lambda shape: "a launch failed: no device")
        assert verdict().backend is None and "no device" in verdict().reason
    assert verdict(intermediate_size=4224).backend is None


def test_deep_gemm_asked_for_on_another_gpu(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    hopper.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    found = verdict(backend="deep_gemm")
    assert found.backend is None
    assert "SM90" in found.reason and "A100" in found.reason and "triton" in found.reason


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_is_asked_for_on_sm90_and_the_choice_elsewhere(hopper: pytest.MonkeyPatch) -> None:
    found = verdict(backend="triton")
    assert found.backend == "triton" and "asked for" in found.reason
    for major, minor in ((8, 0), (8, 9), (10, 0), (12, 0)):
        hopper.setattr(torch.cuda, "get_device_capability", lambda device, c=(major, minor): c)
        found = verdict()
        assert found.backend == "triton" and f"SM{major}{minor}" in found.reason
        assert "SM90" in found.reason and found.details["triton"]


OTHER_ARITHMETIC = [{"swiglu_alpha": 1.702}, {"swiglu_beta": 1.0}, {"expert_bias": True}]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("changes", OTHER_ARITHMETIC, ids=str)
def test_arithmetic_that_the_mega_kernel_lacks(
    hopper: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    ((name, value),) = changes.items()
    found = verdict(**changes)
    assert found.backend == "triton"
    for words in ("mega kernel does not compute", name, f"got {value}", "H200"):
        assert words in found.reason
    refused = verdict(backend="deep_gemm", **changes)
    assert refused.backend is None
    assert_one_sentence(refused.reason, name, "sgl-deep-gemm", f"got {value}", "triton backend")
    spec = layer_spec(make_config(**{**FITS, **changes}), "deep_gemm")
    with refuses(BackendUnavailable, name, f"got {value}"):
        DeepGemmRuntime(spec, torch.device("cuda:0"))


def test_what_keeps_triton_from_running_has_its_cure(hopper: pytest.MonkeyPatch) -> None:
    asked = functools.partial(verdict, backend="triton")
    with hopper.context() as m:
        m.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        for found in (asked(), verdict()):
            assert found.backend is None
            assert_one_sentence(found.reason, "SM80", "SM75", "reference")
    for failure in ((False, "ImportError: no libtriton"), (True, None)):
        with hopper.context() as m:
            m.setattr(capability, "_import_triton", lambda details, failure=failure: failure)
            assert asked().backend is None
            assert_one_sentence(asked().reason, failure[1] or "TRITON_INTERPRET")
    with hopper.context() as m:
        m.setattr(capability.importlib.util, "find_spec", lambda name: None)
        assert_one_sentence(asked().reason, "none installed", "2.11.0+cu130")


def test_a_check_that_crashes_is_one_sentence_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The child dies here for want of a GPU: what a wrong wheel looks like."""
    monkeypatch.setattr(deep_gemm_check, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    if torch.cuda.is_available():
        pytest.skip("needs a machine where the child cannot succeed")
    failure = deep_gemm_check.run_check(deep_gemm_check.Shape(512, 256, 4, 0))
    assert failure is not None and "exit code 1" in failure
    assert not list(tmp_path.rglob("*.json"))


# -- peers ----------------------------------------------------------------------------------------


def test_peers_on_two_hosts_are_refused_with_ranks_and_hosts() -> None:
    """S19."""
    peers = [Peer("a", "GPU-0", False), Peer("a", "GPU-1", False), Peer("b", "GPU-0", False)]
    with refuses(BackendUnavailable, "ranks [0, 1] on a", "ranks [2] on b"):
        check_peers(peers)


def test_ranks_that_share_a_gpu_by_mistake_are_refused() -> None:
    """S55."""
    peers = [Peer("a", "GPU-0", True), Peer("a", "GPU-0", False)]
    with refuses(BackendUnavailable, "GPU-0", "[0, 1]", "set_device"):
        check_peers(peers)
    check_peers([Peer("a", "GPU-0", True)] * 2)
    assert symmetric.ranks_on_my_device([Peer("a", "GPU-0", True)] * 2, 1) == 2


def test_a_peer_pointer_of_zero_is_refused() -> None:
    """S19: the kernel would fault at its first store."""
    with refuses(BackendUnavailable, "[1, 2]", "NVLink"):
        check_pointers([5, 0, 0, 7])
    check_pointers([5, 6])
