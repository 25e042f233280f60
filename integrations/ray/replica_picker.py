"""Picks the replica of a Ray Serve deployment for a request. Knows nothing of Ray.

Replicas are the picker's engines, and may come and go. Requests are known by the ids that Serve
gives them: one that a replica refuses is sent to another under the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ..router.engine_load import EngineLoad
from ..router.picker import Pick, Picker
from ..router.prompts import Prompts

# Key of the pool's id in the result of a replica's method record_replica_metadata.
POOL: Final = "kvplane_pool"
_PROMPT_FIELDS: Final = ("prompt", "messages")


class ReplicaPicker:
    """Chooses replicas, and keeps the picker's account of requests sent to them."""

    def __init__(self, picker: Picker) -> None:
        self.picker = picker
        self._chosen: dict[str, Pick] = {}
        self._sent: dict[tuple[str, str], tuple[EngineLoad, int]] = {}

    def choose(
        self, request_id: str, prompts: Prompts, among: Collection[str], now_s: float
    ) -> str | None:
        """Return the best replica for a request, of those ``among``; None when the picker knows
        none of them. May be called again for a request: the last choice counts.
        """
        pick = self.picker.pick(
            prompts.token_ids, now_s, num_unread_tokens=prompts.num_unread_tokens, among=among
        )
        if pick is None:
            return None
        self._chosen[request_id] = pick
        return pick.engine

    def sent(self, request_id: str, replica: str, now_s: float) -> None:
        """Note the replica that Serve sent it to: the chosen one, or another if that was full."""
        pick = self._chosen.pop(request_id, None)
        if pick is None or replica not in self.picker.loads:
            return
        if replica != pick.engine:  # that replica's cached tokens were not looked up
            num_tokens = pick.num_cached_tokens + pick.num_uncached_tokens
            pick = Pick(replica, 0, num_tokens, pick.cost_s)
        number = self.picker.sent(pick, now_s, is_told=False)
        self._sent[request_id, replica] = self.picker.loads[replica], number

    def given_up(self, request_id: str) -> None:
        """Note that the request will not be sent."""
        self._chosen.pop(request_id, None)

    def ended(self, request_id: str, replica: str) -> None:
        """Note that a replica has answered the request, failed, or refused it."""
        if (booked := self._sent.pop((request_id, replica), None)) is not None:
            load, number = booked
            load.ended(number)


def body_of(arguments: Iterable[Any]) -> Mapping[str, Any]:
    """Return the first of a call's arguments that is a request of OpenAI's API: a mapping with a
    prompt or messages, or an object that has them as attributes. Empty when there is none.
    """
    for argument in arguments:
        for field in _PROMPT_FIELDS:
            if isinstance(argument, Mapping):
                if argument.get(field) is not None:
                    return {field: argument[field]}
            elif (value := getattr(argument, field, None)) is not None:
                return {field: _plain(value)}
    return {}


def _plain(value: Any) -> Any:
    """Return messages as plain objects: they may be objects of pydantic."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.model_dump() if hasattr(value, "model_dump") else value
