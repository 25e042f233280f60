"""A simulated GPU for this process: torch's device "cuda" is main memory, and the CUDA kernels run
on the emulator.

``install`` needs the CPU build of torch and must be called before torch is imported. A program for
a GPU then runs unchanged. Each address that it passes to a kernel is checked to be memory of the
device or of the host, as the kernel needs. Work runs when it is queued, so the simulation shows
neither speed nor what goes wrong when a stream runs late.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any, Final

import simulated_build

NAME: Final = "Simulated H100"
# Arguments of native calls that are addresses of the device, and of the host.
_ON_DEVICE: Final = (
    *("slots", "out", "lse", "block_tables", "query_starts", "context_lens"),
    *("workspace", "faults", "memory"),
)
_ON_HOST: Final = ("pairs", "block_ids", "counts")
_SIZES: Final = ("count_partials", "max_partials", "attention_workspace_bytes")
"""Native calls that read no tensor."""
_POOLS: Final = ("source", "destination", "pool", "blocks")
_COPIES: Final = ("copy_blocks", "gather_blocks", "scatter_blocks")
_CAPTURED: Final = ("reshape_and_cache", "paged_attention", "swap_blocks", *_COPIES)

lib: Any = None
torch: Any = None
_capture = threading.local()  # graph: the one that this thread captures


def install() -> None:
    """Installs the simulated GPU. Call it before torch is imported; later calls do nothing."""
    global lib, torch
    if lib is not None:
        return
    assert "torch" not in sys.modules, "torch was imported before the GPU was simulated"
    folder = simulated_build.torch_folder() / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(simulated_build.library()))
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("set_stream", None, [number]),
        ("stream", number, []),
        ("begin_capture", None, [number]),
        ("end_capture", None, []),
        ("num_recorded", number, [number]),
        ("replay", ctypes.c_char_p, [number, number, number]),
        ("forget_graph", None, [number]),
        ("register", None, [address, ctypes.c_size_t]),
        ("unregister", ctypes.c_int, [address]),
        ("is_device", ctypes.c_int, [address]),
        ("crossed", number, [ctypes.c_int]),
        ("memory", number, [ctypes.c_int]),
        ("reset_peak", None, []),
    ):
        function = getattr(lib, f"simulated_{name}")
        function.restype, function.argtypes = result, arguments
    torch = importlib.import_module("torch")
    assert torch.version.cuda is None, "the simulated GPU is for torch's CPU build"
    torch.version.cuda = "13.0"
    _replace_torch_cuda()
    _replace_copies()
    _replace_dlpack()
    sys.meta_path.insert(0, _Kernels())


def crossed() -> tuple[int, int]:
    """Return how many bytes torch copied to the device so far, and from it."""
    return lib.simulated_crossed(1), lib.simulated_crossed(0)


# torch.cuda


def _is_capturing() -> bool:
    return getattr(_capture, "graph", None) is not None


def _wait(what: str) -> None:
    if _is_capturing():
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


class Stream:
    """A stream, which is only a number: 0 is the default one. Native calls get ``cuda_stream``."""

    _made: Final[dict[int, Stream]] = {}
    _lock: Final = threading.Lock()
    _next = 1

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> Stream:
        with cls._lock:
            if number is None:
                number, cls._next = cls._next, cls._next + 1
            if number not in cls._made:
                self = cls._made[number] = object.__new__(cls)
                self.number, self.priority = number, priority
                self.device = torch.device("cuda", 0)
            return cls._made[number]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def cuda_stream(self) -> int:
        return self.number * 4096

    @property
    def stream_id(self) -> int:
        return self.number

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        _wait("stream.synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event, which has always happened."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._has_time, self._at_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait("event.synchronize")

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        assert self._has_time and other._has_time, "made without enable_timing"
        return max(1e-3, (other._at_s - self._at_s) * 1e3)


class CUDAGraph:
    """The torch operations, recorded by the library, and native calls of a capture, in order."""

    _next = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number, CUDAGraph._next = CUDAGraph._next, CUDAGraph._next + 1
        self.calls: list[tuple[int, Callable[[], object]]] = []

    def __del__(self) -> None:
        if lib is not None:
            lib.simulated_forget_graph(self.number)

    def note(self, call: Callable[[], object]) -> None:
        """Records a native call, after the operations that were recorded so far."""
        self.calls.append((lib.simulated_num_recorded(self.number), call))

    def replay(self) -> None:
        done = 0
        for place, call in self.calls:
            self._replay(done, place)
            call()
            done = place
        self._replay(done, lib.simulated_num_recorded(self.number))

    def reset(self) -> None:
        self.calls = []
        lib.simulated_forget_graph(self.number)

    def _replay(self, first: int, end: int) -> None:
        error = lib.simulated_replay(self.number, first, end) if first < end else b""
        if error:
            raise RuntimeError(error.decode())


@contextmanager
def _graph(
    graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    with _on(stream or Stream()):
        _capture.graph = graph
        lib.simulated_begin_capture(graph.number)
        try:
            yield
        finally:
            lib.simulated_end_capture()
            _capture.graph = None


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = lib.simulated_stream()
    if stream is not None:
        lib.simulated_set_stream(stream.number)
    try:
        yield
    finally:
        lib.simulated_set_stream(before)


class _OnDevice:
    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> _OnDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Runtime:
    """Pins memory of the host, as ``torch.cuda.cudart()`` does."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        lib.simulated_register(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(lib.simulated_unregister(address))


