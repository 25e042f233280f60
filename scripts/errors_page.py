"""Writes docs/errors.md from the classes in kvplane/errors.py.

make errors-page
"""

from __future__ import annotations

from pathlib import Path

from kvplane.errors import CODES, reason_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
HEAD = """# Errors

`make errors-page` writes this page from `kvplane/errors.py`.

A call that fails has a gRPC status. Its details have a `google.rpc.ErrorInfo` of the domain
`kvplane`, whose `reason` is one of those below, and whose metadata name the `field` of the request
at fault and the `request_id` of the server's log. `BadRequest` and `RetryInfo` are there where they
apply. On streams the same is in the message `kvplane.v1.Error`. Python's client raises the class
that the reason names: `POOL_FULL` is `PoolFullError`. A client that does not know a reason goes by
the code.

"""
WHAT_TO_DO = {
    "INVALID_ARGUMENT": "repair the request",
    "NOT_FOUND": "open the session or admit the sequence, or use another id",
    "ALREADY_EXISTS": "use another id",
    "RESOURCE_EXHAUSTED": "wait for `retry_delay`, or free something",
    "OUT_OF_RANGE": "ask for less",
    "ABORTED": "begin again: open a session, admit the sequence, or read a snapshot",
    "FAILED_PRECONDITION": "repair what the caller believes of the state",
    "UNAUTHENTICATED": "identify yourself",
    "PERMISSION_DENIED": "ask for access",
    "UNAVAILABLE": "send the request again",
    "DEADLINE_EXCEEDED": "send the request again",
    "CANCELLED": "send the request again, if it is still wanted",
    "DATA_LOSS": "report it",
    "INTERNAL": "report it, with the request id",
}


def page() -> str:
    """Return the page's text: for each status code what a caller does, and its reasons."""
    lines = ["| code | the caller | reason | what |", "|---|---|---|---|"]
    for code, action in WHAT_TO_DO.items():
        first = f"`{code}` | {action}"
        for error, its_code in CODES.items():
            if its_code == code:
                text = " ".join((error.__doc__ or "").split())
                lines.append(f"| {first} | `{reason_of(error)}` | {text} |")
                first = " | "
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
