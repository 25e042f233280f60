"""Settings of the data plane."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import BLOCK_SIZES, ELEMENT_BYTES, FLOAT_BYTES
from kvplane.protocol import MAX_MESSAGE_BYTES
from kvplane.serving.logs import LEVELS
from kvplane.serving.server import ServerTls
from kvplane.serving.settings import setting
from kvplane.tls import TlsOptions

PROGRAM: Final = "data_plane"
_ANY_HOST: Final = ("", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class DataPlaneConfig:
    """Serve bytes: one pool's blocks, and the kernels that write, read and copy them."""

    control_plane: str = setting(
        "127.0.0.1:50051", help="Address of the control plane to register with, host:port."
    )
    bind: str = setting(
        "127.0.0.1:50052", help="Address to serve gRPC on, host:port; port 0 picks a free one."
    )
    advertise: str = setting(
        "", help="Address that clients are told, host:port; empty means the one bound."
    )
    pool_id: str = setting("default", help="The pool that this process is a shard of.")
    model: Path | None = setting(
        None, help="Folder of the Hugging Face model whose KV the pool holds."
    )
    layout: Path | None = setting(
        None, help="JSON file of the pool's layout, in place of --model; see kvplane/layout.py."
    )
    block_size_tokens: int = setting(
        16, help=f"Token slots in a block: one of {BLOCK_SIZES}. For --model.", unit="tokens"
    )
    dtype: str = setting(
        "float32", help="Type of queries, keys and values. For --model.", choices=tuple(FLOAT_BYTES)
    )
    kv_dtype: str = setting(
        "",
        help="Type of keys and values as stored; empty means as --dtype. For --model, whose"
        " checkpoint may have scales for one of 8 bits.",
        choices=("", *ELEMENT_BYTES),
    )
    num_device_blocks: int = setting(
        0,
        help="Blocks of the device tier; 0 measures the free memory.",
        unit="blocks",
        minimum=0,
    )
    num_host_blocks: int = setting(
        0,
        help="Blocks of the host tier, which sequences are swapped out to; 0 for none.",
        unit="blocks",
        minimum=0,
    )
    device: str = setting(
        "auto",
        help='Where the device tier is and computes: "cpu", "cuda", "cuda:N", or "auto": the first'
        " GPU that the kernels can run on, else the CPU.",
    )
    memory_utilization: float = setting(
        0.5,
        help="Share of the free memory that a measured pool takes.",
        unit="fraction",
        minimum=0.01,
        maximum=1.0,
    )
    reserve_bytes: int = setting(
        0,
        help="Memory that a measured pool leaves beyond that, for the model.",
        unit="bytes",
        minimum=0,
    )
    num_threads: int = setting(
        0, help="Threads of a CPU kernel; 0 for as many as torch uses.", unit="threads", minimum=0
    )
    metrics_port: int = setting(
        9102,
        help="Port of /metrics, on the same host; 0 picks a free one, -1 is off.",
        minimum=-1,
        maximum=65_535,
    )
    port_file: Path | None = setting(None, help="File to write the gRPC port to, once it serves.")
    grace_s: float = setting(
        5.0,
        help="Time that calls in flight have to end when the program is told to stop.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        help="Largest message taken or sent.",
        unit="bytes",
        minimum=4096,
        maximum=2**31 - 1,
    )
    tls_certificate: Path | None = setting(None, help="PEM file of the server's certificate.")
    tls_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    tls_client_ca: Path | None = setting(
        None, help="PEM file of the authority that signs clients' certificates; they must show one."
    )
    control_plane_tls: bool = setting(False, help="Reach the control plane over TLS.")
    control_plane_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs the control plane's certificate; none means"
        " those that gRPC ships.",
    )
    log_level: str = setting("info", help="Least severe log level written.", choices=LEVELS)

    def __post_init__(self) -> None:
        for name in ("bind", "control_plane"):
            _check_address(getattr(self, name), name)
        if self.advertise:
            _check_address(self.advertise, "advertise")
        elif self.bind.rpartition(":")[0] in _ANY_HOST:
            raise InvalidRequestError("is needed when all addresses are bound", field="advertise")
        if (self.model is None) == (self.layout is None):
            raise InvalidRequestError("give either --model or --layout", field="model")
        if not 1 <= len(self.pool_id) <= 128:
            raise InvalidRequestError("must be 1 to 128 characters", field="pool_id")
        if self.block_size_tokens not in BLOCK_SIZES:
            raise InvalidRequestError(f"must be one of {BLOCK_SIZES}", field="block_size_tokens")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("needs --tls-key beside it", field="tls_certificate")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidRequestError("needs --tls-certificate beside it", field="tls_client_ca")

    @property
    def tls(self) -> ServerTls | None:
        """How to serve TLS; None means in the clear."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)

    @property
    def control_tls(self) -> TlsOptions | None:
        """How to reach the control plane; None means in the clear. The own certificate, if there
        is one, shows who registers.
        """
        if not self.control_plane_tls:
            return None
        return TlsOptions(
            ca_file=self.control_plane_ca, cert_file=self.tls_certificate, key_file=self.tls_key
        )


def _check_address(address: str, field: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal() and int(port) <= 65_535):
        raise InvalidRequestError("must be host:port", field=field)
    if not host and field != "bind":
        raise InvalidRequestError("must name a host", field=field)
