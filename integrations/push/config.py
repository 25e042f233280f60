"""Settings of the plug-in, from variables: KVPLANE_PUSH_BIND and so on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.serving.config import ANY_HOST, check_address
from kvplane.serving.settings import log_settings, parse, setting

PROGRAM: Final = "push"


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Blocks sent to other data planes, and taken from them."""

    bind: str = setting(
        "",
        help="Address to take blocks from other data planes at, host:port; port 0 picks a free one,"
        " and empty takes none.",
    )
    advertise: str = setting(
        "", help="Address for them to connect to, host:port; empty means the one bound."
    )
    to: str = setting(
        "",
        help="Hosts of other data planes that blocks may be sent to, with commas; * for any, and"
        " empty for none. Over TLS where the data plane serves TLS, trusting --tls-ca.",
    )
    name: str = setting(
        "", help="Name that their certificates must have, where it is not the host."
    )
    max_pushes: int = setting(
        4,
        help="Pushes of blocks of one caller at one time, of each direction; one more is left to"
        " other callers.",
        unit="pushes",
        minimum=1,
        maximum=256,
    )

    def __post_init__(self) -> None:
        if self.bind:
            check_address(self.bind, "bind")
            if self.bind.rpartition(":")[0] in ANY_HOST and not self.advertise:
                raise InvalidRequestError(
                    f"must be given, because {self.bind} binds all addresses", field="advertise"
                )
        if self.advertise:
            check_address(self.advertise, "advertise")

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PushSettings:
        """Those in ``environ``. Exits for what is wrong there."""
        config = parse(cls, PROGRAM, [], environ)
        log_settings(config, logging.getLogger(PROGRAM))
        return config
