"""vLLM's own offloading connector, which also tells the tier what is asked.

A tier alone sees hashes. Here are the tokens behind them, so that prefixes are found by these.
"""

from __future__ import annotations

from typing import Any

from . import release
from .identity import REQUEST, WEIGHTS, Heard, told, weights_of

release()

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector,
)


class KvplaneConnector(OffloadingConnector):
    """Copies as ``OffloadingConnector`` does, and tells ``KvplaneTier`` of model and requests."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with told(WEIGHTS, weights_of(vllm_config)):
            super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        with told(REQUEST, Heard.of(request)):
            super().on_new_request(request)
