"""What an executor has done, as numbers that never decrease. Metrics read them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ExecutorCounters:
    """Counts since the process began."""

    num_plans_started: int = 0
    num_plans_run: int = 0
    num_written_tokens: int = 0
    """Tokens written, counted once per layer."""
    num_attention_tokens: int = 0
    """Query tokens whose attention was computed, counted once per layer."""
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    """By direction: "copy", "swap_out" or "swap_in"."""
    num_transferred_blocks: Counter[str] = field(default_factory=Counter)
    """By direction."""
    num_cleared_blocks: int = 0
    """Blocks zeroed because another tenant's data may have been in them."""
    num_rejections: Counter[str] = field(default_factory=Counter)
    """Commands refused, by the error's reason."""
