"""The sizes of the measurements."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS


@dataclass(frozen=True)
class Sizes:
    """The defaults are those in the names of the cases; ``QUICK`` only shows that they run."""

    prompt_blocks: int = 2_048
    num_pool_blocks: int = 100_000
    num_prompts: int = 200
    """Samples of each case that moves a prompt."""
    num_decode_steps: int = 1_000
    num_swaps: int = 40
    num_aborted_sequences: int = 256
    num_aborts: int = 5
    num_swapped_sequences: int = 100
    num_forks: int = 32_768
    num_prefix_sessions: int = 1_000
    """Sessions that have one cached prompt."""
    rate_s: float = 5.0
    """How long each rate is measured."""
    num_rate_steps: int = 2_000
    """Steps of each rate in process."""
    num_rebuilt_prompts: int = 488
    """Prompts that are rebuilt. They have ``prompt_blocks`` each, a million blocks in all."""

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_blocks * BLOCK_SIZE_TOKENS


FULL = Sizes()
QUICK = Sizes(
    prompt_blocks=64,
    num_pool_blocks=10_000,
    num_prompts=5,
    num_decode_steps=20,
    num_swaps=2,
    num_aborted_sequences=8,
    num_aborts=2,
    num_swapped_sequences=4,
    num_forks=100,
    num_prefix_sessions=5,
    rate_s=1.0,
    num_rate_steps=128,
    num_rebuilt_prompts=20,
)
