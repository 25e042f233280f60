"""A session of the client: its numbered calls, its queries, and its background tasks."""

from kvplane.results import AbortResult
from kvplane.session.session import ReadmitResult, Session
from kvplane.session.step_numbering import AbandonedResult

__all__ = ["AbandonedResult", "AbortResult", "ReadmitResult", "Session"]
