"""Routes calls of a Ray Serve deployment to the replica that will first have computed the prompt.

Needs ``pip install 'ray[serve]' 'kvplane[ray,router]'``. Every process with a handle of the
deployment follows its replicas' pools by its own connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvplane.clients.control_client import ControlClient
from kvplane.transport.tls import Tls

from ..router.feeds import PoolFeeds
from ..router.picker import Picker
from ..router.prompts import PromptReader, Prompts
from .replica_picker import POOL, ReplicaPicker, body_of


class KvplaneRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray's, which has no types
    """For ``RequestRouterConfig(request_router_class=..., request_router_kwargs=...)``.

    Replicas report their pools by ``record_replica_metadata``: ``{"kvplane_pool": "pool-0"}``.
    """

    def initialize_state(
        self,
        control_plane: str = "127.0.0.1:50051",
        namespace: str = "",
        tokenizer: str = "",
        tls: dict[str, str] | None = None,
    ) -> None:
        """Take the settings of ``python -m kvplane.integrations.router``. ``tls``: the fields of
        Tls; None for plain text.

        Raises InvalidRequestError when there is no tokenizer in the folder.
        """
        self._control_plane = control_plane
        self._namespace = namespace
        self._tls = _tls(tls) if tls is not None else None
        self._reader = PromptReader(Path(tokenizer) if tokenizer else None)
        self._prompts: dict[str, Prompts] = {}
        self._feeds: PoolFeeds | None = None
        # The rates stay as they are: Serve does not report when an answer begins.
        self.replica_picker = ReplicaPicker(Picker({}))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best one, then the others; Serve takes the first that is not full."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        self._look_at_replicas()
        request_id = pending_request.metadata.internal_request_id
        if request_id not in self._prompts:
            arguments = (*pending_request.args, pending_request.kwargs)
            arguments += (*pending_request.kwargs.values(),)
            self._prompts[request_id] = await self._reader.read(body_of(arguments))
            # Serve reports in no other way where a request went that replicas may not refuse.
            pending_request.future.add_done_callback(partial(self._sent, request_id))
        best = self.replica_picker.choose(
            request_id,
            self._prompts[request_id],
            {each.replica_id.unique_id for each in candidate_replicas},
            time.monotonic(),
        )
        first = [each for each in candidate_replicas if each.replica_id.unique_id == best]
        others = [each for each in candidate_replicas if each.replica_id.unique_id != best]
        return [each for each in (first, others) if each]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note the end of a request. Called in any thread."""
        self._event_loop.call_soon_threadsafe(
            self.replica_picker.ended, internal_request_id, replica_id.unique_id
        )

    def _look_at_replicas(self) -> None:
        pools = {
            each.replica_id.unique_id: str(each.replica_metadata.get(POOL, ""))
            for each in self.curr_replicas.values()
        }
        picker = self.replica_picker.picker
        if self._feeds is None:  # not before there is an event loop
            control = ControlClient(self._control_plane, tls=self._tls)
            self._feeds = PoolFeeds(control, self._namespace, picker.indexes, picker.lost)
        if pools != picker.pool_of:
            picker.choose_among(pools)
            self._feeds.follow(filter(None, pools.values()))

    def _sent(self, request_id: str, future: asyncio.Future[RunningReplica]) -> None:
        self._prompts.pop(request_id, None)
        if future.cancelled() or future.exception() is not None:
            self.replica_picker.given_up(request_id)
            return
        self.replica_picker.sent(request_id, future.result().replica_id.unique_id, time.monotonic())


def _tls(fields: Mapping[str, str]) -> Tls:
    server_name = fields.get("server_name", "")
    files = {name: Path(value) for name, value in fields.items() if name != "server_name"}
    return Tls(server_name=server_name, **files)
