"""``python -m benchmarks.control_plane``: see ``benchmarks.control_plane.program``."""

from __future__ import annotations

from kvplane.serving.event_loop import tune_grpc

if __name__ == "__main__":
    tune_grpc()  # as an engine does, and before gRPC is imported

    from benchmarks.control_plane.program import main

    main()
