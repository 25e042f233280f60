"""The ``kvplane`` command against both planes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from rich.console import Console

from data_plane.server.config import DataPlaneSettings
from kvplane import ControlClient, __version__, ops
from kvplane.cli.group import cli
from kvplane.cli.program import run
from kvplane.cli.values import table_of
from kvplane.release import release
from kvplane.serving.settings import parse
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.chunk_store import store
from tests.helpers.load import Load
from tests.helpers.planes_in_process import control_plane

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "1,2,3,4,5,6,7,8,9"


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Awaitable[Done]]


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Planes]:
    async with Planes(tmp_path, data={"num_device_blocks": 64}) as planes:
        yield planes


@pytest.fixture
def command(planes: Planes, capfd: pytest.CaptureFixture[str]) -> Command:
    async def call(*arguments: str) -> Done:
        capfd.readouterr()
        code = await asyncio.to_thread(run, ["--control-plane", planes.address, *arguments])
        return Done(code, *capfd.readouterr())

    return call


async def test_status_and_pools_say_what_the_planes_are(command: Command, planes: Planes) -> None:
    done = await command("--json", "status")
    assert done.code == 0
    told = done.rows
    assert told["version"] == release()
    assert told["incarnation"] == str(planes.control.core.incarnation)
    assert told["pools"][0]["ready"] is True
    assert "1 of 1" in (await command("status")).out
    pools = (await command("--json", "pools")).rows
    assert [tier["blocks"] for tier in pools["tiers"]] == [64, 8]
    assert pools["shards"][0]["address"] == planes.data.address
    assert planes.data.address in (await command("pools")).out


async def test_a_pool_that_is_not_ready_is_exit_code_1(command: Command, planes: Planes) -> None:
    await planes.stop()
    done = await command("status")
    assert done.code == 1
    assert "0 of 1" in done.out


async def test_lookup_explain_retain_and_forget_find_the_prefix_of_a_load(
    command: Command, planes: Planes
) -> None:
    load = Load(duration_s=0.5, num_prefixes=1, prefix_tokens=16, own_tokens=4)
    async with ControlClient(planes.address) as client:
        await load.run(client, POOL)
    assert load.num_cached_tokens > 0
    events = (await command("--json", "watch", "--count", "3")).out.splitlines()
    assert len(events) == 3
    assert json.loads(events[0]) == {"event": "cleared"}
    assert json.loads(events[1])["event"] == "stored"
    tokens = ",".join(map(str, load.prefixes[0]))
    assert (await command("--json", "lookup", tokens)).rows[0]["device_tokens"] == 16
    blocks = (await command("--json", "explain", tokens)).rows
    assert [block["tier"] for block in blocks] == ["device"] * len(blocks)
    assert sum(block["num_hits"] for block in blocks) > 0
    retained = (await command("--json", "retain", tokens, "--ttl-s", "60")).rows[0]
    assert retained["retained_blocks"] == len(blocks)
    assert {b["priority"] for b in (await command("--json", "explain", tokens)).rows} == {50}
    assert (await command("--json", "forget", tokens)).rows[0]["forgotten_blocks"] >= len(blocks)
    assert (await command("--json", "lookup", tokens)).rows[0]["device_tokens"] < 16
    assert (await command("forget", "--all-of", "tenant")).code == 0


async def test_sessions_and_their_sequences_are_listed(command: Command, planes: Planes) -> None:
    assert (await command("--json", "sessions")).rows == []
    async with (
        ControlClient(planes.address) as client,
        await client.open_session(POOL) as session,
    ):
        await session.run(ops.admit(7, range(20)))
        (row,) = (await command("--json", "sessions")).rows
        assert (row["session"], row["sequences"]) == (str(session.id), 1)
        assert row["plans_in_flight"] == 1
        assert 0 < row["lease_s"] <= session.time_to_live_s
        (sequence,) = (await command("--json", "sequences", str(session.id))).rows
        assert (sequence["sequence"], sequence["tokens"], sequence["tier"]) == (7, 20, "device")
        assert sequence["blocks"] == row["held_blocks"] > 0
        assert (await command("sequences", "1")).code == 1


async def test_ping_asks_either_plane(command: Command, planes: Planes) -> None:
    for address in ([], [planes.data.address]):
        done = await command("--json", "ping", *address)
        assert (done.code, done.rows[0]["state"]) == (0, "SERVING")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["lookup", "1,x"], 2, "tokens"),
        (["lookup", "@/no/such/file"], 2, "tokens"),
        (["explain", PROMPT, "--pool", "other"], 1, "POOL_NOT_FOUND"),
        (["forget"], 2, "--all-of"),
        (["retain", PROMPT, "--priority", "0"], 2, "--priority"),
        (["fly"], 2, "fly"),
        (["--tls-cert", "/no/such.pem", "status"], 2, "--tls-key"),
        (
            ["--control-plane", "127.0.0.1:1", "status"],
            1,
            "nothing listens at 127.0.0.1:1",
        ),
        (["ping", "127.0.0.1:1"], 1, "KVPLANE_CONTROL_PLANE"),
        (["lookup"], 2, "--tokenizer"),
        (["lookup", "1", "--text", "x", "--tokenizer", "t"], 2, "TOKENS, or both"),
        (["lookup", "--text", "x"], 2, "TOKENS, or both"),
        (["lookup", "--text", "x", "--tokenizer", "/no/such"], 2, "tokenizer"),
    ],
)
async def test_what_is_wrong_is_said_on_stderr_with_an_exit_code(
    command: Command, arguments: list[str], code: int, said: str
) -> None:
    done = await command(*arguments)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err


async def test_options_stand_before_or_after_the_command(command: Command, planes: Planes) -> None:
    gone = ["--control-plane", "127.0.0.1:1"]
    for words in (["status", "--json"], [*gone, "status", "--json", "--control-plane"]):
        done = await command(*words, *([planes.address] if words[0] != "status" else []))
        assert (done.code, done.rows["address"]) == (0, planes.address), "the last one counts"


async def test_the_control_planes_address_has_one_variable(
    planes: Planes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLANE_CONTROL_PLANE", planes.address)
    assert await asyncio.to_thread(run, ["--json", "ping"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["address"] == planes.address
    assert parse(DataPlaneSettings, "data_plane", [], os.environ).control_plane == planes.address


def test_help_lists_commands_in_groups(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capfd.readouterr().out
    wanted = ("\nRun:", "  up ", "\nLook at", "  explain ", "\nChange", "  forget ", "\nOptions:")
    places = [printed.index(part) for part in wanted]
    assert places == sorted(places)
    listed = re.findall(r"^  ([a-z]+) ", printed, re.MULTILINE)
    assert listed == cli.list_commands(click.Context(cli))


async def test_a_text_is_read_by_a_tokenizer(command: Command) -> None:
    flags = ["--text", "abc", "--tokenizer", "models/recall"]
    done = await command("--json", "lookup", *flags)
    assert done.rows[0]["prompt_tokens"] == 4, "with the token that begins a text"


async def test_tokens_come_from_a_file_too(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[1, 2, 3]")
    done = await command("--json", "lookup", f"@{tmp_path}/tokens.json")
    assert done.rows[0]["prompt_tokens"] == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_for(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_KVPLANE_COMPLETE" in capfd.readouterr().out


def test_no_part_of_a_sessions_id_is_left_out_where_a_table_is_narrow() -> None:
    row = {"pool": "default", "session": "502828640514462", "plans_in_flight": 0, "held_blocks": 0}
    out = io.StringIO()
    Console(file=out, width=30).print(table_of([row]))
    assert "…" not in out.getvalue()


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("data", "serve")]


def call_apart(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "kvplane"]), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("program", ["", "control", *NIGHTLY])
def test_every_program_tells_its_version(program: str) -> None:
    done = call_apart(*program.split(), "--version")
    assert done.returncode == 0
    assert __version__ in done.stdout


def test_a_program_takes_options_before_its_name_too() -> None:
    done = call_apart("--control-plane", "nowhere", "generate", "--model", ".", "--prompt", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "engine generate: error: control_plane: must be host:port" in done.stderr


def test_a_program_names_the_extra_that_it_misses() -> None:
    code = "import sys; sys.modules['torch'] = None; from kvplane.__main__ import main; main()"
    done = call_apart("serve", "--model", "models/recall", code=code)
    assert done.stderr == "engine: error: torch is not installed: pip install 'kvplane[engine]'\n"


async def test_the_doctor_finds_no_pool_for_plug_ins_among_those_of_keys_and_values(
    command: Command, planes: Planes
) -> None:
    done = await command("--json", "doctor")
    assert done.code == 1
    assert [row["what"].split()[0] for row in done.rows] == ["control", "pool"]
    assert "--opaque-page-bytes" in done.rows[1]["said"]


async def test_the_doctor_says_how_fast_a_pool_of_pages_is_and_leaves_nothing_in_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with control_plane() as server, store(server, num_device_blocks=4) as chunks:
        words = ["--control-plane", server.address, "--json", "doctor", "--bytes-per-token", "1"]
        code = await asyncio.to_thread(run, [*words, "--prefill-tokens-per-s", "1"])
        assert code == 0
        rows = {row["what"]: row for row in json.loads(capfd.readouterr().out)}
        assert "GB/s through shared memory" in rows["data plane"]["said"]
        assert rows["a load pays"]["state"] == "yes"
        settings = json.loads(rows["settings of a plug-in"]["said"])
        assert settings == {
            "control_plane": server.address,
            "pool_id": "chunks",
            "break_even_bytes_per_s": 1.0,
        }
        (usage, *_) = (await chunks.control.get_pool("chunks")).usage
        assert usage.num_free_blocks == usage.num_blocks == 4
        await chunks.put(dict.fromkeys([b"1", b"2", b"3", b"4"], b"x"))
        await chunks.pin(b"1", b"2", b"3", b"4")
        assert await asyncio.to_thread(run, [*words, "--prefill-tokens-per-s", "1"]) == 1
        (*_, last) = json.loads(capfd.readouterr().out)
        assert last["state"] == "failed" and "blocks" in last["said"]
