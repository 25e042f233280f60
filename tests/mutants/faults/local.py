"""The tests of local executions fail when a check is taken out of a copy of the tree."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.machines import CpuModule

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
        "self._admit()\n            if packet",
        "if packet",
        LAYERS,
        "another_kind",
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
        SERVER,
        "if receipt is None:",
        "if True:",
        LAYERS,
        "computed_and_counted",
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
        "data_plane/execution/plan_runner.py",
        "self.write_checks.check_may_write(session, run)",
        "pass",
        LAYERS,
        "since_the_plan",
    ),
    Fault(
        "plans_that_have_run_are_written_again",
        RUNNER,
        "if not may_write or any(",
        "if any(",
        LAYERS,
        "run_elsewhere",
    ),
    Fault(
        "layers_that_native_code_ran_are_not_noted",
        RUNNER,
        "run.progress.finish_layer(self._layers.index(each.layer))",
        "pass",
        LAYERS,
        "counted",
    ),
    Fault(
        "layers_that_native_code_ran_are_not_counted",
        RUNNER,
        "compute.count(each.bound, run, each.seconds)",
        "pass",
        LAYERS,
        "counted",
    ),
    Fault(
        "last_layers_are_answered_without_a_receipt",
        RUNNER,
        "layer_index(self._layers, named.layer), len(self._layers) - 1",
        "layer_index(self._layers, named.layer), len(self._layers)",
        LAYERS,
        "counted",
    ),
    Fault(
        "bindings_are_of_any_number",
        PACKETS,
        "if binding >= MAX_BINDINGS:",
        "if False:",
        LAYERS,
        "what_is_bound",
    ),
    Fault(
        "bindings_are_of_any_length",
        SERVER,
        "len(request) <= _MAX_BYTES,",
        "True,",
        "tests/attacks/test_shared_memory.py",
    ),
    Fault(
        "bindings_name_a_plan",
        SERVER,
        "if parsed.plan_number or",
        "if False and",
        LAYERS,
        "what_is_bound",
    ),
    Fault(
        "bindings_that_failed_leave_the_one_before",
        SERVER,
        "self._native.unbind(number)\n        self._bindings.pop(number, None)",
        "pass",
        LAYERS,
        "what_is_bound",
    ),
    Fault(
        "outputs_are_written_over_what_is_read",
        SERVER,
        "None if any(overlap(output, tensor) for tensor in (query, key, value)) else bound",
        "bound",
        LAYERS,
        "over_the_tensors",
    ),
    Fault(
        "callers_of_bound_layers_are_not_looked_up",
        CONNECTION,
        "self._admit()\n            except KvplaneError:\n                return layers",
        "pass\n            except KvplaneError:\n                return layers",
        LAYERS,
        "since_the_plan",
    ),
    Fault(
        "callers_are_looked_up_before_the_wait",
        CONNECTION,
        "if not layers.look(epoll, waits=waits):\n                return None\n"
        "            try:\n                self._admit()\n",
        "try:\n                self._admit()\n"
        "                if not layers.look(epoll, waits=waits):\n"
        "                    return None\n",
        LAYERS,
        "is_removed_while",
    ),
    Fault(
        "the_executor_is_held_while_looking",
        SERVER,
        "return self._native.look(epoll, waits)",
        "with self._executor._command.lock:\n            return self._native.look(epoll, waits)",
        LAYERS,
        "executor_is_free",
    ),
    Fault(
        "the_executor_is_held_until_the_next_packet",
        SERVER,
        "native.serve(epoll, waits)",
        "native.serve(epoll, waits) or native.look(epoll, waits)",
        LAYERS,
        "executor_is_free",
    ),
    Fault(
        "bugs_end_the_thread",
        CONNECTION,
        'raise ConnectionError("internal error") from error',
        "raise",
        LAYERS,
        "a_bug_ends",
    ),
    Fault(
        "outputs_stay_in_the_region",
        "kvplane/runtime/region_layers.py",
        "return output if was_moved else output.copy_(bound.output)",
        "return output",
        LAYERS,
        "same_bits",
    ),
    Fault(
        "plans_begun_are_not_checked",
        "kvplane/execution/shard_execution.py",
        "if num_tokens != wanted:",
        "if False:",
        "tests/rpc/sdk/test_sdk_execution.py",
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
