"""The client for programs without an event loop: the same calls, which return when they are done.

    from kvplane.sync import ControlClient

    with ControlClient("127.0.0.1:50051") as control, control.open_session("pool") as session:
        with session.open_execution() as execution:
            step = session.step([...])

Classes, methods and errors are those of ``kvplane``, and so is the documentation of each. All
objects may be used from any thread; calls of one session still run one after the other.
"""

from kvplane.sync.clients import ControlClient, DataClient, Execution, Session

__all__ = ["ControlClient", "DataClient", "Execution", "Session"]
