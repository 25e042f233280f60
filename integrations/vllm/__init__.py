"""Keeps vLLM's KV in a kvplane pool: a connector that hears what requests ask, and a tier."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import vllm

RELEASES: Final = ("0.32", "0.33")


def release() -> str:
    """Return vLLM's release without its last number. Raises ImportError naming the releases that
    the plug-in was written for, unless it is one of them.
    """
    found = ".".join(str(vllm.__version__).split(".")[:2])
    if found not in RELEASES:
        raise ImportError(
            f"kvplane's plug-in runs with vLLM {' and '.join(RELEASES)}, and this is"
            f" {vllm.__version__}: its interfaces may have changed"
        )
    return found


def register() -> None:
    """Tell vLLM the names of the connector and of the tier. vLLM calls this in all its processes,
    in which they may not be used: it imports neither, and does not mind the release.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError, ImportError):  # registered before; a release without tiers
        KVConnectorFactory.register_connector(
            "KvplaneConnector", f"{__name__}.connector", "KvplaneConnector"
        )
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier("kvplane", f"{__name__}.tier", "KvplaneTier")
