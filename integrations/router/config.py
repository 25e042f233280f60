"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from kvplane.errors import InvalidRequestError
from kvplane.serving.config import ClientTls, HttpServerSettings, read_text
from kvplane.serving.settings import setting


@dataclass(frozen=True, kw_only=True)
class RouterSettings(HttpServerSettings, ClientTls):
    """Send requests of OpenAI's clients to the engine that has computed their prompts first."""

    HEADING: ClassVar[str] = "Engines"

    bind: str = "127.0.0.1:8080"
    max_requests: int = 1024
    engine: str = setting(
        help="Engines, URL=POOL, with commas between: where each serves OpenAI's paths, and the"
        " pool that it uses, as in http://127.0.0.1:8001=pool-0,http://127.0.0.1:8002=pool-1.",
    )
    tokenizer: Path | None = setting(
        None,
        help="The model's folder: prompts are read by its tokenizer and chat template. Without one"
        " cached prefixes are found for prompts of token ids alone.",
    )
    engine_key_file: Path | None = setting(
        None, help="File of the key for engines; none: the client's key is passed on."
    )
    engine_ca: Path | None = setting(
        None, help="PEM file of the authority that signs engines' certificates; none: the system's."
    )
    engine_timeout_s: float = setting(
        600.0, unit="s", minimum=0.1, help="How long an engine that answers may send nothing."
    )
    check_interval_s: float = setting(
        2.0,
        unit="s",
        minimum=0.05,
        maximum=3600,
        help="How often engines are asked for their models.",
    )
    namespace: str = setting("", help="Namespace of the engines' prefixes.")
    engines_need_pools: bool = setting(
        True,
        help="Whether engines hold their requests while their pool is lost. Engines of others, such"
        " as vLLM, compute without it.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_key_file is not None and len(self.engine_key().split()) != 1:
            raise InvalidRequestError("must have one key", field="engine_key_file")
        self.pools()

    def pools(self) -> dict[str, str]:
        """Return the pool of each engine, by the engine's URL. Raises InvalidRequestError."""
        pools: dict[str, str] = {}
        for entry in self.engine.split(","):
            url, _, pool = entry.strip().rpartition("=")
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not pool:
                raise InvalidRequestError(f"must be URL=POOL, is {entry!r}", field="engine")
            if url.rstrip("/") in pools:
                raise InvalidRequestError(f"has {url} twice", field="engine")
            pools[url.rstrip("/")] = pool
        return pools

    def engine_key(self) -> str:
        """Read the key to show to engines; empty for the client's. Raises InvalidRequestError."""
        if self.engine_key_file is None:
            return ""
        return read_text(self.engine_key_file, "engine_key_file").strip()
