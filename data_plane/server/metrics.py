"""All metrics of the data plane. The executor's counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from data_plane.blocks_from_outside import PlugIn
from data_plane.execution.counters import BATCH_BOUNDS
from data_plane.execution.executor import Executor
from data_plane.kernels.backends.cpu import cpu_isa
from data_plane.memory.pool import TIER_NAMES
from data_plane.server.file_tier import FileTier
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.tier_keys import group_of, tier_of
from kvplane.serving.observability.metrics import (
    LATENCY_BUCKETS_S,
    Declaration,
    Histograms,
    PlaneMetrics,
    Samples,
)


def _gauge(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("gauge", f"kvplane_{name}", help, labels)


def _counter(name: str, help: str, *labels: str) -> Declaration:
    return Declaration("counter", f"kvplane_{name}_total", help, labels)


_RUN: Final = _gauge(
    "data_plane_info",
    "1, with this run's epoch, its shard, and the control plane that it last registered with.",
    "epoch",
    "shard",
    "incarnation",
)
_BACKEND: Final = _gauge(
    "kernel_backend", "1 for the kernels that plans run on, and their device.", "backend", "device"
)
_ISA: Final = _gauge(
    "kernel_isa",
    "1 for the instruction set of the CPU kernels, which a pool on a GPU uses only to read its "
    "host tier.",
    "isa",
)
_REGISTERED: Final = _gauge("registered", "1 while registered with a control plane.")
_OPEN_SESSIONS: Final = _gauge("open_sessions", "Open sessions.")
_TABLES: Final = _gauge("block_tables", "Block tables of all sessions.")
_PUBLISHED: Final = _gauge("published_blocks", "Device blocks that hold a published prefix.")
_QUEUE: Final = _gauge("command_queue_depth", "Commands of gRPC calls that run or wait to run.")
_LOCAL_REGIONS: Final = _gauge(
    "local_regions", "Memory regions shared with engines on this machine."
)
_LOCAL_BYTES: Final = _gauge("local_region_bytes", "Size of these regions.")
_LOCAL_DEVICE_REGIONS: Final = _gauge(
    "local_device_regions",
    "Memory regions on the GPU shared with engines, also ended ones that engines keep open.",
)
_LOCAL_PACKETS: Final = _counter(
    "local_packets", "Packets of engines on this machine, by the Unix socket."
)
_FILE_BLOCKS: Final = _gauge("file_tier_blocks", "Blocks kept in files.")
_FILE_BYTES: Final = _gauge("file_tier_bytes", "Size of these files.")
_FILE_MOVED: Final = _counter(
    "file_tier_moved_blocks",
    'Blocks "written" to files and "loaded" from them.',
    "direction",
)
_FILE_MISSES: Final = _counter(
    "file_tier_misses",
    "Blocks that were to be loaded and could not be read from their files, by reason: GONE, TORN, "
    "DAMAGED, MISMATCH or UNREADABLE.",
    "reason",
)
_FILE_ERRORS: Final = _counter(
    "file_tier_write_errors", "Files that could not be written, by error.", "error"
)
_FILE_REMOVED: Final = _counter(
    "file_tier_removed_files",
    'Files removed to make room ("evicted"), and those that were found at the start and were not '
    'whole or not of this shard ("torn").',
    "why",
)
_POOL_BLOCKS: Final = _gauge("pool_blocks", "Blocks of a tier, by layer group.", "tier", "group")
_POOL_BYTES: Final = _gauge("pool_bytes", "Bytes of a tier, by layer group.", "tier", "group")
_DEVICE_BYTES: Final = _gauge(
    "device_memory_bytes", "Memory of the GPU, of all processes; absent on the CPU.", "state"
)
_COMMAND_DURATION: Final = Declaration(
    "histogram",
    "kvplane_command_duration_seconds",
    "Time that the executor takes for a command, waiting for the device included.",
    ("command",),
    LATENCY_BUCKETS_S,
)
_COMMAND_REJECTIONS: Final = _counter(
    "command_rejections",
    "Commands that the executor refused, of gRPC calls and of this process, by the error's reason.",
    "reason",
)
_BATCH_TOKENS: Final = Declaration(
    "histogram", "kvplane_batch_tokens", "Query tokens of a plan that has some.", (), BATCH_BOUNDS
)
_BATCH_SEQUENCES: Final = Declaration(
    "histogram", "kvplane_batch_sequences", "Sequences of such a plan.", (), BATCH_BOUNDS
)
_KERNEL_TIME: Final = _counter(
    "kernel_seconds",
    "Time that the device spent in kernels; of every call on the CPU, of one in 16 on a GPU.",
    "kernel",
)
_KERNEL_BYTES: Final = _counter(
    "kernel_bytes",
    "Bytes of keys and values that the same calls had to read and write; divided by their time, "
    "the achieved bandwidth.",
    "kernel",
)
_STARTED: Final = _counter("plans_started", "Plans started.")
_RUN_PLANS: Final = _counter("plans_run", "Plans run to their end.")
_WRITTEN: Final = _counter("written_tokens", "Tokens written, counted once per layer.")
_ATTENDED: Final = _counter(
    "attention_tokens", "Query tokens whose attention was computed, counted once per layer."
)
_CLEARED: Final = _counter("cleared_blocks", "Blocks zeroed before another tenant got them.")
_MOVED_BYTES: Final = _counter("transferred_bytes", "Bytes copied and swapped.", "direction")
_MOVED_BLOCKS: Final = _counter("transferred_blocks", "Blocks copied and swapped.", "direction")

DECLARATIONS: Final = tuple(value for value in vars().values() if type(value) is Declaration)
_DIRECTIONS: Final = ("copy", "swap_out", "swap_in")


class DataPlaneMetrics(PlaneMetrics):
    """The metrics of one server, in a registry of their own. All have the pool's id as a label."""

    def __init__(self, pool_id: str) -> None:
        super().__init__("data", DECLARATIONS, {"pool": pool_id})
        self.registered = False
        self._command_duration = Histograms(LATENCY_BUCKETS_S)
        self._executor: Executor | None = None
        self._num_waiting: Callable[[], int] = lambda: 0
        self._local: LocalEndpoint | None = None
        self._files: FileTier | None = None
        self._plug_ins: Sequence[PlugIn] = ()

    def observe_command(self, name: str, duration_s: float) -> None:
        """Count one command of the executor and its duration."""
        self._command_duration.add(duration_s, name)

    def watch(
        self,
        executor: Executor,
        num_waiting: Callable[[], int],
        local: LocalEndpoint | None = None,
        files: FileTier | None = None,
        plug_ins: Sequence[PlugIn] = (),
    ) -> None:
        """Register what is read at each scrape: the executor's state and counters, the number of
        commands that wait for it, and the samples of its local endpoint, file tier and plug-ins.
        """
        self._executor, self._num_waiting, self._local = executor, num_waiting, local
        self._files, self._plug_ins = files, plug_ins
        for plug_in in plug_ins:
            self._declarations = (*self._declarations, *plug_in.declarations)

    def read(self, samples: Samples) -> None:
        samples.add(_ISA, 1, cpu_isa())
        samples.add(_REGISTERED, self.registered)
        samples.add(_QUEUE, self._num_waiting())
        samples.add_histograms(_COMMAND_DURATION, self._command_duration)
        if self._local is not None:
            samples.add(_LOCAL_REGIONS, self._local.num_regions)
            samples.add(_LOCAL_BYTES, self._local.num_bytes)
            samples.add(_LOCAL_DEVICE_REGIONS, self._local.num_device_regions)
            samples.add(_LOCAL_PACKETS, self._local.num_packets)
        if self._files is not None:
            _add_files(samples, self._files)
        for plug_in in self._plug_ins:
            plug_in.read(samples)
        executor = self._executor
        if executor is None:
            return
        _add_state(samples, executor)
        _add_counters(samples, executor)


