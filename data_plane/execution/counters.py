"""An executor's counters, which never decrease. Metrics read them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

from kvplane.serving.observability.histogram import Histogram

BATCH_BOUNDS: Final = tuple(float(2**i) for i in range(18))


@dataclass(slots=True)
class ExecutorCounters:
    """Counters of what an executor has done since the process began."""

    num_plans_started: int = 0
    num_plans_run: int = 0
    num_written_tokens: int = 0
    """Tokens whose keys and values were written, counted once for each layer."""
    num_attention_tokens: int = 0
    """Query tokens whose attention was computed, counted once for each layer."""
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes transferred, by direction: "copy", "swap_out" or "swap_in"."""
    num_transferred_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks transferred, by direction."""
    num_cleared_blocks: int = 0
    """Blocks zeroed because another tenant's data may have been in them."""
    num_rejections: Counter[str] = field(default_factory=Counter)
    """Commands refused, by the error's reason."""
    kernel_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the device spent in kernels, by kernel; of the calls that were timed."""
    kernel_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of keys and values that those calls had to read and write, by kernel."""
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    """Histogram of the query tokens of plans with spans."""
    batch_spans: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    """Histogram of the sequences of plans with spans."""
