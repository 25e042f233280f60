"""Logs on stderr, one line for each record: time, level, logger, then the message, which is written
as words and ``key=value`` pairs; or the same as a JSON object.

Never in a log: token ids, tensors, keys. So a caught exception is logged as its type and frames,
without its message.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
# Text from a caller must neither end a line nor control the terminal that shows it, nor the order
# in which it shows characters.
_ESCAPES: Final = {
    code: repr(chr(code))[1:-1]
    for first, last in (
        *((0, 0x1F), (0x7F, 0x9F), (0x2028, 0x2029)),  # control characters, ends of lines
        *((0x61C, 0x61C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069)),  # directions
    )
    for code in range(first, last + 1)
}


def setup(level: str = "info", format: str = "text") -> None:
    """Log records from ``level`` up to stderr alone, in a ``format`` of ``FORMATS``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if format == "json" else _OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def frames_of(error: BaseException) -> str:
    """Return an exception's type and its stack frames, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    path = " < ".join(f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {path}"


class _OneLine(logging.Formatter):
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s level=%(levelname)s logger=%(name)s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPES)

    def formatException(self, ei: object) -> str:
        error = ei[1] if isinstance(ei, tuple) else None
        return frames_of(error) if error is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " ")


class _Json(_OneLine):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)