def _replace_torch_cuda() -> None:
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
    )
    for name, value in {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "memory_allocated": lambda device=None: lib.simulated_memory(0),
        "max_memory_allocated": lambda device=None: lib.simulated_memory(1),
        "reset_peak_memory_stats": lambda device=None: lib.simulated_reset_peak(),
        "graph_pool_handle": lambda: (0, 0),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: _wait("synchronize"),
        "current_stream": lambda device=None: Stream(number=lib.simulated_stream()),
        "default_stream": lambda device=None: Stream(number=0),
        "set_stream": lambda stream: lib.simulated_set_stream(stream.number),
        "stream": _on,
        "device": _OnDevice,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "is_current_stream_capturing": _is_capturing,
        "cudart": lambda: _Runtime,
        "_sleep": lambda cycles: None,
    }.items():
        setattr(cuda, name, value)


def _replace_copies() -> None:
    """Replaces methods of tensors that need a driver, or copy by pickling."""
    device = torch.device("cuda", 0)

    def to_cuda(self: Any, where: Any = None, non_blocking: bool = False) -> Any:
        return self.to(device, non_blocking=non_blocking)

    def pin_memory(self: Any, where: Any = None) -> Any:
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=True).copy_(self)

    torch.Tensor.cuda, torch.Tensor.pin_memory = to_cuda, pin_memory
    for kind in (torch.Tensor, torch.nn.Parameter):
        kind.__deepcopy__ = functools.partialmethod(_deep_copy, own=kind.__deepcopy__)


def _deep_copy(self: Any, memo: dict[int, Any], *, own: Callable[..., Any]) -> Any:
    if not self.is_cuda:
        return own(self, memo)
    if id(self) not in memo:
        with torch.no_grad():
            new = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, self.requires_grad)
        memo[id(self)] = new
    return memo[id(self)]


# kvplane_kernels._cuda


class _Shared:
    """The emulator's memory that two processes share; its tensors are on the device."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def handle(self) -> bytes:
        return bytes(self._memory.handle())

    def dlpack(self) -> _Capsule:
        return _Capsule(self._memory.dlpack())


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule


def _replace_dlpack() -> None:
    own = torch.utils.dlpack.from_dlpack

    def from_dlpack(given: Any, **how: Any) -> Any:
        if isinstance(given, _Capsule):
            return torch.ops.simulated_gpu.as_device(own(given.capsule))
        return own(given, **how)

    torch.utils.dlpack.from_dlpack = from_dlpack


class _Kernels:
    """Imports ``kvplane_kernels._cuda``, which has all that the emulated module has."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return ModuleSpec(name, self) if name == "kvplane_kernels._cuda" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        kernels = simulated_build.ROOT / "tests" / "kernels"
        if str(kernels) not in sys.path:
            sys.path.append(str(kernels))
        native = importlib.import_module("emulated_build").emulated_module()
        made: Any = types.ModuleType(spec.name)
        lock = threading.RLock()
        for name, value in vars(native).items():
            if name.startswith("_"):
                continue
            is_call = callable(value) and not isinstance(value, type)
            setattr(made, name, _checked(name, value, lock) if is_call else value)
        made.TensorView = functools.partial(_tensor_view, native.TensorView)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _tensor_view(make: Any, address: int, dtype: Any, shape: Any, strides: Any) -> Any:
    _views.of_host |= 0 not in tuple(shape) and not lib.simulated_is_device(address)
    return make(address, dtype, shape, strides)


class _Views(threading.local):
    """Whether this thread made a view of a host tensor since its last native call."""

    of_host = False


_views = _Views()


def _checked(name: str, function: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    def call(*args: Any, **given: Any) -> Any:
        if name in ("open_shared", "allocate_shared"):
            return _Shared(function(*args, **given))
        if name in ("device_uuid", "device_count"):
            return function(*args, **given)
        of_host, _views.of_host = _views.of_host, False
        if of_host and name not in _SIZES:
            raise AssertionError(f"simulated GPU: {name}: a tensor is not on the GPU")
        on_device = () if name == "count_partials" else _ON_DEVICE
        on_device += _POOLS if name in _COPIES else ()
        for key in on_device:
            if given.get(key) and not lib.simulated_is_device(given[key]):
                raise AssertionError(f"simulated GPU: {name}: {key} is not on the GPU")
        for key in _ON_HOST:
            if given.get(key) and lib.simulated_is_device(given[key]):
                raise AssertionError(f"simulated GPU: {name}: {key} is on the GPU")
        if "stream" in given:
            now = torch.cuda.current_stream().cuda_stream
            if given["stream"] != now and name != "probe":
                raise AssertionError(
                    f"simulated GPU: {name}: stream {given['stream']}, not the current {now}"
                )
            given = given | {"stream": 0}

        def run() -> Any:
            with lock:
                return function(*args, **given)

        graph = getattr(_capture, "graph", None)
        if graph is None:
            return run()
        if name in _CAPTURED:
            graph.note(run)
            return None
        if name == "plan_attention":
            graph.note(run)
        return run()

    return call
