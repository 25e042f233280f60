"""The part of a server that both planes share: settings, logs, metrics, the gRPC server from start
to stop, its streams and errors, and the caller's identity.

Needs the extra ``kvplane[serving]``. Clients import none of it.
"""
