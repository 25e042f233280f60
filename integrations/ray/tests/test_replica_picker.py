"""Tests which replica of a Ray Serve deployment gets a request, without Ray."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from kvplane.integrations.ray.replica_picker import ReplicaPicker, body_of
from kvplane.integrations.router.picker import Picker
from kvplane.integrations.router.pool_index import PoolIndex
from kvplane.integrations.router.prompts import Prompts
from kvplane.prefixes import BlocksStored, StoredBlock

PROMPTS = Prompts([[1, 2, 3, 4, 5]])
REPLICAS = {"a": "cold", "b": "warm", "c": "unknown"}


def replicas() -> ReplicaPicker:
    """Make three, at 4 tokens a second; the pool of "b" has the first block of the prompt."""
    picker = Picker({}, hit_bias=0.0, tokens_per_s=4.0)
    picker.choose_among(REPLICAS)
    picker.indexes |= {"cold": PoolIndex(4), "warm": PoolIndex(4)}
    block = StoredBlock(b"1" * 16, bytes(16), array("i", [1, 2, 3, 4]), 1)
    picker.indexes["warm"].apply(BlocksStored((block,)))
    return ReplicaPicker(picker)


def test_a_request_goes_where_its_prompt_is_cached() -> None:
    made = replicas()
    assert made.choose("r", PROMPTS, REPLICAS, 0.0) == "b"
    assert made.choose("r", PROMPTS, {"a", "c"}, 0.0) in ("a", "c")
    assert made.choose("r", PROMPTS, {"gone"}, 0.0) is None


def test_a_replica_that_has_too_much_to_do_is_passed_over() -> None:
    made = replicas()
    assert made.choose("long", Prompts((), 12), {"b"}, 0.0) == "b"
    made.sent("long", "b", 0.0)
    assert made.choose("r", PROMPTS, REPLICAS, 0.0) != "b"
    made.ended("long", "b")
    assert made.choose("r", PROMPTS, REPLICAS, 0.0) == "b"


def test_a_request_counts_where_it_went() -> None:
    made = replicas()
    loads = made.picker.loads
    assert made.choose("r", PROMPTS, REPLICAS, 0.0) == "b"
    made.sent("r", "a", 0.0)  # "b" was full
    assert [loads[each].num_open for each in "abc"] == [1, 0, 0]
    assert loads["a"].wait_s(0.0) == 5 / 4
    made.sent("r", "a", 0.0)
    made.ended("r", "b")
    assert loads["a"].num_open == 1
    made.ended("r", "a")
    made.ended("r", "a")
    assert loads["a"].num_open == 0


def test_a_request_that_was_refused_counts_where_it_goes_next() -> None:
    made = replicas()
    for replica in ("b", "a"):
        made.choose("r", PROMPTS, REPLICAS, 0.0)
        made.sent("r", replica, 0.0)
    made.ended("r", "b")  # Serve may say so when the request is on its way to "a" already
    assert [made.picker.loads[each].num_open for each in "abc"] == [1, 0, 0]


def test_a_request_that_was_given_up_counts_nowhere() -> None:
    made = replicas()
    made.choose("r", PROMPTS, REPLICAS, 0.0)
    made.given_up("r")
    made.sent("r", "b", 0.0)
    assert made.picker.loads["b"].num_open == 0


def test_replicas_come_and_go_and_those_that_stay_keep_their_load() -> None:
    made = replicas()
    for request, replica in (("stays", "a"), ("goes", "b")):
        made.choose(request, PROMPTS, {replica}, 0.0)
        made.sent(request, replica, 0.0)
    made.choose("late", PROMPTS, {"b"}, 0.0)
    made.picker.choose_among({"a": "cold", "d": "warm"})
    made.sent("late", "b", 0.0)
    made.ended("goes", "b")
    assert {name: load.num_open for name, load in made.picker.loads.items()} == {"a": 1, "d": 0}
    assert made.choose("r", PROMPTS, {"a", "d"}, 0.0) == "d"


def test_a_request_is_found_among_the_arguments_of_a_call() -> None:
    message = {"role": "user", "content": "hello"}
    of_pydantic = SimpleNamespace(model_dump=lambda: message)
    assert body_of([7, {"prompt": [1, 2], "seed": 3}]) == {"prompt": [1, 2]}
    assert body_of([{"prompt": None, "messages": [message]}]) == {"messages": [message]}
    assert body_of([SimpleNamespace(prompt="text")]) == {"prompt": "text"}
    assert body_of([SimpleNamespace(messages=[of_pydantic, message])]) == {
        "messages": [message] * 2
    }
    assert body_of([7, "prompt", {}]) == {}
