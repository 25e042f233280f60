"""``python -m engine``: help, settings, and clear errors with exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_planes import ROOT

from data_plane.server.server import layout_from_json
from engine.commands.generate import _print_whole
from engine.config import GenerateSettings, PrintLayoutSettings
from engine.request import Delta
from engine.serving.config import ServeSettings
from kvplane.models.hf import layout_from_hf

GENERATE = ["engine", "generate", "--model", "."]


def program(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("name", "prefix", "config"),
    [
        ("engine", "ENGINE_GENERATE", GenerateSettings),
        ("engine", "ENGINE_SERVE", ServeSettings),
        ("engine", "ENGINE_LAYOUT", PrintLayoutSettings),
    ],
)
def test_help_names_every_flag_with_unit_default_and_variable(
    name: str, prefix: str, config: type[Any]
) -> None:
    done = program(name, "--help")
    assert done.returncode == 0
    text = "".join(done.stdout.split())
    for field in dataclasses.fields(config):
        assert "--" + field.name.replace("_", "-") in text
        assert f"KVPLANE_{prefix}_{field.name.upper()}" in text
        if unit := field.metadata.get("unit"):
            assert f"[unit:{unit}]" in text


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["engine", "fly"], {}, "fly"),
        (["engine", "generate", "--prompt", "x"], {}, "model"),
        (["engine", "generate", "--prompt", "x", "--model", "/nowhere"], {}, "model"),
        (["engine", "generate", "--model", "."], {}, "prompt"),
        (
            ["engine", "generate", "--model", ".", "--prompt", "x", "--max-tokens", "0"],
            {},
            "max-tokens",
        ),
        ([*GENERATE, "--prompt", "x", "--top-p", "nan"], {}, "top-p"),
        ([*GENERATE, "--prompt", "x"], {"KVPLANE_ENGINE_GENERATE_SEED": "many"}, "seed"),
        ([*GENERATE, "--prompt", "x"], {"KVPLANE_ENGINE_GENERATE_SPEED": "1"}, "GENERATE_SPEED"),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_exit_code_2(
    arguments: list[str], environ: dict[str, str], said: str
) -> None:
    done = program(*arguments, **environ)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert said.lower() in done.stderr.lower()


def test_planes_that_are_away_are_a_clear_error() -> None:
    done = program(
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


def test_an_engine_soon_says_what_it_waits_for_and_for_how_long() -> None:
    done = program(
        "engine", "serve", "--model", "models/recall", "--bind", "127.0.0.1:0",
        "--recovery-timeout-s", "2.5", "--control-plane", "127.0.0.1:1",
    )  # fmt: skip
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if " waiting " in line]
    assert "control_plane=127.0.0.1:1 pool_id=default at_most_s=2.5 " in told
    assert "Connection refused" in told
    assert "pool 'default' is not ready after 2.5 s" in done.stderr.splitlines()[-1]


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


def test_a_layout_is_printed_as_a_data_plane_takes_it(tmp_path: Path) -> None:
    model = ROOT / "models" / "recall"
    done = program("engine", "layout", "--model", str(model), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    (tmp_path / "layout.json").write_text(done.stdout)
    assert layout_from_json(tmp_path / "layout.json") == layout_from_hf(model, dtype="bfloat16")


def test_a_data_plane_with_a_layout_needs_no_transformers(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    model = ROOT / "models" / "recall"
    layout.write_text(program("engine", "layout", "--model", str(model)).stdout)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from data_plane.server.server import load_layout\n"
        "from data_plane.server.config import DataPlaneSettings\n"
        f"print(load_layout(DataPlaneSettings(layout=Path({str(layout)!r}))).num_layers)\n"
        f"load_layout(DataPlaneSettings(model=Path({str(model)!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n"
    assert "or give --layout a file" in done.stderr
