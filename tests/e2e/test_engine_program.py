"""``python -m engine``: help, settings, and clear errors with exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import layout_from_json, load_layout
from engine import LLM
from engine.commands.generate import _print_whole
from engine.commands.main import main
from engine.request import Delta
from kvplane.errors import PlaneUnavailableError
from kvplane.models.hf import layout_from_hf
from tests.helpers.programs import ROOT, called, run
from tests.models.tiny_models import save_tiny

MODEL = ROOT / "models" / "recall"


ASK = ("generate", "--model", ".", "--prompt", "x")
SERVE = ("serve", "--model", ".")


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["fly"], {}, "fly"),
        (["generate", "--prompt", "x"], {}, "model"),
        (
            ["generate", "--prompt", "x", "--model", "/nowhere"],
            {},
            "not a folder: 'hf download",
        ),
        (["generate", "--model", "."], {}, "prompt"),
        ([*ASK, "--max-tokens", "0"], {}, "max-tokens"),
        ([*ASK, "--top-p", "nan"], {}, "top-p"),
        (ASK, {"KVPLANE_ENGINE_GENERATE_SEED": "many"}, "seed"),
        (ASK, {"KVPLANE_ENGINE_GENERATE_SPEED": "1"}, "GENERATE_SPEED"),
        ([*SERVE, "--bind", "0.0.0.0:0"], {}, "bind: 0.0.0.0:0 can be reached from other"),
        ([*SERVE, "--https-key", "k.pem"], {}, "https_cert: must be given with --https-key"),
        ([*SERVE, "--api-keys-file", "/dev/null"], {}, "api_keys_file: has no keys"),
        (
            [*SERVE, "--max-received-bytes", "1048575"],
            {},
            "max_received_bytes: must leave one client room",
        ),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_exit_code_2(
    arguments: Sequence[str],
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    try:
        code: Any = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said.lower() in line.lower()


def test_planes_that_are_away_are_a_clear_error() -> None:
    done = run(
        "engine", "generate", "--model", "models/recall", "--prompt", "x",
        "--recovery-timeout-s", "0.5", "--control-plane", "127.0.0.1:1",
        "--log-level", "info", "--log-format", "json",
    )  # fmt: skip
    assert done.returncode == 1
    *log, error = done.stderr.splitlines()
    assert "PLANE_UNAVAILABLE" in error
    first = json.loads(log[0])
    assert first["logger"] == "engine"
    assert "recovery_timeout_s=0.5" in first["message"], "the settings come first"
    assert all(json.loads(line)["level"] for line in log)


def test_an_engine_soon_says_what_it_waits_for_and_for_how_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(PlaneUnavailableError, match=r"pool 'default' is not ready after 2.5 s"):
        LLM(MODEL, control_plane="127.0.0.1:1", recovery_timeout_s=2.5)
    (told,) = [text for text in caplog.messages if text.startswith("waiting ")]
    assert "control_plane=127.0.0.1:1 pool_id=default at_most_s=2.5 " in told
    assert "Connection refused" in told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_far_a_batch_is(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal nothing moves
    deltas = [
        Delta(f"request-{request}", 0, text, [7], reason)
        for text, reason in (("a", ""), ("b", "stop"))
        for request in (1, 2)
    ]
    assert _print_whole(iter(deltas), 2, 1) == 0
    printed = capsys.readouterr()
    assert printed.out == "[1] ab\n[2] ab\n"
    assert ("2 of 2" in printed.err and "4 tokens" in printed.err) is is_terminal


def test_a_printed_layout_is_taken_by_a_data_plane_without_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "--model", str(MODEL), "--dtype", "bfloat16"]) == 0
    layout = tmp_path / "layout.json"
    layout.write_text(capsys.readouterr().out)
    assert layout_from_json(layout) == layout_from_hf(MODEL, dtype="bfloat16")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from data_plane.server.server import load_layout\n"
        "from data_plane.server.config import DataPlaneSettings\n"
        f"print(load_layout(DataPlaneSettings(layout=Path({str(layout)!r}))).num_layers)\n"
        f"load_layout(DataPlaneSettings(model=Path({str(MODEL)!r})))\n"
    )
    done = called(sys.executable, "-c", code, timeout_s=120)
    assert done.stdout == "2\n"
    assert "or give --layout a file" in done.stderr


BYTES_OF_LATENTS = 4 * (32 + 8) * 4  # layers, numbers, bytes of each
BYTES_OF_KEYS_AND_VALUES = 4 * 4 * (24 + 16) * 4  # layers, heads, numbers, bytes


@pytest.mark.parametrize("is_latent", [True, False])
def test_a_model_with_latents_has_a_layout_of_either_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_latent: bool
) -> None:
    """The program says what a token takes, and a data plane takes the same layout by its flag."""
    save_tiny("deepseek_v3", tmp_path)
    assert main(["layout", "--model", str(tmp_path), *([] if is_latent else ["--no-latent"])]) == 0
    printed = capsys.readouterr()
    assert f"{BYTES_OF_KEYS_AND_VALUES:,}" in printed.err
    assert (f"{BYTES_OF_LATENTS:,} bytes in latents" in printed.err) is is_latent
    (tmp_path / "layout.json").write_text(printed.out)
    layout = layout_from_json(tmp_path / "layout.json")
    assert bool(layout.latent_layers) is is_latent
    assert load_layout(DataPlaneSettings(model=tmp_path, latent=is_latent)) == layout
