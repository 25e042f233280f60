"""Prints what the plug-in builds on in the vLLM that is installed, or in the stand-ins for it:
names of parameters, "=" after those that have a default, and members of enumerations.
"""

from __future__ import annotations

import inspect
from enum import Enum
from importlib import import_module
from typing import Any

BASE, TIERING = "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.tiering"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
TIER_METHODS = (
    *("__init__", "lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs"),
    *("on_new_request", "on_request_finished", "on_schedule_end", "take_events", "shutdown"),
    *("has_pending_work", "config_info_keys", "config_info"),
)
NAMES = {
    f"{CONNECTORS}.factory": ["KVConnectorFactory.register_connector"],
    f"{CONNECTORS}.v1.offloading_connector": [
        "OffloadingConnector.__init__",
        "OffloadingConnector.on_new_request",
    ],
    BASE: [
        *("LookupResult", "Medium", "OffloadPolicy", "OffloadingEvent"),
        *("RequestOffloadingContext", "ReqContext.get_offload_key_position", "ScheduleEndContext"),
    ],
    f"{TIERING}.base": [
        *("TransferJob", "JobResult"),
        *(f"SecondaryTierManager.{method}" for method in TIER_METHODS),
    ],
    f"{TIERING}.factory": ["SecondaryTierFactory.register_tier"],
}


def signatures() -> list[str]:
    """A line for each name that there is."""
    lines = []
    for module, names in NAMES.items():
        for name in names:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is not None:
                lines.append(f"{name} {shown(found)}")
    return lines


def shown(found: Any) -> str:
    if isinstance(found, type) and issubclass(found, Enum):
        return " ".join(found.__members__)
    parameters = inspect.signature(found).parameters.values()
    return ", ".join(f"{each.name}{'=' * (each.default is not each.empty)}" for each in parameters)


if __name__ == "__main__":
    print("\n".join(signatures()))
