"""``kvplane generate``, ``serve`` and ``layout``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from kvplane.cli.extras import imported_for_good
from kvplane.release import release
from kvplane.serving.settings import EXIT_BAD_SETTINGS, parse

from ..config import GenerateSettings, PrintLayoutSettings
from ..serving.config import ServeSettings
from ..threads import tune_torch
from .program import run_program

_USAGE: Final = "Usage: kvplane generate|serve|layout [OPTIONS]"


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` names; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else EXIT_BAD_SETTINGS
    if argv[0] == "--version":
        print(f"engine {release()}")
        return 0
    if argv[0] not in _COMMANDS:
        print(
            f"engine: error: {argv[0]!r} is not a command; there are {' and '.join(_COMMANDS)}",
            file=sys.stderr,
        )
        return EXIT_BAD_SETTINGS
    return run_program("engine", lambda: _COMMANDS[argv[0]](argv[1:]))


# Torch is imported only once the settings are known to be right.


def _generate(argv: Sequence[str]) -> int:
    config = parse(GenerateSettings, "engine generate", argv, os.environ, "kvplane generate")
    tune_torch(config.num_threads, is_embedded=config.data_plane == "embedded")
    with imported_for_good():
        from .generate import run

    return run(config)


def _serve(argv: Sequence[str]) -> int:
    config = parse(ServeSettings, "engine serve", argv, os.environ, "kvplane serve")
    tune_torch(config.num_threads, is_embedded=config.data_plane == "embedded")
    with imported_for_good():
        from ..serving.server import run

    return run(config)


def _layout(argv: Sequence[str]) -> int:
    config = parse(PrintLayoutSettings, "engine layout", argv, os.environ, "kvplane layout")
    from kvplane.models.hf import checkpoint_dtype, layout_from_hf

    groups = None
    dtype = checkpoint_dtype(config.model) if config.dtype == "auto" else config.dtype
    if config.probe:
        from ..models import loader

        groups = loader.load(config.model, dtype, latent=config.latent).groups
    make = partial(
        layout_from_hf,
        config.model,
        block_size_tokens=config.block_size_tokens,
        dtype=dtype,
        kv_dtype=config.kv_dtype or None,
    )
    layout = make(groups=groups, latent=config.latent)
    print(json.dumps(asdict(layout), indent=1))
    takes = f"a token takes {layout.token_bytes:,} bytes"
    if layout.latent_layers and layout.state_group is None:
        expanded = make(latent=False, model_id=layout.model_id)
        takes += f" in latents, {expanded.token_bytes:,} in keys and values (--no-latent)"
    print(f"engine: {takes}", file=sys.stderr)
    return 0


_COMMANDS: Final = {"generate": _generate, "serve": _serve, "layout": _layout}
