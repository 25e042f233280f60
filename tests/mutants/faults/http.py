"""Faults of the HTTP servers' bounds, each of which an attack shows."""

from __future__ import annotations

from tests.mutants.fault import Fault

SERVER, REQUESTS = "kvplane/serving/http_server.py", "kvplane/serving/http_requests.py"
OPEN, BUDGET = (f"kvplane/serving/limits/{n}.py" for n in ("open_requests", "receive_budget"))
CLIENTS = "tests/attacks/test_http_clients.py"
ENGINES = "integrations/router/tests/test_router_engines.py"
BOUND = "limit_concurrency=most_connections(),"
CLOSED = f"{CLIENTS}::test_a_connection_that_says_no_more_is_answered_and_closed"
BODIES = f"{CLIENTS}::test_bodies_take_no_more_memory_than_is_set"
LISTS = f"{ENGINES}::test_a_list_of_models_is_read_in_time_and_in_bounds"

FAULTS = tuple(
    Fault(name, file, old, new, tests, timeout_s=20)
    for name, file, old, new, tests in (
        (
            "idle_connections_stay",
            SERVER,
            BOUND,
            f"timeout_keep_alive=3600, {BOUND}",
            f"{CLOSED}[idle_after_an_answer]",
        ),
        (
            "heads_have_any_length",
            SERVER,
            BOUND,
            f"h11_max_incomplete_event_size=1 << 40, {BOUND}",
            f"{CLOSED}[head_without_end]",
        ),
        (
            "bodies_are_waited_for",
            REQUESTS,
            "asyncio.get_running_loop().time() + BODY_S",
            "asyncio.get_running_loop().time() + 3600",
            f"{CLIENTS}::test_a_body_that_does_not_come_gives_its_place_up",
        ),
        (
            "any_number_of_connections_is_open",
            SERVER,
            BOUND,
            "",
            f"{CLIENTS}::test_connections_are_bounded",
        ),
        (
            "one_key_has_all",
            OPEN,
            "self._most_of_one = share_of_one(max_requests, num_clients)",
            "self._most_of_one = max_requests",
            f"{CLIENTS}::test_one_key_cannot_have_all_places",
        ),
        (
            "bodies_are_not_counted",
            BUDGET,
            "        if num_bytes:\n            self._budget.take(",
            "        if False:\n            self._budget.take(",
            BODIES,
        ),
        (
            "bodies_count_for_ever",
            BUDGET,
            "        if self._num_bytes:\n            self._budget.give_back(",
            "        if False:\n            self._budget.give_back(",
            BODIES,
        ),
        (
            "texts_wait_in_any_number",
            "integrations/router/prompts.py",
            "is_long = waiting and",
            "is_long = False and",
            f"{CLIENTS}::test_long_texts_do_not_keep_others_from_the_tokenizer",
        ),
        (
            "cookies_are_kept",
            "integrations/router/program.py",
            "DefaultCookiePolicy(allowed_domains=[])",
            "DefaultCookiePolicy()",
            f"{ENGINES}::test_a_cookie_of_one_client_is_not_shown_for_another",
        ),
        (
            "all_engines_are_tried",
            "integrations/router/proxy.py",
            "_MOST_BROKEN: Final = 2",
            "_MOST_BROKEN: Final = 100",
            f"{ENGINES}::test_a_request_that_breaks_engines_comes_to_two_and_no_more",
        ),
        (
            "lists_are_read_to_their_end",
            "integrations/router/engines.py",
            "_MAX_BYTES: Final = 1 << 20",
            "_MAX_BYTES: Final = 1 << 40",
            LISTS,
        ),
        (
            "lists_have_any_number",
            "integrations/router/engines.py",
            "_MAX_MODELS: Final = 1024",
            "_MAX_MODELS: Final = 1 << 40",
            LISTS,
        ),
    )
)
