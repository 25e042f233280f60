"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvplane.serving.config import HttpServerSettings
from kvplane.serving.settings import setting

from ..config import EngineSettings


@dataclass(frozen=True, kw_only=True)
class ServeSettings(HttpServerSettings, EngineSettings):
    """Serve a model over HTTP, as OpenAI's clients expect it."""

    HEADING: ClassVar[str] = "The server"

    bind: str = "127.0.0.1:8000"
    model_name: str = setting("", help="The model's name for clients; empty: its folder's name.")

    @property
    def served_name(self) -> str:
        """Name under which clients know the model."""
        return self.model_name or self.model.resolve().name
