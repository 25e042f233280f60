"""Settings of the engine; every field is a flag and an environment variable of the programs that
use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import FP8_BYTES
from kvplane.serving.observability.logs import FORMATS, LEVELS
from kvplane.serving.settings import setting

if TYPE_CHECKING:
    from kvplane.transport.tls import Tls

ROOT: Final = Path(__file__).resolve().parent.parent
DTYPES: Final = ("float32", "bfloat16", "float16")
KV_DTYPES: Final = (*DTYPES, *FP8_BYTES)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes, and which planes it uses."""

    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The model": (
            *("model", "probe", "dtype", "kv_dtype", "linears", "num_threads", "tensor_parallel"),
        ),
        "Batches": (
            *("max_total_tokens", "max_batch_tokens", "max_sequences", "plans_ahead", "max_plan_s"),
        ),
        "The planes": (
            *("control_plane", "data_plane", "pool_id", "timeout_s", "recovery_timeout_s"),
            *("planes_tls", "planes_ca", "planes_certificate", "planes_key", "planes_name"),
            "planes_token_file",
        ),
        "An embedded pool": (
            *("block_size_tokens", "num_device_blocks", "num_host_blocks", "latent"),
        ),
    }
    model: Path = setting(help="Folder of a Hugging Face model.")
    control_plane: str = setting(
        "127.0.0.1:50051", help="Addresses, with commas, of all control planes that may lead."
    )
    data_plane: str = setting(
        "remote",
        choices=("remote", "embedded"),
        help="Where attention runs: in the pool's data plane, or in this process.",
    )
    pool_id: str = setting("default", help="Pool to lease blocks from.")
    probe: bool = setting(
        True,
        help="Compare the model's logits with those of transformers' own attention first. Without"
        " it a model that keeps other state, or attends in another way, gives wrong text.",
    )
    dtype: str = setting(
        "auto",
        choices=("auto", *DTYPES),
        help="Type of weights, queries, keys and values; auto takes the pool's.",
    )
    kv_dtype: str = setting(
        "auto",
        choices=("auto", *KV_DTYPES),
        help="Type of keys and values as stored; auto takes the pool's, and for an embedded pool"
        " that of --dtype.",
    )
    linears: str = setting(
        "torch",
        choices=("torch", "packed"),
        help="The model's linear layers: torch's own, or oneDNN's with packed weights, which are"
        " faster on a CPU, for the types that it supports there.",
    )
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
    plans_ahead: bool = setting(
        True, help="Ask for a step's plan while the step before is computed."
    )
    max_plan_s: float = setting(
        0.1,
        unit="s",
        minimum=0.0,
        help="Longest time of a plan: while all sequences decode, it has as many tokens of each as"
        " fit, and the control plane is asked once for all. A request that comes meanwhile waits;"
        " in a batch, where none can come, the limit is 0.25 s. 0 asks for each token.",
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
    planes_tls: bool = setting(False, help="Reach the planes over TLS.")
    planes_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs the planes' certificates; none means the"
        " authorities that gRPC ships with.",
    )
    planes_certificate: Path | None = setting(
        None, help="PEM file of the certificate that names this engine to the planes."
    )
    planes_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    planes_name: str = setting(
        "", help="Name that the planes' certificates must have, where it is not their host's."
    )
    planes_token_file: Path | None = setting(
        None, help="File with the bearer token that names this engine to the planes."
    )
    num_threads: int = setting(
        0,
        unit="threads",
        minimum=0,
        help="Threads that compute the model; 0 leaves torch's choice.",
    )
    tensor_parallel: int = setting(
        1,
        unit="processes",
        minimum=1,
        maximum=64,
        help="Processes that compute the model, each with its heads and its shard of the pool: a"
        " remote pool with as many shards, or one that they embed.",
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
    latent: bool = setting(
        True,
        help="Keep latents in an embedded pool, for a model that has them; a remote pool has its"
        " own --latent.",
    )

    def __post_init__(self) -> None:
        if not self.model.is_dir():
            raise InvalidRequestError(f"{self.model} is not a folder", field="model")
        others = (
            "planes_ca",
            "planes_certificate",
            "planes_key",
            "planes_name",
            "planes_token_file",
        )
        for name in others if not self.planes_tls else ():
            if getattr(self, name):
                raise InvalidRequestError("needs --planes-tls too", field=name)

    @property
    def call_timeout_s(self) -> float:
        """Timeout of each call to a plane. A call that fails leaves half of ``recovery_timeout_s``
        to open another session in.
        """
        return min(self.timeout_s, self.recovery_timeout_s / 2 or self.timeout_s)

    @property
    def client_tls(self) -> Tls | None:
        """How to reach the planes; None for plain text."""
        if not self.planes_tls:
            return None
        from kvplane.transport.tls import Tls  # gRPC must not be imported before it is tuned

        return Tls(
            self.planes_ca,
            self.planes_certificate,
            self.planes_key,
            self.planes_name,
            self.planes_token_file,
        )


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Print a model's layout as JSON, for a data plane without transformers (--layout FILE)."""

    model: Path = setting(help="Folder of a Hugging Face model.")
    block_size_tokens: int = setting(
        16, unit="tokens", minimum=8, maximum=256, help="Token slots in a block."
    )
    dtype: str = setting("float32", choices=DTYPES, help="Type of queries, keys and values.")
    kv_dtype: str = setting(
        "",
        choices=("", *KV_DTYPES),
        help="Type of stored keys and values; empty means the same as --dtype.",
    )
    probe: bool = setting(
        False,
        help="Load the model and run its probe: its layers may keep other sizes than its config"
        " says.",
    )
    latent: bool = setting(
        True,
        help="Keep the latents of a model that has them; --no-latent for a data plane on a GPU.",
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineConfig):
    """Answer prompts with a model whose KV cache is behind a control plane and a data plane."""

    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The text": (
            *("prompt", "prompts_file", "max_tokens", "temperature", "top_k", "top_p", "seed"),
            *("n", "stop", "ignore_eos", "num_beams", "length_penalty", "early_stopping"),
        ),
        **EngineConfig.HELP_GROUPS,
    }
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
    length_penalty: float = setting(
        1.0, help="Of a beam search: the power of its length by which a text's score is divided."
    )
    early_stopping: bool = setting(
        False, help="End a beam search when as many texts have ended as there are beams."
    )
    ignore_eos: bool = setting(False, help="Continue past the model's end of sequence.")
    log_level: str = setting("warning", choices=LEVELS, help="Least severe log level written.")
    log_format: str = setting("text", help="How a line of the log is written.", choices=FORMATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompt) == (self.prompts_file is not None):
            raise InvalidRequestError("give either --prompt or --prompts-file", field="prompt")
        if self.prompts_file is not None and not self.prompts_file.is_file():
            raise InvalidRequestError(f"{self.prompts_file} is not a file", field="prompts_file")

    def prompts(self) -> list[str]:
        """Return the prompts asked for."""
        if self.prompts_file is None:
            return [self.prompt]
        return [line for line in self.prompts_file.read_text().splitlines() if line]
