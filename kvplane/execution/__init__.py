"""Executions: the calls that run a session's plans on data planes."""

from kvplane.execution.execution import Execution

__all__ = ["Execution"]
