"""The router before two vLLMs over HTTP, with a pool each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from scripts.planes import ROOT
from tests.engines.programs import PATIENCE_S
from tests.engines.questions import prompts_of
from tests.engines.vllm_engines import (
    BLOCK,
    ENVIRONMENT,
    PATIENT,
    PYTHON,
    Judge,
    Pools,
    transfer_of,
)
from tests.helpers.http_programs import HttpProgram
from tests.helpers.waiting import wait_until

POOLS: Final = ("pool-1", "pool-2")
MODEL: Final = "recall"
FLAGS: Final = (
    *("--model", "models/recall", "--served-model-name", MODEL, "--host", "127.0.0.1"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", "32"),
    *("--max-num-seqs", "8", "--num-gpu-blocks-override", "512", "--enable-prompt-tokens-details"),
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


class Server:
    """vLLM's server of OpenAI's paths as processes: it can be killed and started again."""

    def __init__(self, log: Path, tier: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        transfer = json.dumps(transfer_of(**tier))
        self._flags = ("--port", str(port), "--kv-transfer-config", transfer)
        self.start()

    def start(self) -> None:
        program = "vllm.entrypoints.openai.api_server"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [PYTHON, "-m", program, *FLAGS, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the server and its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def servers(pools: Pools, tmp_path: Path) -> Iterator[dict[str, Server]]:
    """A vLLM for each of two pools, by the pool's name."""
    pools.start_control()
    started = {}
    for pool in POOLS:
        pools.start_data("--pool-id", pool)
        tier = {"control_plane": pools.control.address, "pool_id": pool, **PATIENT}
        started[pool] = Server(tmp_path / f"{pool}.log", tier)
        pools.stack.callback(started[pool].kill)
    return started


@pytest.fixture
def router(pools: Pools, servers: dict[str, Server], tmp_path: Path) -> Iterator[HttpProgram]:
    router = HttpProgram(
        *(tmp_path, "router", "kvplane.integrations.router", "--tokenizer", "models/recall"),
        *("--engine", ",".join(f"{server.url}={pool}" for pool, server in servers.items())),
        *("--control-plane", pools.control.address, "--check-interval-s", "0.2"),
        "--no-engines-need-pools",
    )
    router.start()
    router.wait()
    yield router
    router.stop()


def test_a_prompt_goes_to_the_vllm_whose_pool_has_it(
    judge: Judge, servers: dict[str, Server], router: HttpProgram
) -> None:
    prompts, expected = prompts_of(1), judge.expected(1)["answers"]

    def ask(number: int, *, as_text: bool = False) -> tuple[str, int, int]:
        """Ask a prompt; return the pool that it went to, its tokens that the router knew to be
        cached there, and those that vLLM did not compute.
        """
        ids = prompts[number]
        text = "".join(chr(each - 3) for each in ids)
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="-", max_retries=0) as client:
            raw = client.completions.with_raw_response.create(
                model=MODEL,
                prompt=text if as_text else ids,
                max_tokens=4,
                temperature=0,
                extra_body={"return_token_ids": True, "add_special_tokens": False},
            )
        answer, headers = raw.parse(), raw.headers
        judge.compare([answer.choices[0].token_ids], [expected[number]])
        taken = answer.usage.prompt_tokens_details.cached_tokens
        return headers["x-kvplane-pool"], int(headers["x-kvplane-cached-tokens"]), taken

    def wait_for(pool: str, is_up: bool = True) -> None:
        name = f'kvplane_router_engine_up{{engine="{servers[pool].url}"}}'
        why = servers[pool].log.read_text
        wait_until(lambda: router.metric(name) == is_up, PATIENCE_S, why)

    for pool in POOLS:
        wait_for(pool)
    whole = len(prompts[0]) // BLOCK * BLOCK
    home, known, taken = ask(0)
    assert (known, taken) == (0, 0)
    name = f'kvplane_router_pool_blocks{{pool="{home}"}}'
    wait_until(lambda: router.metric(name) >= whole // BLOCK, PATIENCE_S)
    assert ask(0, as_text=True) == (home, whole, whole)

    servers[home].kill()
    wait_for(home, is_up=False)
    other, known, taken = ask(1)
    assert (other == home, known, taken) == (False, 0, 0)
    servers[home].start()
    wait_for(home)
    assert ask(0) == (home, whole, whole), "a process that has computed nothing"
