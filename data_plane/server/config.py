"""Settings of the data plane."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import MAX_PAGE_BYTES
from kvplane.serving.config import (
    ANY_HOST,
    LayoutSettings,
    PlanesSettings,
    PoolSettings,
    ServerSettings,
    ThreadSettings,
    memory_of,
)
from kvplane.serving.settings import Settings, setting
from kvplane.transport.tls import Tls

PROGRAM: Final = "data_plane"


@dataclass(frozen=True, kw_only=True)
class ShardSettings(Settings):
    """Settings that say which shard of a pool this data plane is."""

    HEADING: ClassVar[str] = "The shard"

    num_shards: int = setting(
        1,
        help="Data planes that the pool is divided among, copies counted.",
        unit="shards",
        minimum=1,
        maximum=1024,
    )
    shard_index: int = setting(0, help="Which of them this is, from 0.", minimum=0)
    layers: str = setting(
        "",
        help="The model's layers that it holds, FIRST:COUNT, as in 0:16, or FIRST: with all that"
        " follow; empty for all.",
    )
    kv_heads: str = setting(
        "",
        help="The KV heads that it holds, in the same way, in the layer group that has most; empty"
        " for all. Without any range shards divide the KV heads evenly, or hold copies of one"
        " where they are more.",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_index >= self.num_shards:
            raise InvalidRequestError("must be below --num-shards", field="shard_index")
        _ = self.layer_range, self.kv_head_range

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """The first layer and the number of layers, 0 for all that follow; None for all layers."""
        return _range(self.layers, "layers")

    @property
    def kv_head_range(self) -> tuple[int, int] | None:
        """The first KV head and the number of heads, 0 for all that follow; None for all heads."""
        return _range(self.kv_heads, "kv_heads")


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """Settings of the shared memory between engines on this machine and a data plane."""

    HEADING: ClassVar[str] = "Engines on this machine"

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
    local_folder: Path | None = setting(
        None,
        help="Folder in which a folder for the Unix socket is made, which engines must find under"
        " the same path; none means that of temporary files.",
    )


@dataclass(frozen=True, kw_only=True)
class DataPlaneSettings(
    PoolSettings,
    LayoutSettings,
    ShardSettings,
    LocalSettings,
    ThreadSettings,
    ServerSettings,
    PlanesSettings,
):
    """Serve memory: the blocks of one pool, and the kernels that write, read and copy them."""

    HEADING: ClassVar[str] = "The data plane"

    bind: str = "127.0.0.1:50052"
    metrics_port: int = 9102
    model: Path | None = setting(
        None,
        help="Folder of the Hugging Face model whose KV the pool holds. Needs the extra"
        " transformers, which --layout does not.",
    )
    layout: Path | None = setting(
        None,
        help="JSON file of the pool's layout, in place of --model, as kvplane layout prints it.",
    )
    opaque_page_bytes: int = setting(
        0,
        help="Most bytes of a block that only callers understand, such as a cache plug-in of an"
        " engine, in place of --model and --layout. A multiple of 64; needs --model-id.",
        unit="bytes",
        minimum=0,
        maximum=MAX_PAGE_BYTES,
    )
    model_id: str = setting(
        "",
        help="What wrote the opaque blocks: the model, its weights, types and whatever else makes"
        " their bytes mean the same.",
    )
    device: str = setting(
        "auto",
        help='Device of the device tier and the kernels: "cpu", "cuda", "cuda:N", or "auto": the'
        " first GPU that the kernels can run on, otherwise the CPU.",
    )
    memory: str = setting(
        "50%",
        help="Memory of the device tier if --num-device-blocks is 0: bytes, as in 8GiB, or a share"
        " of the free memory, of which the host tier takes its part too.",
    )
    plug_ins: str = setting(
        "",
        help="Services to host beside the data plane's own, with commas, such as push; each has"
        " variables of its own.",
    )
    file_tier_dir: Path | None = setting(
        None,
        help="Folder of files in which blocks of prefixes are kept, also for later processes;"
        " several data planes may share it. None for no files. For pools of one layer group, and"
        " perhaps one of states, without an attention window.",
    )
    file_tier_after: int = setting(
        2,
        help="Uses of a prefix after which it is kept in files: 2, or 1 for as soon as it is"
        " computed.",
        unit="uses",
        minimum=1,
        maximum=2,
    )
    file_tier_bytes: int = setting(
        0,
        help="Bytes of the files of this process in --file-tier-dir: the least recently used are"
        " removed first.",
        unit="bytes",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.advertise and self.bind.rpartition(":")[0] in ANY_HOST:
            raise InvalidRequestError(
                f"must be given, because {self.bind} binds all addresses", field="advertise"
            )
        if (self.model is not None) + (self.layout is not None) + bool(self.opaque_page_bytes) > 1:
            raise InvalidRequestError(
                "give one of --model, --layout and --opaque-page-bytes", field="model"
            )
        memory_of(self.memory)
        if bool(self.model_id) != bool(self.opaque_page_bytes):
            raise InvalidRequestError("goes with --opaque-page-bytes", field="model_id")
        if self.file_tier_bytes and self.file_tier_dir is None:
            raise InvalidRequestError("must be given too", field="file_tier_dir")

    @property
    def peer_tls(self) -> Tls | None:
        """How to connect to other data planes, with the identity that this one has at the control
        plane; None for plain text.
        """
        if self.server_tls is None:
            return None
        return self.tls_with(self.tls_cert, self.tls_key, "")

    @property
    def control_tls(self) -> Tls | None:
        """How to connect to the control plane; None for plain text. The server's own certificate,
        if there is one, identifies this process to the control plane.
        """
        if not self.tls:
            return None
        return self.tls_with(self.tls_cert, self.tls_key, self.tls_name)


def _range(text: str, field: str) -> tuple[int, int] | None:
    """Parse "FIRST:COUNT" or "FIRST:", a count of 0; None for "". Raises InvalidRequestError."""
    if not text:
        return None
    if not (found := re.fullmatch(r"([0-9]{1,6}):([1-9][0-9]{0,5})?", text)):
        raise InvalidRequestError("must be FIRST:COUNT or FIRST:, as in 0:16", field=field)
    return int(found[1]), int(found[2] or 0)
