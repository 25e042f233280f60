"""In which order texts are tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Event

from engine.serving.worker import CHARACTERS_PER_S, PromptReader


async def test_a_long_text_is_overtaken_for_as_long_as_it_takes() -> None:
    """By texts that come soon after it, and not by those that come later than it would be ready."""
    reader, may_read, order = PromptReader(), Event(), list[str]()

    def reading(name: str) -> Callable[[], Sequence[int]]:
        def read() -> Sequence[int]:
            may_read.wait(30)
            order.append(name)
            return []

        return read

    async def ask(name: str, num_characters: int) -> asyncio.Task[Sequence[int]]:
        task = asyncio.create_task(reader.read(reading(name), num_characters))
        await asyncio.sleep(0.01)
        return task

    asked = [await ask("first", 1)]
    asked.append(await ask("long", CHARACTERS_PER_S // 2))
    asked.append(await ask("soon", 1))
    await asyncio.sleep(0.6)
    asked.append(await ask("late", 1))
    may_read.set()
    await asyncio.gather(*asked)
    assert order == ["first", "soon", "long", "late"]
