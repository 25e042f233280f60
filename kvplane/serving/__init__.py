"""What the two planes share as servers: settings, logs, the gRPC server's life, errors, metrics,
who the caller is.

Needs the extra ``kvplane[serving]``. Clients import none of it.
"""
