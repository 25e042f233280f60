"""The data plane's end of local executions: packets on a Unix socket, tensors in shared memory."""
