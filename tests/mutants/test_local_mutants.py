"""The tests of local executions fail when a check is taken out of a copy of the tree."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvplane_kernels import ServedLayers

from tests.helpers import patched_faults
from tests.helpers.source_faults import Fault, assert_noticed

LOCAL = "tests/rpc/test_local_executions.py"
LAYERS = "tests/rpc/test_local_layers.py"
RUNNER = "data_plane/execution/layer_runner.py"
SERVER = "data_plane/server/local/layer_server.py"
PACKETS = "kvplane/transport/local/packets.py"
WORKER = "tests/unit/executor/test_worker_thread.py"
REGION = "data_plane/server/local/region.py"
ENDPOINT = "data_plane/server/local/endpoint.py"
CONNECTION = "data_plane/server/local/connection.py"
STREAM = "data_plane/server/execute_stream.py"

FAULTS = {
    "ranges_past_the_end_are_read": Fault(
        REGION,
        "not 0 <= first <= self.size_bytes - num_bytes",
        "first < 0",
        LOCAL,
        "does_not_fit",
    ),
    "regions_can_shrink": Fault(
        REGION, "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW |", "", LOCAL, "shrink"
    ),
    "secrets_serve_again": Fault(
        ENDPOINT,
        "self._offers.pop(join.secret, None)",
        "self._offers.get(join.secret)",
        LOCAL,
        "taken_once",
    ),
    "any_region_is_this_one": Fault(
        STREAM,
        "        region = self._regions.get(place.region_id)\n",
        "        region = self._regions[1]\n",
        LOCAL,
        "does_not_fit",
    ),
    "offers_do_not_age": Fault(
        ENDPOINT, "or offer.expires_s < time.monotonic()", "", LOCAL, "is_old"
    ),
    "users_are_not_compared": Fault(
        ENDPOINT, "or not packets.is_same_user(peer)", "", LOCAL, "another_user"
    ),
    "sessions_have_any_number_of_regions": Fault(
        ENDPOINT, "len(of_session) >= MAX_REGIONS_PER_SESSION", "False", LOCAL, "bounded"
    ),
    "there_is_any_number_of_regions": Fault(
        ENDPOINT, "len(self._connections) >= self._num_regions", "False", LOCAL, "bounded"
    ),
    "who_does_not_join_stays": Fault(
        ENDPOINT,
        "lambda: self._no_longer_joining(peer).close()",
        "lambda: None",
        LOCAL,
        "does_not_join",
    ),
    "regions_outlive_their_streams": Fault(
        ENDPOINT, "self._worker.post(partial(self._end, stream))", "pass", LOCAL, "ends_with"
    ),
    "regions_outlive_their_sessions": Fault(
        CONNECTION, "if not self._is_of_session():", "if False:", LOCAL, "ends_with"
    ),
    "callers_are_not_looked_up_again": Fault(
        CONNECTION,
        "self._admit()\n            if packet",
        "if packet",
        LAYERS,
        "another_kind",
    ),
    "elements_in_a_packet_are_taken": Fault(
        STREAM,
        'if is_local or message.HasField("memory"):',
        'if message.HasField("memory"):',
        LOCAL,
        "does_not_fit",
    ),
    "answers_forget_the_receipt": Fault(
        SERVER, "if receipt is None:", "if True:", LAYERS, "computed_and_counted"
    ),
    "sockets_go_first": Fault(
        "data_plane/server/worker_thread.py",
        "self._commands.put(lane, partial(self._serve, fd, serve()))",
        "self._commands.put(None, partial(self._serve, fd, serve()))",
        WORKER,
        "turns",
    ),
    "packets_that_came_wait_for_a_turn": Fault(
        "data_plane/server/worker_thread.py",
        "if not self._others(ready) and",
        "if not ready and",
        WORKER,
        "has_come_already",
    ),
    "what_others_published_is_written": Fault(
        "data_plane/execution/plan_runner.py",
        "self.write_checks.check_may_write(session, run)",
        "pass",
        LAYERS,
        "since_the_plan",
    ),
    "plans_that_have_run_are_written_again": Fault(
        RUNNER, "if not may_write or any(", "if any(", LAYERS, "run_elsewhere"
    ),
    "layers_that_native_code_ran_are_not_noted": Fault(
        RUNNER,
        "run.progress.finish_layer(self._layers.index(each.layer))",
        "pass",
        LAYERS,
        "counted",
    ),
    "layers_that_native_code_ran_are_not_counted": Fault(
        RUNNER, "compute.count(each.bound, run, each.seconds)", "pass", LAYERS, "counted"
    ),
    "last_layers_are_answered_without_a_receipt": Fault(
        RUNNER,
        "layer_index(self._layers, layer), len(self._layers) - 1",
        "layer_index(self._layers, layer), len(self._layers)",
        LAYERS,
        "counted",
    ),
    "bindings_are_of_any_number": Fault(
        PACKETS, "if binding >= MAX_BINDINGS:", "if False:", LAYERS, "what_is_bound"
    ),
    "bindings_are_of_any_length": Fault(
        SERVER, "len(request) <= _MAX_BYTES,", "True,", "tests/attacks/test_shared_memory.py"
    ),
    "bindings_name_a_plan": Fault(
        SERVER, "if parsed.plan_number or", "if False and", LAYERS, "what_is_bound"
    ),
    "bindings_that_failed_leave_the_one_before": Fault(
        SERVER,
        "self._native.unbind(number)\n        self._bindings.pop(number, None)",
        "pass",
        LAYERS,
        "what_is_bound",
    ),
    "outputs_are_written_over_what_is_read": Fault(
        SERVER,
        "None if any(overlap(output, tensor) for tensor in (query, key, value)) else bound",
        "bound",
        LAYERS,
        "over_the_tensors",
    ),
    "callers_of_bound_layers_are_not_looked_up": Fault(
        CONNECTION,
        "self._admit()\n            except KvplaneError:\n                return layers",
        "pass\n            except KvplaneError:\n                return layers",
        LAYERS,
        "since_the_plan",
    ),
    "callers_are_looked_up_before_the_wait": Fault(
        CONNECTION,
        "if not layers.look(epoll, waits=waits):\n                return None\n"
        "            try:\n                self._admit()\n",
        "try:\n                self._admit()\n"
        "                if not layers.look(epoll, waits=waits):\n"
        "                    return None\n",
        LAYERS,
        "is_removed_while",
    ),
    "the_executor_is_held_while_looking": Fault(
        SERVER,
        "return self._native.look(epoll, waits)",
        "with self._executor._command.lock:\n            return self._native.look(epoll, waits)",
        LAYERS,
        "executor_is_free",
    ),
    "the_executor_is_held_until_the_next_packet": Fault(
        SERVER,
        "native.serve(epoll, waits)",
        "native.serve(epoll, waits) or native.look(epoll, waits)",
        LAYERS,
        "executor_is_free",
    ),
    "bugs_end_the_thread": Fault(
        CONNECTION,
        'raise ConnectionError("internal error") from error',
        "raise",
        LAYERS,
        "a_bug_ends",
    ),
    "outputs_stay_in_the_region": Fault(
        "kvplane/runtime/region_layers.py",
        "return output if was_moved else output.copy_(bound.output)",
        "return output",
        LAYERS,
        "same_bits",
    ),
    "plans_begun_are_not_checked": Fault(
        "kvplane/execution/shard_execution.py",
        "if num_tokens != wanted:",
        "if False:",
        "tests/rpc/test_sdk_execution.py",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_tests_notice(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


class Impatient(ServedLayers):
    """Does not wait."""

    def look(self, epoll: int, waits: bool) -> bool:
        return super().look(epoll, False)


class Deaf(ServedLayers):
    """Waits for nothing but packets."""

    def __init__(self, *, fd: int, spin_s: float, most_s: float) -> None:
        super().__init__(fd=fd, spin_s=spin_s, most_s=most_s)
        self._only = select.epoll()
        self._only.register(fd, select.EPOLLIN)

    def look(self, epoll: int, waits: bool) -> bool:
        return super().look(self._only.fileno(), waits)


class Unhurried(ServedLayers):
    """Runs layers for as long as there are packets."""

    def __init__(self, *, fd: int, spin_s: float, most_s: float) -> None:
        super().__init__(fd=fd, spin_s=spin_s, most_s=most_s + 3600.0)


@pytest.mark.parametrize(
    ("fault", "name", "most_s"),
    [
        (Impatient, "test_a_packet_ends_the_sleep", 0.001),
        (Deaf, "test_what_else_is_ready_ends_the_sleep", 0.001),
        (Unhurried, "test_layers_that_are_asked_for_ahead_are_run_a_while_at_a_time", 0.0),
    ],
)
def test_how_native_code_waits_and_hurries_is_noticed(
    fault: type[ServedLayers],
    name: str,
    most_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = patched_faults.load("unit/executor/test_served_layers.py")
    test: Callable[[object], None] = getattr(module, name)

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        with contextmanager(module.new_rig)(most_s) as rig:
            test(rig)

    patched_faults.assert_noticed(
        lambda patch: patch.setattr(module, "ServedLayers", fault), run, monkeypatch, tmp_path
    )
