"""Settings of the data plane."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import BLOCK_SIZES, ELEMENT_BYTES, FLOAT_BYTES
from kvplane.serving.config import (
    ANY_HOST,
    ServingConfig,
    bind_setting,
    check_address,
    max_message_setting,
    metrics_port_setting,
)
from kvplane.serving.settings import setting
from kvplane.transport.tls import Tls
from kvplane.wire.protocol import MAX_MESSAGE_BYTES

PROGRAM: Final = "data_plane"


@dataclass(frozen=True, kw_only=True)
class DataPlaneConfig(ServingConfig):
    """Serve memory: the blocks of one pool, and the kernels that write, read and copy them."""

    control_plane: str = setting(
        "127.0.0.1:50051",
        help="Address of the control plane to register with, host:port; with commas those of all"
        " that may lead, or dns:///host:port.",
    )
    bind: str = bind_setting("127.0.0.1:50052")
    metrics_port: int = metrics_port_setting(9102)
    max_message_bytes: int = max_message_setting(MAX_MESSAGE_BYTES)
    advertise: str = setting(
        "", help="Address for clients to connect to, host:port; empty means the one bound."
    )
    pool_id: str = setting("default", help="The pool that this process is a shard of.")
    num_shards: int = setting(
        1,
        help="Data planes that the pool is divided among, copies counted.",
        unit="shards",
        minimum=1,
        maximum=1024,
    )
    shard_index: int = setting(0, help="Which of them this is, from 0.", minimum=0)
    first_layer: int = setting(
        0, help="The first of the model's layers that this shard holds.", minimum=0
    )
    num_layers: int = setting(
        0, help="Layers that it holds from there; 0 for all.", unit="layers", minimum=0
    )
    first_kv_head: int = setting(
        0,
        help="The first KV head that it holds, in the layer group that has most. Without any range"
        " shards divide the KV heads evenly, or hold copies of one where they are more.",
        minimum=0,
    )
    num_kv_heads: int = setting(
        0, help="KV heads that it holds from there; 0 for all.", unit="heads", minimum=0
    )
    shard_copy: int = setting(
        0, help="Which of the shards that hold the same range this is, from 0.", minimum=0
    )
    epoch: int = setting(
        0,
        help="Number of this run, higher than that of the process that it replaces; 0 takes the"
        " clock's nanoseconds. For a machine whose clock is behind.",
        minimum=0,
    )
    model: Path | None = setting(
        None,
        help="Folder of the Hugging Face model whose KV the pool holds. Needs transformers, which"
        " --layout does not.",
    )
    layout: Path | None = setting(
        None,
        help="JSON file of the pool's layout, in place of --model, as python -m engine layout"
        " prints it.",
    )
    block_size_tokens: int = setting(
        16, help=f"Token slots in a block: one of {BLOCK_SIZES}. For --model.", unit="tokens"
    )
    dtype: str = setting(
        "float32", help="Type of queries, keys and values. For --model.", choices=tuple(FLOAT_BYTES)
    )
    kv_dtype: str = setting(
        "",
        help="Type of stored keys and values; empty means the same as --dtype. For --model, whose"
        " checkpoint may have scales for an 8-bit type.",
        choices=("", *ELEMENT_BYTES),
    )
    latent: bool = setting(
        True,
        help="Keep the latents of a model with multi-head latent attention (MLA), where the kernels"
        " serve them; --no-latent keeps its keys and values, which take more memory. For --model.",
    )
    num_device_blocks: int = setting(
        0,
        help="Blocks of the device tier of each layer group without an attention window, of which"
        " the others get shares; 0 for as many as the free memory allows.",
        unit="blocks",
        minimum=0,
    )
    num_host_blocks: int = setting(
        0,
        help="Blocks of the host tier, to which sequences are swapped out, in the same way; 0 for"
        " none.",
        unit="blocks",
        minimum=0,
    )
    expected_context_tokens: int = setting(
        8192,
        help="Length of a typical sequence, prompt and output: it determines the share of blocks"
        " that a layer group with an attention window gets beside one without.",
        unit="tokens",
        minimum=1,
    )
    device: str = setting(
        "auto",
        help='Device of the device tier and the kernels: "cpu", "cuda", "cuda:N", or "auto": the'
        " first GPU that the kernels can run on, otherwise the CPU.",
    )
    memory_utilization: float = setting(
        0.5,
        help="Share of the free memory that the pool may take if --num-device-blocks is 0.",
        unit="fraction",
        minimum=0.01,
        maximum=1.0,
    )
    reserve_bytes: int = setting(
        0,
        help="Memory taken off that share, for the model.",
        unit="bytes",
        minimum=0,
    )
    num_threads: int = setting(
        0, help="Threads of a CPU kernel; 0 for as many as torch uses.", unit="threads", minimum=0
    )
    num_local_regions: int = setting(
        16,
        help="Memory regions that engines on this machine may share with this process at the same"
        " time, one for each execution; 0 means that all tensors travel over gRPC.",
        unit="regions",
        minimum=0,
        maximum=1024,
    )
    local_region_bytes: int = setting(
        64 * 1024 * 1024,
        help="Size of such a region. A layer whose tensors do not fit travels over gRPC. Main"
        " memory is taken where tensors have been, a GPU's at once.",
        unit="bytes",
        minimum=4096,
        maximum=2**40,
    )
    num_local_device_regions: int = setting(
        4,
        help="Regions of the same size on this process's GPU, for engines whose tensors are on it;"
        " the measured number of blocks leaves room for them. 0 means that such tensors are copied"
        " through main memory.",
        unit="regions",
        minimum=0,
        maximum=1024,
    )
    local_folder: Path | None = setting(
        None,
        help="Folder in which a folder for the Unix socket is made, which engines must find under"
        " the same path; none means that of temporary files.",
    )
    local_spin_s: float = setting(
        0.00005,
        help="How long after a message of such an engine to look for its next one instead of"
        " sleeping. It takes a core for as long, and spares the time that waking up takes.",
        unit="s",
        minimum=0,
        maximum=1,
    )
    plug_ins: str = setting(
        "",
        help="Services to host beside the data plane's own, with commas, such as push; each has"
        " variables of its own.",
    )
    file_tier_dir: Path | None = setting(
        None,
        help="Folder of files in which blocks of prefixes that were used twice are kept, also for"
        " later processes; several data planes may share it. None for no files. For pools of one"
        " layer group without an attention window.",
    )
    file_tier_bytes: int = setting(
        0,
        help="Bytes of the files of this process in --file-tier-dir: the least recently used are"
        " removed first.",
        unit="bytes",
        minimum=0,
    )
    control_plane_tls: bool = setting(False, help="Reach the control plane over TLS.")
    control_plane_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs the control plane's certificate; none means"
        " the authorities that gRPC ships with.",
    )
    control_plane_name: str = setting(
        "",
        help="Name that the control plane's certificate must have, where it is not the host of"
        " --control-plane.",
    )
    control_plane_token_file: Path | None = setting(
        None, help="File with the bearer token that names this process to the control plane."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.control_plane.split(","):
            check_address(address.removeprefix("dns:///"), "control_plane")
        if self.advertise:
            check_address(self.advertise, "advertise")
        elif self.bind.rpartition(":")[0] in ANY_HOST:
            raise InvalidRequestError(
                f"must be given, because {self.bind} binds all addresses", field="advertise"
            )
        if (self.model is None) == (self.layout is None):
            raise InvalidRequestError("give either --model or --layout", field="model")
        if not 1 <= len(self.pool_id) <= 128:
            raise InvalidRequestError("must be 1 to 128 characters", field="pool_id")
        if self.shard_index >= self.num_shards:
            raise InvalidRequestError("must be below --num-shards", field="shard_index")
        if self.file_tier_bytes and self.file_tier_dir is None:
            raise InvalidRequestError("must be given too", field="file_tier_dir")
        if self.block_size_tokens not in BLOCK_SIZES:
            raise InvalidRequestError(f"must be one of {BLOCK_SIZES}", field="block_size_tokens")

    @property
    def peer_tls(self) -> Tls | None:
        """How to reach other data planes, with the identity that this one has at the control plane;
        None for plain text.
        """
        if self.tls is None:
            return None
        return Tls(
            ca_file=self.control_plane_ca,
            cert_file=self.tls_certificate,
            key_file=self.tls_key,
            token_file=self.control_plane_token_file,
        )

    @property
    def control_tls(self) -> Tls | None:
        """How to reach the control plane; None for plain text. The server's own certificate, if
        there is one, identifies this process to the control plane.
        """
        if not self.control_plane_tls:
            return None
        return Tls(
            ca_file=self.control_plane_ca,
            cert_file=self.tls_certificate,
            key_file=self.tls_key,
            server_name=self.control_plane_name,
            token_file=self.control_plane_token_file,
        )