def _add_files(samples: Samples, tier: FileTier) -> None:
    files, counts = tier.files, tier.counts
    samples.add(_FILE_BLOCKS, files.num_files)
    samples.add(_FILE_BYTES, files.num_bytes)
    for direction in ("written", "loaded"):
        samples.add(_FILE_MOVED, counts.num_blocks[direction], direction)
    for reason, count in [*counts.num_misses.items()]:
        samples.add(_FILE_MISSES, count, reason)
    for error, count in [*counts.num_write_errors.items()]:
        samples.add(_FILE_ERRORS, count, error)
    samples.add(_FILE_REMOVED, files.num_evicted, "evicted")
    samples.add(_FILE_REMOVED, files.num_torn, "torn")


def _add_state(samples: Samples, executor: Executor) -> None:
    samples.add(
        _RUN, 1, str(executor.epoch), str(executor.shard.index), str(executor.incarnation or "")
    )
    samples.add(_BACKEND, 1, executor.kernels.backend, str(executor.device))
    samples.add(_OPEN_SESSIONS, executor.num_sessions)
    samples.add(_TABLES, executor.num_sequences)
    samples.add(_PUBLISHED, executor.blocks.num_published)
    for tier_key, num_blocks in executor.pools.num_blocks.items():
        labels = TIER_NAMES[tier_of(tier_key)], executor.layout.groups[group_of(tier_key)].name
        samples.add(_POOL_BLOCKS, num_blocks, *labels)
        samples.add(_POOL_BYTES, executor.pools.num_bytes[tier_key], *labels)
    if executor.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(executor.device)
        samples.add(_DEVICE_BYTES, free, "free")
        samples.add(_DEVICE_BYTES, total - free, "used")


def _add_counters(samples: Samples, executor: Executor) -> None:
    counters = executor.counters
    samples.add_histogram(_BATCH_TOKENS, counters.batch_tokens)
    samples.add_histogram(_BATCH_SEQUENCES, counters.batch_spans)
    for reason, count in [*counters.num_rejections.items()]:
        samples.add(_COMMAND_REJECTIONS, count, reason)
    for kernel, spent_s in [*counters.kernel_s.items()]:
        samples.add(_KERNEL_TIME, spent_s, kernel)
        samples.add(_KERNEL_BYTES, counters.kernel_bytes[kernel], kernel)
    for declaration, value in (
        (_STARTED, counters.num_plans_started),
        (_RUN_PLANS, counters.num_plans_run),
        (_WRITTEN, counters.num_written_tokens),
        (_ATTENDED, counters.num_attention_tokens),
        (_CLEARED, counters.num_cleared_blocks),
    ):
        samples.add(declaration, value)
    for direction in _DIRECTIONS:
        samples.add(_MOVED_BYTES, counters.transfer_bytes[direction], direction)
        samples.add(_MOVED_BLOCKS, counters.num_transferred_blocks[direction], direction)
