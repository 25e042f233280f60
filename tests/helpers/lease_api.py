"""A stand-in for the part of Kubernetes' API server that Leases use, over real HTTP: objects with
versions, and a replacement refused when it names another version. No API server can run here.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LeaseApi:
    """``with LeaseApi() as api``: serves at ``api.url``; ``api.leases`` by path."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self._version = 0
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with api._lock:
                    self.answer(200 if self.path in api.leases else 404, api.leases.get(self.path))

            def do_POST(self) -> None:
                lease = self.body()
                path = f"{self.path}/{lease['metadata']['name']}"
                with api._lock:
                    if path in api.leases:
                        return self.answer(409, None)
                    self.answer(201, api.store(path, lease))
                return None

            def do_PUT(self) -> None:
                lease = self.body()
                with api._lock:
                    held = api.leases[self.path]["metadata"]["resourceVersion"]
                    if lease["metadata"]["resourceVersion"] != held:
                        return self.answer(409, None)
                    self.answer(200, api.store(self.path, lease))
                return None

            def body(self) -> dict[str, Any]:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, status: int, lease: dict[str, Any] | None) -> None:
                data = json.dumps(lease or {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def store(self, path: str, lease: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        self.leases[path] = json.loads(json.dumps(lease))
        return lease

    def __enter__(self) -> LeaseApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
