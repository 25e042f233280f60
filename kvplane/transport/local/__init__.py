"""Executions between processes on one machine: packets on a Unix socket, tensors in shared memory.

Both ends use this package. The data plane's end is ``data_plane.server.local``.
"""
