"""A session of the client: its numbered calls, its queries, and what it does by itself."""

from kvplane.session.session import Readmission, Resynced, Session
from kvplane.session.step_numbering import UnclaimedAnswer

__all__ = ["Readmission", "Resynced", "Session", "UnclaimedAnswer"]
