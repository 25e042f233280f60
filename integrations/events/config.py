"""Settings of the KV-event bridge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvplane.errors import InvalidRequestError
from kvplane.serving.config import ClientTls, LogSettings, check_address, is_loopback
from kvplane.serving.settings import setting
from kvplane.wire.v1.types_pb2 import TIER_DEVICE, TIER_HOST


@dataclass(frozen=True, kw_only=True)
class EventsSettings(ClientTls, LogSettings):
    """Publish what a pool has cached as vLLM's KV events over ZMQ."""

    HEADING: ClassVar[str] = "Events"

    pool: str = setting(help="The pool to follow.")
    namespace: str = setting("", help="Namespace of the prefixes to follow.")
    bind: str = setting("tcp://127.0.0.1:5557", help="Endpoint of the events, tcp://HOST:PORT.")
    replay: str = setting("", help="Endpoint that sends events again, tcp://HOST:PORT, or none.")
    format: str = setting(
        "map",
        choices=("map", "array"),
        help="Whether an event is a map, as since vLLM's release of June 2026, or an array.",
    )
    topic: str = setting("", help="Topic of all events; llm-d wants kv@POD@MODEL.")
    device_medium: str = setting("GPU", help="Medium that events give for the device tier.")
    host_medium: str = setting("CPU", help="Medium that events give for the host tier.")
    insecure: bool = setting(
        False, help="Show prompts' tokens on an address that other machines can reach."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, endpoint in {"bind": self.bind, "replay": self.replay or self.bind}.items():
            address = endpoint.removeprefix("tcp://")
            if address == endpoint:
                raise InvalidRequestError("must be tcp://HOST:PORT", field=field)
            check_address(address, field)
            if not (self.insecure or is_loopback(address)):
                raise InvalidRequestError(
                    f"{address} can be reached from other machines: give --insecure", field=field
                )

    @property
    def media(self) -> dict[int, str]:
        """The medium of each ``types_pb2.Tier``."""
        return {int(TIER_DEVICE): self.device_medium, int(TIER_HOST): self.host_medium}
