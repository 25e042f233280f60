"""Settings of the engine; every field is a flag and an environment variable of the programs that
use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvplane.errors import InvalidRequestError
from kvplane.layout import FLOAT_BYTES, KV_BYTES
from kvplane.models.config import require_folder
from kvplane.serving.config import (
    ClientTls,
    LayoutSettings,
    LogSettings,
    PoolSettings,
    ThreadSettings,
    memory_of,
)
from kvplane.serving.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings of the model."""

    HEADING: ClassVar[str] = "The model"

    model: Path = setting(help="Folder of a Hugging Face model.")
    probe: bool = setting(
        True,
        help="Compare the model's logits with those of transformers' own attention first. Without"
        " it a model that keeps other state, or attends in another way, gives wrong text.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """Settings of what is computed at one time."""

    HEADING: ClassVar[str] = "Batches"

    max_total_tokens: int = setting(
        0,
        unit="tokens",
        minimum=0,
        help="Most tokens of a sequence, prompt and answer; 0 takes the model's positions, up to"
        " the length from which its RoPE depends on the longest sequence (LongRoPE, dynamic NTK)."
        " A larger value gives all sequences the RoPE frequencies of that length.",
    )
    max_batch_tokens: int = setting(
        512, unit="tokens", minimum=1, help="Most tokens computed in one step."
    )
    max_sequences: int = setting(
        64, unit="sequences", minimum=1, help="Most sequences that compute in one step."
    )
    checkpoint_every_blocks: int = setting(
        0,
        unit="blocks",
        minimum=0,
        help="Of a model with running states, keep a checkpoint after every so many blocks of a"
        " sequence, besides that at the end of its prompt; 0 keeps that one alone.",
    )
    max_plan_s: float = setting(
        0.1,
        unit="s",
        minimum=0.0,
        help="Longest time of a plan: while all sequences decode, it has as many tokens of each as"
        " fit, and the control plane is asked once for all. A request that comes meanwhile waits;"
        " in a batch, where none can come, the limit is 0.25 s. 0 asks for each token.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings, BatchSettings, ThreadSettings, ClientTls, PoolSettings):
    """How an engine computes, and which planes it uses."""

    HEADING: ClassVar[str] = "The engine"

    num_host_blocks: int = 256
    data_plane: str = setting(
        "remote",
        choices=("remote", "embedded"),
        help="Where attention runs: in the pool's data plane; or in this process, which then holds"
        " the pool with the sizes and the layout below.",
    )
    device: str = setting(
        "auto",
        help='Device of the model, sampling and an embedded pool: "cpu", "cuda", "cuda:N", or'
        ' "auto": the first GPU. Rank R of --tensor-parallel takes the R-th GPU from there on.',
    )
    graphs: bool = setting(
        True,
        help="On a GPU with an embedded pool: capture the steps in which sequences get one token"
        " each as CUDA graphs, one for each of some batch sizes, and replay them.",
    )
    memory: str = setting(
        "90%",
        help="Memory of an embedded pool if --num-device-blocks is 0: bytes, as in 8GiB; or the"
        " share of the free memory that it takes together with the largest step, which is run once"
        " to measure it. On a GPU: the share of all, with weights and captured graphs.",
    )
    dtype: str = setting(
        "auto",
        choices=("auto", *FLOAT_BYTES),
        help="Type of weights, queries, keys and values; auto takes the pool's, and for an embedded"
        " pool the checkpoint's.",
    )
    kv_dtype: str = setting(
        "auto",
        choices=("auto", *KV_BYTES),
        help="Type of keys and values as stored; auto takes the pool's, and for an embedded pool"
        " that of --dtype.",
    )
    linears: str = setting(
        "torch",
        choices=("torch", "packed"),
        help="The model's linear layers: torch's own, or oneDNN's with packed weights, which are"
        " faster on a CPU, for the types that it supports there.",
    )
    compile: bool = setting(
        False,
        help="Compile the steps in which sequences get one token each, for 1, 2, 4 and so on up to"
        " --max-sequences of them, before the engine starts. Needs a C++ compiler on a CPU.",
    )
    timeout_s: float = setting(
        10.0,
        unit="s",
        minimum=0.1,
        help="Deadline of one call to a plane; half of --recovery-timeout-s where that is less.",
    )
    recovery_timeout_s: float = setting(
        60.0,
        unit="s",
        minimum=0.0,
        help="How long to wait for planes that went away, and for blocks that others hold.",
    )
    tensor_parallel: int = setting(
        1,
        unit="processes",
        minimum=1,
        maximum=64,
        help="Processes that compute the model, each with its heads and its shard of the pool: a"
        " remote pool with as many shards, or one that they embed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder(self.model)
        memory_of(self.memory)
        if self.compile and self.tensor_parallel > 1:
            raise InvalidRequestError("is for one process", field="compile")

    @property
    def call_timeout_s(self) -> float:
        """Timeout of each call to a plane in seconds: it leaves half of ``recovery_timeout_s`` to
        open another session in.
        """
        return min(self.timeout_s, self.recovery_timeout_s / 2 or self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class PrintLayoutSettings(ModelSettings, LayoutSettings):
    """Print a model's layout as JSON, for a data plane without transformers (--layout FILE)."""

    probe: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(EngineSettings, LogSettings):
    """Answer prompts with a model whose KV cache is behind a control plane and a data plane."""

    HEADING: ClassVar[str] = "The text"

    log_level: str = "warning"
    prompt: str = setting("", help="Text to continue.")
    prompts_file: Path | None = setting(None, help="File of prompts, one on each line.")
    max_tokens: int = setting(64, unit="tokens", minimum=1, help="Most tokens generated.")
    temperature: float = setting(0.0, minimum=0.0, help="0 takes the most likely token each time.")
    top_k: int = setting(
        0, unit="tokens", minimum=0, help="Sample from this many likeliest; 0: all."
    )
    top_p: float = setting(
        1.0,
        minimum=1e-6,
        maximum=1.0,
        help="Sample from the likeliest that together reach this probability.",
    )
    seed: int | None = setting(None, minimum=0, help="Seed of the random stream.")
    n: int = setting(1, minimum=1, maximum=256, help="Continuations of each prompt.")
    stop: str = setting("", help="Text that ends an answer and is left out of it.")
    num_beams: int = setting(
        1, minimum=1, maximum=64, help="Beams of a beam search for the --n best; 1: none."
    )
    ignore_eos: bool = setting(False, help="Continue past the model's end of sequence.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompt) == (self.prompts_file is not None):
            raise InvalidRequestError("give either --prompt or --prompts-file", field="prompt")
        if self.prompts_file is not None and not self.prompts_file.is_file():
            raise InvalidRequestError(f"{self.prompts_file} is not a file", field="prompts_file")

    def prompts(self) -> list[str]:
        """Return the prompts to answer, from the flags or a file."""
        if self.prompts_file is None:
            return [self.prompt]
        return [line for line in self.prompts_file.read_text().splitlines() if line]
