"""An engine finds in files what its data plane had computed before it was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_planes import POOL, Pair

from engine import LLM, SamplingParams
from tests.helpers.waiting import wait_until

PROMPT = "what was asked before, at some length, so that it has a few blocks of its own; " * 3
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def num_files(folder: Path) -> int:
    return len([*folder.rglob("*.block")])


@pytest.mark.nightly  # two engines; on push a prefix outlives its process in test_file_tier
def test_a_killed_data_plane_comes_back_with_its_files_and_answers_the_same(
    model: Path, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    arguments = ("--file-tier-dir", str(files), "--file-tier-bytes", str(2**24))
    with Pair(model, tmp_path, arguments=arguments) as pair:
        settings = {"control_plane": pair.control.address, "pool_id": POOL, "timeout_s": 20.0}
        with LLM(model, **settings) as llm:
            (first,) = llm.generate([PROMPT], PARAMS)
            assert num_files(files) == 0
            (again,) = llm.generate([PROMPT], PARAMS)
            num_blocks = again.num_cached_tokens // 16
            assert num_blocks > 10
            wait_until(lambda: num_files(files) >= num_blocks)
            pair.data.kill()
            pair.data.start()
            (after,) = llm.generate([PROMPT], PARAMS)
            assert after.num_cached_tokens == 16 * num_blocks
            assert llm.stats.num_reopened_sessions == 1
        for output in (again, after):
            assert output.outputs[0].token_ids == first.outputs[0].token_ids
        pair.data.kill()
        pair.data.start()
        with LLM(model, **settings) as llm:
            (fresh,) = llm.generate([PROMPT], PARAMS)
            assert fresh.num_cached_tokens == 16 * num_blocks
            assert fresh.outputs[0].token_ids == first.outputs[0].token_ids
