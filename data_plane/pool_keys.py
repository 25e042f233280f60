"""The keys of the pool that this process holds: one, or two while the pool's key changes."""

from __future__ import annotations

from data_plane.commands import Commands
from data_plane.plans.sessions import Sessions
from data_plane.plans.verifier import Verifier
from kvplane.v1 import control_pb2
from kvplane.wire import signing


class HeldKeys:
    """Commands of an executor."""

    def __init__(
        self,
        verifier: Verifier,
        sessions: Sessions,
        command: Commands,
    ) -> None:
        """``command``: within which one runs, by its name."""
        self._verifier = verifier
        self._sessions = sessions
        self._command = command

    @property
    def id(self) -> bytes:
        """Identifies the pool's key, the older one of two; empty before there is one."""
        return self._verifier.key_id

    @property
    def newer_id(self) -> bytes:
        """Identifies the newer one of two keys; empty while there are less."""
        return self._verifier.newer_key_id

    def add(self, key: bytes) -> None:
        """Accept what another key signs too, and sign receipts with it. Safe to repeat. Raises
        InvalidRequestError for one of the wrong length, or a third.
        """
        with self._command.lock, self._command("add_key"):
            self._verifier.add_key(key)
            self._sessions.key_changes(b"", signing.key_id(key))

    def retire(self, retirement: control_pb2.KeyRetirement) -> None:
        """Drop the keys before the one that is named. Of what they signed, the grants and plans
        listed are accepted from now on, and plans remembered here. Safe to repeat. Raises
        InvalidRequestError for a key that is not held.
        """
        with self._command.lock, self._command("retire_keys"):
            former = self._verifier.key_id
            self._verifier.retire_keys(retirement, self._sessions.remembered_plans())
            if former != self._verifier.key_id:
                self._sessions.key_changes(former, self._verifier.key_id)
