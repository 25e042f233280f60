"""Collects the news of a pool's sessions: events outside of their steps, for their next answers."""

from __future__ import annotations

from typing import Final

from control_plane.sessions.session import Session
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.v1 import session_pb2 as cpb

# Sequences that were cut and are remembered to be so.
_MAX_REVOKED: Final = 4096
_GRANTS: Final = ("granted_sequence_ids", "granted_num_cached_tokens", "granted_num_blocks")


class PoolNews:
    """Collects the news of a pool's sessions; each session keeps its own for its next answer."""

    def __init__(self) -> None:
        self._unsent: set[Session] = set()

    def take_unsent(self) -> list[tuple[int, cpb.News]]:
        """Return the news that neither this method nor an answer has taken, with their sessions'
        ids. The sessions keep them.
        """
        unsent = [(session.id, session.news) for session in self._unsent]
        self._unsent.clear()
        return [(i, news) for i, news in unsent if news is not None]

    def take(self, session: Session) -> cpb.News | None:
        """Return a session's news for its next answer, and clear them."""
        news, session.news = session.news, None
        self._unsent.discard(session)
        return news

    def granted(
        self, session: Session, message: cpb.Admit, num_cached: int, num_blocks: int
    ) -> None:
        """Add to a session's news that its queued admission was granted."""
        news = self._of(session)
        news.granted_sequence_ids += columns.pack(INT64, [message.sequence_id])
        news.granted_num_cached_tokens += columns.pack(INT32, [num_cached])
        news.granted_num_blocks += columns.pack(INT32, [num_blocks])

    def drop_grants(self, session: Session) -> None:
        """Remove grants from a session's news, which after an abort are no longer true."""
        if session.news is not None:
            for field in _GRANTS:
                session.news.ClearField(field)
            if not session.news.ListFields():
                self.take(session)

    def cut(self, session: Session, sequence_id: int, reason: cpb.CutReason) -> None:
        """Add to a session's news that a sequence was cut, and remember that it was."""
        news = self._of(session)
        news.cut_sequence_ids += columns.pack(INT64, [sequence_id])
        news.cut_reasons += columns.pack(UINT8, [reason])
        session.revoked[sequence_id] = None
        session.revoked.move_to_end(sequence_id)
        while len(session.revoked) > _MAX_REVOKED:
            session.revoked.popitem(last=False)

    def asked(
        self, session: Session, sequence_ids: bytes, num_blocks: int, time_left_s: float
    ) -> None:
        """Add to a session's news a request to release these sequences' blocks. ``num_blocks``: how
        many it should release. ``time_left_s``: until a sequence is cut.
        """
        news = self._of(session)
        news.num_blocks_asked += num_blocks
        news.asked_sequence_ids += sequence_ids
        if not news.HasField("asked_within"):
            news.asked_within.FromNanoseconds(int(time_left_s * 1e9))

    def _of(self, session: Session) -> cpb.News:
        if session.news is None:
            session.news = cpb.News()
        self._unsent.add(session)
        return session.news
