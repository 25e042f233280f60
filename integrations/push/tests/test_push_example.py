"""The example does what it says, on two pools of one control plane."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from two_pools import HERE, THERE, data_plane, settings_of

from kvplane.integrations.push.example import main
from tests.helpers.planes_in_process import control_plane, write_layout


@pytest.mark.parametrize("waits", [False, True])
async def test_what_is_prefilled_in_one_pool_is_read_bit_for_bit_in_the_other(
    waits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``waits``: the example begins before the other pool is there."""
    layout = write_layout(tmp_path)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane())

        async def start(pool_id: str) -> None:
            settings = settings_of(pool_id, server.address, layout)
            await stack.enter_async_context(data_plane(**settings))

        await start(HERE)
        if not waits:
            await start(THERE)
        prefilling = asyncio.create_task(main(server.address, HERE, THERE))
        if waits:
            await asyncio.sleep(0.5)
            await start(THERE)
        await prefilling
    printed = capsys.readouterr().out
    assert "the same there: True" in printed
    assert "cached in there: 24 tokens" in printed
