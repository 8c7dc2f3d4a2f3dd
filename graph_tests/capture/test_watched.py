"""The tensors that captured graphs hold by address: checked in Python, and in C++ on CUDA."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_one_sentence,
    make_config,
    make_layer,
    named,
    no_launch,
    outcome,
    random_inputs,
    refuses,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import megamoe_compile as mm
from megamoe_compile.capture import runner as graph
from megamoe_compile.capture.watched import WatchedTensors, builds_native_check
from megamoe_compile.custom_ops.cuda import build as cuda_build
from megamoe_compile.custom_ops.cuda import watched as watched_native
from megamoe_compile.custom_ops.cuda.watched import NativeWatch

CUDA = torch.device("cuda")  # only its name is asked for


@pytest.fixture(scope="module")
def built() -> None:
    reason = outcome(cuda_build.find_cxx) or outcome(cuda_build.find_python_headers)
    if reason:
        pytest.skip(reason)
    watched_native.build_library()


@pytest.fixture(params=["python", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "native":
        request.getfixturevalue("built")
    return bool(request.param == "native")


def make_block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))


def watch(module: nn.Module, native: bool) -> WatchedTensors:
    watched = WatchedTensors(dict(module.named_modules()), native=native)
    if native:
        assert watched._native is not None and watched._native.first_moved() == -1
    watched.check()
    return watched


def name_of_moved(watched: WatchedTensors) -> str:
    """What check() names; C++ points at the same entry."""
    message = outcome(watched.check)
    if not message:
        assert watched._native is None or watched._native.first_moved() == -1
        return ""
    assert_one_sentence(message)
    start = "MegaMoEError: address of "
    assert message.startswith(start)
    assert re.search(": expected the captured one, got (another|none). ", message)
    name = message.removeprefix(start).partition(":")[0]
    if watched._native is not None:
        assert watched._tensors[watched._native.first_moved()][0] == name
    return name


def test_watched_tensors_see_moves_and_nothing_else(native: bool) -> None:
    block = make_block()
    watched = watch(block, native)
    linear = block[0]
    linear.weight.data.fill_(1)
    block.register_buffer("late", torch.zeros(1))  # not in a graph that was captured before
    linear.register_parameter("later", None)
    block.append(nn.Linear(4, 4))
    assert name_of_moved(watched) == ""
    kept = linear._parameters.pop("weight")
    assert name_of_moved(watched) == "0.weight"
    linear._parameters["weight"] = kept  # now in another order
    assert name_of_moved(watched) == ""
    linear.weight.data = linear.weight.data.clone()
    assert name_of_moved(watched) == "0.weight"
    block[2].running_mean = torch.zeros(4)
    fresh = watch(block, native)
    block.double()
    assert name_of_moved(fresh) == ".late"


def replace(owner: dict[str, Any], key: str) -> None:
    owner[key] = nn.Parameter(owner[key].detach().clone(), requires_grad=False)


def move(owner: dict[str, Any], key: str) -> None:
    owner[key].data = owner[key].data.clone()


def shift(owner: dict[str, Any], key: str) -> None:
    owner[key].data = owner[key].data.flatten()[1:]  # in the same storage


def swap(owner: dict[str, Any], key: str) -> None:
    """The object stays, its insides are another's."""
    other = owner[key].detach().clone()
    torch.utils.swap_tensors(
        owner[key], nn.Parameter(other) if isinstance(owner[key], nn.Parameter) else other
    )


CHANGES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "replaced": replace,
    "moved": move,
    "shifted": shift,
    "swapped": swap,
    "freed": lambda owner, key: owner[key].untyped_storage().resize_(0),
    "removed": dict.pop,
    "None": lambda owner, key: owner.update({key: None}),
    "no data": lambda owner, key: owner.update({key: owner[key].to("meta")}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["0.weight", "1.bias", "2.running_var"])  # the last is a buffer
def test_any_entry_may_change(native: bool, name: str, change: str) -> None:
    block = make_block()
    watched = watch(block, native)
    place, key = name.split(".")
    module = block[int(place)]
    owner = module._parameters if key in module._parameters else module._buffers
    kept = owner[key]
    CHANGES[change](owner, key)
    assert name_of_moved(watched) == name
    del kept  # so that its address was not given to another


def test_the_same_tensor_under_another_object_has_not_moved(native: bool) -> None:
    block = make_block()
    watched = watch(block, native)
    block[0].weight = nn.Parameter(block[0].weight.data)
    assert name_of_moved(watched) == ""


def test_one_of_many_is_found(native: bool) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(400))
    watched = watch(model, native)
    assert len(watched._tensors) == 800
    for place in (399, 200, 0):
        move(model[place]._parameters, "bias")
        assert name_of_moved(watched) == f"{place}.bias"


def test_nothing_to_watch(native: bool) -> None:
    assert name_of_moved(WatchedTensors({}, native=native)) == ""


class Elsewhere(Tensor):
    """A subclass with data of its own: C++ sees another address than Python."""

    def data_ptr(self) -> int:
        return 64


