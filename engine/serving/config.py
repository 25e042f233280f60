"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from kvplane.serving.config import check_address
from kvplane.serving.logs import LEVELS
from kvplane.serving.settings import setting


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Serve a model over HTTP, as OpenAI's clients expect it."""

    bind: str = setting(
        "127.0.0.1:8000", help="Address to serve HTTP on, host:port; port 0 picks a free one."
    )
    model_name: str = setting("", help="What clients call the model; empty: its folder's name.")
    port_file: Path | None = setting(None, help="File to write the port to, once it serves.")
    max_requests: int = setting(
        256, unit="requests", minimum=1, help="Most requests open at one time."
    )
    max_body_bytes: int = setting(
        4 << 20, unit="bytes", minimum=1024, maximum=1 << 30, help="Largest request accepted."
    )
    log_level: str = setting("info", choices=LEVELS, help="Least severe log level written.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.bind, "bind")

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.model_name or self.model.resolve().name
