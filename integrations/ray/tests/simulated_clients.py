"""Clients of a fleet: they ask a router questions, several at a time, until they are stopped."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import openai

from models.recall_task import Question

NUM_CLIENTS: Final = 4
_JOIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``asked_s``: when it was asked, on the monotonic clock. ``num_cached_tokens``: of
    its prompt, known to the router as cached in the ``pool`` of the engine that answered.
    """

    pool: str
    asked_s: float
    num_cached_tokens: int
    is_expected: bool


class Clients:
    """``with Clients(url, model, asked, expected) as clients``. ``url``: of the router. The
    questions are asked in turn, again and again; ``expected``: the right answer to each prompt.
    """

    def __init__(
        self, url: str, model: str, asked: Sequence[Question], expected: Mapping[str, str]
    ) -> None:
        self._url = url
        self._model = model
        self._asked = itertools.cycle(asked)
        self._expected = expected
        self._changed = threading.Condition()
        self._is_stopping = False
        self._error: Exception | None = None
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.daemon = True  # one that still waits does not hold up the end of the program
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_stopping = True
        for thread in self._threads:
            thread.join(_JOIN_S)

    def num_answers(self, pool: str, asked_since_s: float) -> int:
        """Return the number of answers to questions asked since then, by the engine of a pool."""
        return sum(each.pool == pool and each.asked_s >= asked_since_s for each in self.answers)

    def wait_for(self, num: int, pool: str, asked_since_s: float, timeout_s: float) -> None:
        """Wait until a pool's engine has answered so many questions asked since then. Raises the
        error that ended a client, or TimeoutError.
        """
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: self._error is not None or self.num_answers(pool, asked_since_s) >= num,
                timeout_s,
            )
        if self._error is not None:
            raise self._error
        if not is_done:
            raise TimeoutError(f"the engine of {pool} has not answered for {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
                while not self._is_stopping:
                    with self._changed:
                        question = next(self._asked)
                    answer = self._ask(client, question)
                    with self._changed:
                        self.answers.append(answer)
                        self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _ask(self, client: openai.OpenAI, question: Question) -> Answer:
        asked_s = time.monotonic()
        stop: Any = list(question.params.stop)
        raw = client.completions.with_raw_response.create(
            model=self._model,
            prompt=question.prompt,
            max_tokens=question.params.max_tokens,
            temperature=0,
            stop=stop,
        )
        return Answer(
            raw.headers["x-kvplane-pool"],
            asked_s,
            int(raw.headers["x-kvplane-cached-tokens"]),
            raw.parse().choices[0].text == self._expected[question.prompt],
        )