def test_python_decides_about_subclasses(built: None) -> None:
    block = make_block()
    block[0].weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Elsewhere), requires_grad=False)
    watched = WatchedTensors(dict(block.named_modules()), native=True)
    assert watched._native is not None and watched._native.first_moved() == 0
    watched.check()
    move(block[1]._parameters, "bias")
    assert outcome(watched.check).startswith("MegaMoEError: address of 1.bias: ")


class Proxy:
    """Says that it is a tensor, and is not."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return Tensor


def test_what_is_no_tensor_with_data_is_only_different(built: None) -> None:
    tensor = torch.zeros(3)
    with FakeTensorMode():
        fake = torch.zeros(3)
    owner: dict[str, Any] = {"key": tensor}
    watch = NativeWatch([(owner, "key", tensor.data_ptr())])
    assert watch.first_moved() == -1
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1), [1.0], (3,), check_invariants=True)
    for other in (fake, sparse, nn.UninitializedParameter(), Proxy(), 3, None, Tensor, owner):
        owner["key"] = other
        assert watch.first_moved() == 0
    owner["key"] = tensor
    assert watch.first_moved() == -1
    wrong: list[Any] = [([], "key", 0), (owner, [], 0), (owner, "key ", 0)]
    for entry in wrong:  # no dictionary, no hash, no such key; ctypes would raise what is left
        assert NativeWatch([(owner, "key", tensor.data_ptr()), entry]).first_moved() == 1


# -- looked up once, where the interpreter tells of changes ----------------------------------------

TELLS = sys.version_info >= (3, 12)


def looks_up(watch: NativeWatch) -> bool:
    """Whether the next check reads the dictionaries: it would miss a key that is not there."""
    key = watch._entries[0].key
    watch._entries[0].key = "not there"
    moved = watch.first_moved()
    watch._entries[0].key = key
    assert moved in (-1, 0)
    return moved == 0


def watched_tensors(count: int = 3) -> tuple[dict[str, Any], NativeWatch]:
    owner: dict[str, Any] = {f"key {place}": torch.zeros(3) for place in range(count)}
    return owner, NativeWatch([(owner, key, t.data_ptr()) for key, t in owner.items()])


def test_entries_are_looked_up_until_they_were_all_found(built: None) -> None:
    owner, watch = watched_tensors()
    assert watch.watches == TELLS and looks_up(watch)
    assert watch.first_moved() == -1 and looks_up(watch) == (not TELLS)
    last = owner.pop("key 2")
    for _ in range(2):
        assert watch.first_moved() == 2 and looks_up(watch)
    owner["key 2"] = last
    assert looks_up(watch) and watch.first_moved() == -1 and looks_up(watch) == (not TELLS)
    owner["key 1"].data = torch.ones(3)  # no change of the dictionary
    assert watch.first_moved() == 1 and watch.first_moved() == 1


DICT_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "set": lambda owner: owner.__setitem__("key 1", torch.ones(3)),
    "delete": lambda owner: owner.__delitem__("key 1"),
    "pop": lambda owner: owner.pop("key 1"),
    "popitem": dict.popitem,
    "clear": dict.clear,
    "update": lambda owner: owner.update({"key 1": torch.ones(3)}),
    "or": lambda owner: owner.__ior__({"key 1": torch.ones(3)}),
    "set by a class": lambda owner: dict.__setitem__(owner, "key 0", None),
    "clear and fill": lambda owner: (owner.clear(), owner.update({"key 0": 1})),
    "grow and set": lambda owner: (
        owner.update({str(place): place for place in range(100)}),
        owner.update({"key 1": torch.ones(3)}),
    ),
}


@pytest.mark.parametrize("change", DICT_CHANGES)
@pytest.mark.parametrize("attribute", [False, True])
def test_no_change_of_a_dictionary_is_missed(built: None, change: str, attribute: bool) -> None:
    owner, watch = watched_tensors()
    if attribute:  # of an object, whose values Python may keep without a dictionary
        holder = nn.Module()
        holder._parameters = owner
        owner = holder._parameters
    assert watch.first_moved() == watch.first_moved() == -1
    kept = list(owner.values())  # so that no address is given to another
    DICT_CHANGES[change](owner)
    assert watch.first_moved() >= 0
    del kept


def test_setdefault_fills_what_was_removed(built: None) -> None:
    owner, watch = watched_tensors()
    tensor = owner.pop("key 1")
    assert watch.first_moved() == 1
    owner.setdefault("key 1", tensor)
    assert watch.first_moved() == watch.first_moved() == -1


def test_watches_of_the_same_dictionary_do_not_disturb_each_other(built: None) -> None:
    owner, first = watched_tensors()
    second = NativeWatch([(owner, "key 0", owner["key 0"].data_ptr())])
    assert first.first_moved() == second.first_moved() == -1
    del second
    gc.collect()
    assert looks_up(first) == (not TELLS)
    kept = owner["key 0"]
    owner["key 0"] = torch.ones(3)
    assert first.first_moved() == 0
    owner["key 0"] = kept
    assert first.first_moved() == -1


def test_another_object_of_the_same_memory_is_held_from_then_on(built: None) -> None:
    owner, watch = watched_tensors()
    assert watch.first_moved() == -1
    owner["key 0"] = owner["key 0"].view(3)  # the object before is freed
    gc.collect()
    assert looks_up(watch) and watch.first_moved() == -1
    assert watch._entries[0].found == id(owner["key 0"])
    owner["key 0"].data = torch.ones(3)
    assert watch.first_moved() == 0


def test_what_cannot_be_watched_is_looked_up(built: None) -> None:
    owner, _ = watched_tensors()
    mixed: list[Any] = [([], "key", 0), (owner, "key 0", owner["key 0"].data_ptr())]
    watch = NativeWatch(mixed)
    assert not watch.watches
    assert watch.first_moved() == watch.first_moved() == 0 and looks_up(watch)


def test_references_are_held_and_given_back(built: None) -> None:
    owner: dict[str, Any] = {"key": torch.zeros(3)}
    key = "a key of its own"[:8]
    owner[key] = torch.zeros(3)
    before = sys.getrefcount(owner), sys.getrefcount(key), sys.getrefcount(owner[key])
    watch = NativeWatch([(owner, name, tensor.data_ptr()) for name, tensor in owner.items()])
    held = sys.getrefcount(owner), sys.getrefcount(key), sys.getrefcount(owner[key])
    assert held[0] > before[0] and held[1] > before[1] and held[2] == before[2]
    for _ in range(1000):
        watch.first_moved()
    gc.collect()
    assert held == (sys.getrefcount(owner), sys.getrefcount(key), sys.getrefcount(owner[key]))
    del watch
    assert before == (sys.getrefcount(owner), sys.getrefcount(key), sys.getrefcount(owner[key]))


def test_a_model_that_refers_to_its_watch_is_collected(native: bool) -> None:
    block = make_block()
    block[0].weight.watched = watch(block, native)  # as a runner that its model keeps
    alive = weakref.ref(block[0].weight)
    del block
    gc.collect()
    assert alive() is None


# -- when it is built -----------------------------------------------------------------------------


def test_the_layout_is_that_of_c() -> None:
    sizes = ctypes.sizeof(watched_native._Watched), ctypes.sizeof(watched_native._Watch)
    assert sizes == (32, 24)  # asserted there too


def test_only_cuda_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(watched_native, "build_library", lambda: calls.append(1))
    assert not builds_native_check(torch.device("cpu")) and calls == []
    assert builds_native_check(CUDA) and calls == [1]


def test_the_check_in_python_takes_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warning() -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not builds_native_check(CUDA)
        (record,) = caplog.records
        assert record.name == "megamoe_compile.capture.watched"
        return record.getMessage()

    watched_native.build_library.cache_clear()
    monkeypatch.setattr(cuda_build, "default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "C++ compiler: " in warning() and "Run: apt-get install g++" in warning()
    fake = tmp_path / "cxx"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no C++20"\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    got = warning()
    assert "exit status 0, got 3" in got and "no C++20" in got
    assert torch.__version__ in got and sys.implementation.cache_tag in got
    paths = {"include": str(tmp_path / "include")}
    monkeypatch.setattr(cuda_build.sysconfig, "get_paths", lambda: paths)
    got = warning()
    assert f"Python's headers: expected Python.h in {tmp_path}" in got and "python3-dev" in got
    assert_one_sentence(got)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_runner_asks_it(built: None, monkeypatch: pytest.MonkeyPatch, on_cuda: bool) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(
        graph, "builds_native_check", lambda device: devices.append(device) or on_cuda
    )
    with mm.MegaMoEContext(make_config(), device="cpu") as context:
        layer = make_layer(context)
        inputs = named(random_inputs(context.config, 4))
        runner = mm.GraphRunner(layer, inputs, [4], context)
        assert devices == [context.device]
        runner.capture(progress=False)
        runner(num_tokens=4, **inputs)
        assert (runner._watched._native is not None) == on_cuda
        layer.w13.data = layer.w13.data.clone()
        with no_launch(context), refuses(mm.MegaMoEError, "MegaMoE[0].w13", "write into"):
            runner(num_tokens=4, **inputs)


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_runner_checks_in_c() -> None:
    config = make_config(hidden_size=512, intermediate_size=256, num_experts=8)
    with mm.MegaMoEContext(config, device="cuda") as context:
        layer = make_layer(context)
        inputs = named(random_inputs(config, 4, device="cuda"))
        runner = mm.GraphRunner(layer, inputs, [4], context)
        runner.capture(progress=False)
        runner(num_tokens=4, **inputs)
        native = runner._watched._native
        assert native is not None and native.first_moved() == -1
        layer.w13.data = layer.w13.data.clone()
        with refuses(mm.MegaMoEError, "MegaMoE[0].w13", "write into"):
            runner(num_tokens=4, **inputs)
