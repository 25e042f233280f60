"""Headless Chromium, spoken to by its DevTools protocol over pipes: real time, a real page."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 30.0


class Browser:
    """A context manager: one tab. ``height``: of the window, in pixels."""

    def __init__(self, url: str, *, height: int = 900) -> None:
        self._url = url
        self._size = f"--window-size=1200,{height}"
        self._number = 0
        self._session = ""

    def __enter__(self) -> Browser:
        with ExitStack() as stack:
            profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            theirs_in, ours_out = os.pipe()
            ours_in, theirs_out = os.pipe()
            self._in = stack.enter_context(os.fdopen(ours_in, "rb"))
            self._out = stack.enter_context(os.fdopen(ours_out, "wb"))
            # Chromium takes its orders from descriptor 3, and answers to 4.
            shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
            process = subprocess.Popen(
                [
                    *("bash", "-c", shell, "bash", "chromium", *flags, self._size),
                    *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
                ],
                pass_fds=(theirs_in, theirs_out),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.close(theirs_in)
            os.close(theirs_out)
            stack.callback(_end, process)
            target = self._call("Target.createTarget", url=self._url)["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Return as soon as an expression is true. Raises TimeoutError."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > deadline_s:
                text = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{script} did not become true; the page says: {text}")
            time.sleep(0.1)

    def take_picture(self, path: Path) -> None:
        """Write a picture of the window, as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._read()).get("id") != self._number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> Any:
        text = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("chromium has ended")
            text += byte
        return json.loads(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the browser and all of its processes: a running one writes into its profile."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
