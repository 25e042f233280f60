"""The tests of local executions fail when a check is taken out of a copy of the tree."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.machines import CpuModule

LOCAL = "tests/rpc/test_local_executions.py"
KNOWN = "tests/rpc/test_known_layers.py"
EXPECTED = "data_plane/execution/expected_layers.py"
KNOWN_LAYERS = "data_plane/server/local/known_layers.py"
WORKER = "tests/unit/executor/test_worker_thread.py"
REGION = "data_plane/server/local/region.py"
ENDPOINT = "data_plane/server/local/endpoint.py"
CONNECTION = "data_plane/server/local/connection.py"
STREAM = "data_plane/server/execute_stream.py"
SERVED = "csrc/local/served_layers.h"
SERVED_LAYERS = "tests/unit/executor/test_served_layers.py"

FAULTS = (
    Fault(
        "ranges_past_the_end_are_read",
        REGION,
        "not 0 <= first <= self.size_bytes - num_bytes",
        "first < 0",
        LOCAL,
        "does_not_fit",
    ),
    Fault(
        "regions_can_shrink",
        REGION,
        "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW |",
        "",
        LOCAL,
        "shrink",
    ),
    Fault(
        "secrets_serve_again",
        ENDPOINT,
        "self._offers.pop(join.secret, None)",
        "self._offers.get(join.secret)",
        LOCAL,
        "taken_once",
    ),
    Fault(
        "any_region_is_this_one",
        STREAM,
        "        region = self._regions.get(place.region_id)\n",
        "        region = self._regions[1]\n",
        LOCAL,
        "does_not_fit",
    ),
    Fault(
        "offers_do_not_age", ENDPOINT, "or offer.expires_s < time.monotonic()", "", LOCAL, "is_old"
    ),
    Fault(
        "users_are_not_compared",
        ENDPOINT,
        "or not packets.is_same_user(peer)",
        "",
        LOCAL,
        "another_user",
    ),
    Fault(
        "sessions_have_any_number_of_regions",
        ENDPOINT,
        "len(of_session) >= MAX_REGIONS_PER_SESSION",
        "False",
        LOCAL,
        "bounded",
    ),
    Fault(
        "there_is_any_number_of_regions",
        ENDPOINT,
        "len(self._connections) >= self._num_regions",
        "False",
        LOCAL,
        "bounded",
    ),
    Fault(
        "who_does_not_join_stays",
        ENDPOINT,
        "lambda: self._no_longer_joining(peer).close()",
        "lambda: None",
        LOCAL,
        "does_not_join",
    ),
    Fault(
        "regions_outlive_their_streams",
        ENDPOINT,
        "self._worker.post(partial(self._end, stream))",
        "pass",
        LOCAL,
        "ends_with",
    ),
    Fault(
        "regions_outlive_their_sessions",
        CONNECTION,
        "if not self._is_of_session():",
        "if False:",
        LOCAL,
        "ends_with",
    ),
    Fault(
        "callers_are_not_looked_up_again",
        CONNECTION,
        "self._admit()\n            return",
        "return",
        KNOWN,
        "another_kind",
    ),
    Fault(
        "views_outlive_their_regions",
        STREAM,
        "region in regions}, share\n        self._known.clear()",
        "region in regions}, share",
        LOCAL,
        "ends_with or computed_in",
    ),
    Fault(
        "elements_in_a_packet_are_taken",
        STREAM,
        'if is_local or message.HasField("memory"):',
        'if message.HasField("memory"):',
        LOCAL,
        "does_not_fit",
    ),
    Fault(
        "answers_forget_the_receipt",
        STREAM,
        "if receipt is None:\n            return layer.packet",
        "if True:\n            return layer.packet",
        LOCAL,
        "computed_in",
    ),
    Fault(
        "sockets_go_first",
        "data_plane/server/worker_thread.py",
        "self._commands.put(lane, partial(self._serve, fd, serve()))",
        "self._commands.put(None, partial(self._serve, fd, serve()))",
        WORKER,
        "turns",
    ),
    Fault(
        "packets_that_came_wait_for_a_turn",
        "data_plane/server/worker_thread.py",
        "if not self._others(ready) and",
        "if not ready and",
        WORKER,
        "has_come_already",
    ),
    Fault(
        "what_others_published_is_written",
        EXPECTED,
        "self._plans.write_checks.check_may_write(session, run)",
        "pass",
        KNOWN,
        "since_the_plan",
    ),
    Fault(
        "plans_that_have_run_are_written_again",
        EXPECTED,
        "or run.is_complete:",
        "and False:",
        KNOWN,
        "run_elsewhere",
    ),
    Fault(
        "known_layers_are_not_noted",
        EXPECTED,
        "run.progress.finish_layer(call.index)",
        "pass",
        KNOWN,
        "counted",
    ),
    Fault(
        "outputs_are_written_over_what_is_read",
        KNOWN_LAYERS,
        "if any(overlap(output, tensor) for tensor in (query, key, value)):",
        "if False:",
        KNOWN,
        "over_the_tensors",
    ),
    Fault(
        "callers_of_known_layers_are_not_looked_up",
        CONNECTION,
        "self._admit()\n            except KvplaneError:\n                return known",
        "pass\n            except KvplaneError:\n                return known",
        KNOWN,
        "since_the_plan",
    ),
    Fault(
        "callers_are_looked_up_before_the_wait",
        CONNECTION,
        "if not known.look(epoll, waits=waits):\n                return None\n"
        "            try:\n                self._admit()\n",
        "try:\n                self._admit()\n"
        "                if not known.look(epoll, waits=waits):\n                    return None\n",
        KNOWN,
        "is_removed_while",
    ),
    Fault(
        "the_executor_is_held_while_looking",
        KNOWN_LAYERS,
        "return self._native.look(epoll, waits)",
        "with self._expectations._lock:\n            return self._native.look(epoll, waits)",
        KNOWN,
        "executor_is_free",
    ),
    Fault(
        "the_executor_is_held_until_the_next_packet",
        KNOWN_LAYERS,
        "serve = partial(native.serve, epoll, waits)",
        "serve = lambda: native.serve(epoll, waits) or native.look(epoll, waits)",
        KNOWN,
        "executor_is_free",
    ),
    Fault(
        "what_was_not_bound_never_is",
        KNOWN_LAYERS,
        "if self._bound is None and self._calls:",
        "if self._bound is None and self.__dict__.setdefault('tried', self._plan) == self._plan:",
        KNOWN,
        "bound_for_the_next",
    ),
    Fault(
        "bugs_end_the_thread",
        CONNECTION,
        'raise ConnectionError("internal error") from error',
        "raise",
        KNOWN,
        "a_bug_ends",
    ),
    Fault(
        "outputs_stay_in_the_region",
        "kvplane/runtime/region_layers.py",
        "return output if was_moved else output.copy_(known.output)",
        "return output",
        KNOWN,
        "same_bits",
    ),
    Fault(
        "plans_begun_are_not_checked",
        "kvplane/execution/shard_execution.py",
        "if num_tokens != wanted:",
        "if False:",
        "tests/rpc/test_sdk_execution.py",
    ),
    *(
        Fault(name, SERVED, old, new, CpuModule((SERVED_LAYERS,), test))
        for name, old, new, test in (
            (
                "waits_are_impatient",
                "    if (waits) {\n      find(epoll);",
                "    if (false) {\n      find(epoll);",
                "a_packet_ends",
            ),
            (
                "waits_are_deaf_to_all_but_packets",
                "while (!receive() && !others_wait(epoll)) {\n      pollfd ready = {epoll,",
                "while (!receive()) {\n      pollfd ready = {socket_.fd(),",
                "what_else_is_ready",
            ),
            (
                "layers_run_for_as_long_as_there_are_packets",
                "const double end_s = now_s() + most_s_;",
                "const double end_s = now_s() + 3600.0;",
                "a_while_at_a_time",
            ),
        )
    ),
)
