"""Settings of the engine; every field is a flag and an environment variable of the programs that
use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvplane.errors import InvalidRequestError
from kvplane.serving.settings import setting

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes and whom it asks for blocks."""

    model: Path = setting(help="Folder of a Hugging Face model, Llama or OPT.")
    control_plane: str = setting("127.0.0.1:50051", help="Address of the control plane.")
    data_plane: str = setting(
        "remote",
        choices=("remote", "embedded"),
        help="Where attention runs: in the pool's data plane, or in this process.",
    )
    pool_id: str = setting("default", help="Pool to lease blocks from.")
    dtype: str = setting(
        "auto",
        choices=("auto", *DTYPES),
        help="Type of weights, queries, keys and values; auto takes the pool's.",
    )
    max_batch_tokens: int = setting(
        512, unit="tokens", minimum=1, help="Most tokens computed in one step."
    )
    max_sequences: int = setting(
        64, unit="sequences", minimum=1, help="Most sequences that compute in one step."
    )
    timeout_s: float = setting(10.0, unit="s", minimum=0.1, help="Deadline of one call to a plane.")
    recovery_timeout_s: float = setting(
        60.0,
        unit="s",
        minimum=0.0,
        help="How long to wait for planes that went away, and for blocks that others hold.",
    )
    num_threads: int = setting(
        0,
        unit="threads",
        minimum=0,
        help="Threads that compute the model; 0 leaves torch's choice.",
    )
    block_size_tokens: int = setting(
        16, unit="tokens", minimum=8, maximum=256, help="Block size of an embedded pool."
    )
    num_device_blocks: int = setting(
        0,
        unit="blocks",
        minimum=0,
        help="Device blocks of an embedded pool; 0 measures free memory.",
    )
    num_host_blocks: int = setting(
        256, unit="blocks", minimum=0, help="Host blocks of an embedded pool."
    )

    def __post_init__(self) -> None:
        if not self.model.is_dir():
            raise InvalidRequestError(f"{self.model} is not a folder", field="model")
