"""One session among those that share a pool: its families, its position in the queue, its news."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from control_plane.sessions.families import Families, Family
from control_plane.sessions.session import Session
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.v1 import session_pb2 as cpb

# Sequences that were cut and are remembered to be so.
_MAX_REVOKED: Final = 4096
_GRANTS: Final = ("granted_sequence_ids", "granted_num_cached_tokens", "granted_num_blocks")


@dataclass(slots=True)
class QueuedAdmission:
    """A session's entry in the queue: an admission of step ``number``, or without a message a
    swap-in. ``since_s``: when it was queued. ``lapses_s``: when a swap-in at the head of the queue
    loses its place.
    """

    key: int
    message: cpb.Admit | None
    number: int
    since_s: float
    lapses_s: float | None = None

    def names(self, sequence_id: int) -> bool:
        """Return whether the id is one of those that the admission is to start."""
        message = self.message
        return message is not None and (
            sequence_id == message.sequence_id
            or sequence_id in columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")
        )

    def is_of(self, sequence_id: int) -> bool:
        """Return whether it is the admission of this sequence."""
        return self.message is not None and self.message.sequence_id == sequence_id


class Member:
    """A session among those that share its pool.

    ``news``: for its next answer, None when nothing happened. ``is_drafted``: whether its
    next plan carries what happened outside of its steps. ``wanted``: for each family whose growth
    is blocked, the sequence that asked.
    """

    __slots__ = (
        "_with_news",
        "families",
        "is_drafted",
        "news",
        "queued",
        "revoked",
        "session",
        "wanted",
    )

    def __init__(self, session: Session, with_news: set[int]) -> None:
        """``with_news``: sessions that have news, to which it adds itself."""
        self.session = session
        self._with_news = with_news
        self.families = Families()
        self.queued: QueuedAdmission | None = None
        self.wanted: dict[int, int] = {}
        self.news: cpb.News | None = None
        self.is_drafted = False
        self.revoked: OrderedDict[int, None] = OrderedDict()

    def may_forget(self, sequence_id: int) -> bool:
        """Return whether an admission that waits has the id, or a sequence that was cut."""
        waits = self.queued is not None and self.queued.names(sequence_id)
        return waits or sequence_id in self.revoked

    def take_news(self) -> cpb.News | None:
        """Return the news for the next answer, and clear them."""
        news, self.news = self.news, None
        self._with_news.discard(self.session.id)
        return news

    def notify_granted(self, message: cpb.Admit, num_cached: int, num_blocks: int) -> None:
        """Add to the news that the admission that waited was granted."""
        news = self._news()
        news.granted_sequence_ids += columns.pack(INT64, [message.sequence_id])
        news.granted_num_cached_tokens += columns.pack(INT32, [num_cached])
        news.granted_num_blocks += columns.pack(INT32, [num_blocks])

    def drop_grants(self) -> None:
        """Drop the news of grants, which say what sequences were before an abort."""
        if self.news is not None:
            for field in _GRANTS:
                self.news.ClearField(field)
            if not self.news.ListFields():
                self.take_news()

    def notify_cut(self, sequence_id: int, reason: cpb.CutReason) -> None:
        """Add to the news that a sequence was cut."""
        news = self._news()
        news.cut_sequence_ids += columns.pack(INT64, [sequence_id])
        news.cut_reasons += columns.pack(UINT8, [reason])
        self.revoked[sequence_id] = None
        self.revoked.move_to_end(sequence_id)
        while len(self.revoked) > _MAX_REVOKED:
            self.revoked.popitem(last=False)

    def notify_pressure(self, family: Family, num_blocks: int, time_left_s: float) -> None:
        """Add to the news that the session is asked to release what a family holds."""
        news = self._news()
        news.num_blocks_asked += num_blocks
        news.asked_sequence_ids += columns.pack(INT64, sorted(family.members - family.swapped))
        if not news.HasField("asked_within"):
            news.asked_within.FromNanoseconds(int(time_left_s * 1e9))

    def _news(self) -> cpb.News:
        if self.news is None:
            self.news = cpb.News()
        self._with_news.add(self.session.id)
        return self.news
