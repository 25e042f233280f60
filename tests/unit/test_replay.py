"""The replay of traces: what its readers make of the published formats, and what it counts."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.replay.cache import Cache
from benchmarks.replay.traces import Request, TraceError, read_trace
from control_plane.config import EVICTION_POLICIES
from tests.helpers.programs import called


def write_lines(path: Path, *rows: Mapping[str, object]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def row(time: float, ids: Sequence[int], **others: object) -> dict[str, object]:
    return {"timestamp": time, "input_length": 512, "output_length": 1, "hash_ids": ids, **others}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_requests_come_in_the_order_of_time_in_seconds(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, row(2500, [3]), row(500, [1, 2]))
    assert read_trace(path) == [Request(0.5, [1, 2]), Request(2.5, [3])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no requests"),
        ('{"timestamp": 1, "hash_ids": [1]}\nnonsense\n', "trace.jsonl:2: "),
        ('{"timestamp": "1", "hash_ids": [1]}', "trace.jsonl:1: timestamp must be a number"),
        ('{"timestamp": 1, "hash_ids": ["1"]}', "trace.jsonl:1: hash_ids must be a list of inte"),
        ("[1]", "trace.jsonl:1: timestamp must be a number"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_hybrid_prompt_is_found_as_far_as_its_deepest_checkpoint() -> None:
    cache = Cache(8, "lru", num_checkpoints=4)
    at = [2, 3]
    for time, (cached, kept) in enumerate([(0, 2), (3, 0), (3, 0)]):
        places = lambda num_cached, _: [place for place in at if place > num_cached]  # noqa: E731
        assert cache.run_hybrid(time, [1, 2, 3, 4], places) == (cached, kept)
    assert cache.run_hybrid(3, [1, 2, 5], lambda _, num: [num]) == (2, 1)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_all_blocks_of_a_prompt_are_found_when_it_comes_again(policy: str) -> None:
    cache = Cache(4, policy)
    assert [cache.run(i, [1, 2, 3, 4]) for i in range(3)] == [0, 4, 4]


def test_a_cache_of_more_blocks_than_a_pool_is_built_of_at_once() -> None:
    cache = Cache(10_000, "lru")
    assert [cache.run(time_s, range(6_000)) for time_s in (0.0, 1.0)] == [0, 6_000]


def test_a_full_cache_keeps_the_heads_of_what_was_used_last() -> None:
    cache = Cache(4, "lru")
    assert cache.run(0, [1, 2, 3]) == 0
    assert cache.run(1, [5, 6, 7]) == 0
    assert cache.run(2, [1, 2, 3]) == 1
    assert cache.run(3, [5, 6, 7]) == 1


def test_of_a_prompt_larger_than_the_cache_the_head_is_cached() -> None:
    cache = Cache(2, "lru")
    assert [cache.run(i, [1, 2, 3, 4]) for i in range(2)] == [0, 2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return called(sys.executable, "-m", "benchmarks.replay", *words)


def test_the_program_counts_hits_of_the_half_that_it_is_asked_for(tmp_path: Path) -> None:
    rows = [row(1000 * i, [1, 2, 10 + i]) for i in range(4)]
    trace = write_lines(tmp_path / "trace.jsonl.gz", *rows)
    out = tmp_path / "new" / "out.json"
    done = run(str(trace), "--half", "second", "--blocks", "100", "--json", str(out))
    figures = json.loads(out.read_text())
    assert [each["policy"] for each in figures] == list(EVICTION_POLICIES)
    assert all(each["num_requests"] == 2 for each in figures)
    assert f"| {trace.name} | second | lru | 0.333 | 0.333 |" in done.stdout


def test_the_program_says_why_it_cannot_replay(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.jsonl"))
    assert done.returncode == 1
    assert "No such file" in done.stderr and "Traceback" not in done.stderr
