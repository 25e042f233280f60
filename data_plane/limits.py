"""Constants of the data plane that nobody needs to set, and why."""

from __future__ import annotations

from typing import Final

EXPECTED_CONTEXT_TOKENS: Final = 8192
"""Tokens of a typical sequence, prompt and output. It decides how layer groups with an attention
window and without divide a pool's memory. After a wrong guess some blocks of one stay unused.
"""

NUM_LOCAL_DEVICE_REGIONS: Final = 4
"""Number of memory regions on this process's GPU, for engines on this machine whose tensors are
there. They take memory from the start, and an execution needs one: more engines copy through main
memory.
"""

LOCAL_SPIN_S: Final = 0.00005
"""Seconds to poll for an engine's next message before sleeping. Waking up takes about as long; a
longer time only takes a core from the kernels.
"""
