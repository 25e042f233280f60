"""Tells an observer which prompts are admitted, and how long their sequences became."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvplane_blocks import prompt_hashes

from control_plane.planning.session import Session
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire import columns
from kvplane.wire.columns import INT64

_Named = tuple[str, Any]
_Run = Callable[[int, _Named, cpb.OperationResult], None]
_ID_BYTES = 8


class TrafficObserver(Protocol):
    """Is called in the middle of steps: must return at once and not raise. Forked sequences are not
    told of; an admission whose plan is aborted is not taken back.
    """

    def admitted(
        self, session_id: int, sequence_id: int, num_prompt_tokens: int, hashes: bytes
    ) -> None:
        """``hashes``: 16 bytes for each full block of the prompt, of all tokens up to its end."""

    def freed(self, session_id: int, sequence_id: int, num_tokens: int) -> None:
        """``num_tokens``: known ones of the sequence, its prompt included."""


def observed(observer: TrafficObserver | None, session: Session, run: _Run) -> _Run:
    """``run`` of a planner, whose operations the observer, if there is one, is told of."""
    if observer is None:
        return run

    def run_observed(index: int, named: _Named, result: cpb.OperationResult) -> None:
        kind, message = named
        live = list(_lengths(session, message.sequence_ids)) if kind == "free" else []
        run(index, named, result)
        if kind == "admit" and result.WhichOneof("done") == "admit":
            begins(observer, session, message)
        for sequence_id, num_tokens in live:
            if not session.native.has_sequence(session.slot, sequence_id):
                observer.freed(session.id, sequence_id, num_tokens)

    return run_observed


def begins(observer: TrafficObserver | None, session: Session, message: cpb.Admit) -> None:
    """A sequence was admitted."""
    if observer is not None:
        hashes = prompt_hashes(session.root, message.token_ids, session.pool.block_size)
        num_tokens = columns.count(columns.INT32, message.token_ids)
        observer.admitted(session.id, message.sequence_id, num_tokens, hashes)


def ends(observer: TrafficObserver | None, session: Session, sequence_id: int) -> None:
    """A live sequence is about to be cut."""
    if observer is not None:
        for _, num_tokens in _lengths(session, columns.pack(INT64, [sequence_id])):
            observer.freed(session.id, sequence_id, num_tokens)


def session_ends(observer: TrafficObserver, session: Session) -> None:
    """All sequences of the session will be freed."""
    ids, _, num_tokens, *_ = session.native.states(session.slot, None)
    for sequence_id, num in zip(
        columns.read(INT64, ids, "ids"), columns.read(INT64, num_tokens, "num_tokens"), strict=True
    ):
        observer.freed(session.id, sequence_id, num)


def _lengths(session: Session, sequence_ids: bytes) -> Iterator[tuple[int, int]]:
    """Those of the ids that are live, and their numbers of known tokens."""
    native, slot = session.native, session.slot
    whole = sequence_ids[: len(sequence_ids) // _ID_BYTES * _ID_BYTES]
    for sequence_id in dict.fromkeys(columns.read(INT64, whole, "sequence_ids")):
        if native.has_sequence(slot, sequence_id):
            states = native.states(slot, columns.pack(INT64, [sequence_id]))
            yield sequence_id, columns.read(INT64, states[2], "num_tokens")[0]
