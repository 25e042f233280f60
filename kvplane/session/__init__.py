"""A session of the client: its numbered calls, its queries, and its background tasks."""

from kvplane.session.session import AbortResult, ReadmitResult, Session
from kvplane.session.step_numbering import AbandonedResult

__all__ = ["AbandonedResult", "AbortResult", "ReadmitResult", "Session"]
