"""The order in which an engine and a data plane use memory of one GPU, as the engine keeps it: with
streams that say what is asked of them.
"""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from kvplane.runtime import device_region
from kvplane.runtime.device_region import DeviceRegion, cuda_module, gpu_of
from kvplane.runtime.region_layers import RegionLayers, _Bound
from kvplane.transport.local import packets


class Stream:
    def __init__(self, name: str, done: list[str]) -> None:
        self._name = name
        self._done = done

    def wait_stream(self, other: Stream) -> None:
        self._done.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._done.append(f"{self._name} is waited for")


class Memory:
    def dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(torch.zeros(256, dtype=torch.uint8))


@pytest.fixture
def region() -> DeviceRegion:
    region = DeviceRegion(2, Memory())
    device = torch.device("cuda", 1)
    region.whole = SimpleNamespace(is_cuda=True, device=device)  # type: ignore[assignment]
    return region


def test_what_was_put_is_there_before_the_packet(
    region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    stream = Stream("one", done)
    asked: list[torch.device] = []

    def current_stream(device: torch.device) -> Stream:
        asked.append(device)
        return stream

    monkeypatch.setattr(device_region.torch.cuda, "current_stream", current_stream)
    for _ in range(2):
        region.follow()
        region.settle()
    assert done == ["one is waited for"] * 2
    assert asked == [torch.device("cuda", 1)] * 2


def test_an_output_of_another_stream_is_read_before_the_next(
    region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    streams = iter([Stream("one", done), Stream("two", done)])
    monkeypatch.setattr(device_region.torch.cuda, "current_stream", lambda _: next(streams))
    for _ in range(2):
        region.follow()
        region.settle()
    assert done == ["one is waited for", "two waits for one", "two is waited for"]


def test_a_layer_puts_its_tensors_between_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noting(what: str) -> Any:
        return lambda *_: done.append(what) or True  # type: ignore[func-returns-value]

    layers = RegionLayers(SimpleNamespace(layer_local=noting("send")))  # type: ignore[arg-type]
    region = SimpleNamespace(follow=noting("follow"), settle=noting("settle"))
    there, tensor = SimpleNamespace(copy_=noting("put")), torch.zeros(1)
    bound = _Bound(region, None, (there,) * 3, tensor, None)  # type: ignore[arg-type]
    monkeypatch.setattr(layers, "_find", lambda *_: bound)
    assert layers.layer(0, tensor, tensor, tensor, AttentionOptions()) is not None
    assert done == ["follow", "put", "put", "put", "settle", "send"]


def test_started_programs_do_not_get_the_file() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [b"one"], [theirs.fileno()])
        theirs.send(b"two")
        packet, file = packets.receive_file(ours)
        assert packet == b"one" and not os.get_inheritable(file)
        os.close(file)
        assert packets.receive_file(ours) == (b"two", -1)


def test_memory_of_the_host_needs_no_order() -> None:
    region = DeviceRegion(2, Memory())
    region.follow()
    region.settle()
    assert region.place([1, 64, 64]) == [0, 64, 128]
    assert region.place([1, 64, 129]) is None


def test_tensors_of_the_host_are_on_no_gpu() -> None:
    assert gpu_of(torch.zeros(1)) is None


def test_there_is_no_module_where_no_kernels_for_cuda_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = SimpleNamespace()
    for has, held in ((lambda _: None, older), (lambda _: True, older)):
        monkeypatch.setattr(device_region, "find_spec", has)
        monkeypatch.setattr(device_region, "import_module", lambda _, held=held: held)
        assert cuda_module() is None
