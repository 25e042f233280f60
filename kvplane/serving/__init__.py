"""What the two planes share as servers: settings, logs, metrics, the gRPC server from start to
stop, its streams and its errors, who the caller is.

Needs the extra ``kvplane[serving]``. Clients import none of it.
"""
