"""Dynamo's indexer as the judge of events. It serves on all interfaces, so the test runs itself in
a network of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from bridged import BLOCK, PATIENCE_S, Pool, bridged_pool, prompt

from tests.helpers.programs import ROOT

PACKAGE = "ai-dynamo-runtime==1.6.1"
FOLDER = ROOT / "build" / "dynamo"
PORT = 8090
IN_NAMESPACE = "KVPLANE_TEST_IN_NAMESPACE"
PROMPTS = [prompt(seed) for seed in range(9)]
pytestmark = pytest.mark.timeout(900)


async def ask(path: str, **body: object) -> Any:
    """Return the indexer's answer to a request, once it serves."""
    data = json.dumps(body | {"model_name": "default"}).encode()
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{path}", data, kind)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                with await asyncio.to_thread(urllib.request.urlopen, request) as response:
                    return json.load(response)
            except OSError:
                await asyncio.sleep(0.1)


async def agree(pool: Pool) -> list[int]:
    """Wait until the indexer knows of both workers what is cached; return it for each prompt."""
    wanted = await pool.num_cached(*PROMPTS)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answers = [await ask("query", token_ids=each) for each in PROMPTS]
            found = [
                [answer["instances"].get(worker, {}).get("longest_matched", 0) for worker in "12"]
                for answer in answers
            ]
            if found == [[num, num] for num in wanted]:
                return wanted
            await asyncio.sleep(0.1)


async def test_dynamo_finds_what_is_cached(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if IN_NAMESPACE not in os.environ:
        run_in_namespace(request.node.nodeid)
        return
    async with bridged_pool(tmp_path) as pool:
        pool.start_bridge()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(PORT)]
        indexer = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(FOLDER)})
        try:
            events, replay = (f"tcp://127.0.0.1:{port}" for port in (pool.port, pool.replay_port))
            # One worker twice: of the second one it asks for batches that it has missed.
            for worker, more in ((1, {}), (2, {"replay_endpoint": replay})):
                of = {"instance_id": worker, "endpoint": events, "block_size": BLOCK}
                await ask("register", **of, **more)
            await pool.cache(PROMPTS[0])
            assert (await agree(pool))[0] == 4 * BLOCK
            await pool.cache(*PROMPTS[1:5])
            assert (await agree(pool))[0] == 0
            pool.kill_bridge()
            await pool.cache(*PROMPTS[5:7])
            pool.start_bridge()
            await agree(pool)
            await pool.planes.restart_control()
            await pool.cache(*PROMPTS[7:])
            await agree(pool)
            await pool.planes.restart()
            await pool.control.wait_ready(pool.planes.pool_id)
            assert not any(await agree(pool))
        finally:
            indexer.kill()
            indexer.wait()


def run_in_namespace(test: str) -> None:
    if not (FOLDER / "dynamo").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*pip, "--target", str(FOLDER), PACKAGE], check=True, timeout=600)
    command = [
        "integrations/ray/tests/in_namespace.sh",
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        test,
    ]
    env = os.environ | {IN_NAMESPACE: "yes"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
