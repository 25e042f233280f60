"""Tells whether a cache plug-in would find its pool, and whether it would pay: kvplane doctor."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Final

import click

from kvplane import ops
from kvplane.cli.group import POSITIVE, command, with_pool
from kvplane.cli.values import Context
from kvplane.clients.control_client import ControlClient
from kvplane.errors import CapacityError, KvplaneError
from kvplane.execution.execution import Execution, shards_of
from kvplane.prefixes import tokens_of
from kvplane.results import PoolInfo
from kvplane.session.session import Session

_NAMESPACE: Final = "kvplane doctor"
_TRIES: Final = 5
_MOST_BYTES: Final = 32 << 20
_MOST_PAGES: Final = 16


@command
@with_pool
@click.option("--bytes-per-token", type=POSITIVE, help="KV bytes of a token of the engine's model.")
@click.option("--prefill-tokens-per-s", type=POSITIVE, help="How fast the engine computes tokens.")
async def doctor(
    context: Context,
    pool: str,
    bytes_per_token: float | None,
    prefill_tokens_per_s: float | None,
) -> int:
    """Say whether an engine here would reach a pool of opaque pages, and how fast pages come back;
    exit code 0 if one can be used.
    """
    rows: list[dict[str, Any]] = []
    is_usable = False

    def found(what: str, state: str, said: object) -> None:
        rows.append({"what": what, "state": state, "said": said})

    async with context.client() as client:
        plane = await client.get_server_info()
        found(f"control plane {context.control_plane}", "ok", f"version {plane.version}")
        for pool_id in [pool] if pool else await client.list_pools():
            info = await client.get_pool(pool_id)
            found(f"pool {pool_id}", "ok" if info.ready else "not ready", _described(info))
            if not info.ready or not info.layout.is_opaque:
                continue
            try:
                bytes_per_s, way = await _speed(client, pool_id, info)
            except (KvplaneError, OSError) as error:
                found("data plane", "failed", str(error))
                continue
            is_usable = True
            settings: dict[str, Any] = {"control_plane": context.control_plane, "pool_id": pool_id}
            rate = f"{bytes_per_s / 1e9:.2f} GB/s {way}"
            if bytes_per_token is not None:
                loaded = bytes_per_s / bytes_per_token
                rate += f", {loaded:,.0f} tokens/s"
                if prefill_tokens_per_s is not None:
                    pays = loaded > prefill_tokens_per_s
                    settings["break_even_bytes_per_s"] = bytes_per_token * prefill_tokens_per_s
                    rate += f", {loaded / prefill_tokens_per_s:.1f} times computing them"
                    found(
                        "a load pays", "yes" if pays else "no", f"above {prefill_tokens_per_s:,.0f}"
                    )
            found("data plane", "ok", rate)
            found("settings of a plug-in", "ok", json.dumps(settings))
    context.show(rows)
    return 0 if is_usable else 1


def _described(info: PoolInfo) -> str:
    layout = info.layout
    (group, *_) = layout.groups
    if layout.is_opaque:
        return f"opaque pages of {group.page_bytes:,} bytes, model_id {layout.model_id}"
    return f"keys and values of {layout.model_id}: not for plug-ins (--opaque-page-bytes)"


async def _speed(client: ControlClient, pool_id: str, info: PoolInfo) -> tuple[float, str]:
    """Store some pages in a namespace of their own, load them several times and forget them. Return
    how fast they came back, in bytes a second, and by which way.
    """
    page_bytes = info.layout.groups[0].page_bytes
    async with (
        client.open_session(pool_id, info.layout, "doctor", namespace=_NAMESPACE) as session,
        session.open_execution() as execution,
    ):
        num_pages = max(1, min(_MOST_PAGES, _MOST_BYTES // page_bytes))
        prompts = [ops.pack_tokens(tokens_of(secrets.token_bytes(16))) for _ in range(num_pages)]
        prompts = await _store(session, execution, prompts, page_bytes)
        rooms = [memoryview(bytearray(page_bytes)) for _ in prompts]
        taken_s = []
        try:
            for i in range(1, _TRIES + 1):
                began_s = time.perf_counter()
                step = await session.step(
                    [ops.pin([100 * i + k for k in range(len(prompts))], prompts)]
                )
                await execution.read_pages(step.results[0].pinned, rooms)
                taken_s.append(time.perf_counter() - began_s)
        finally:
            for prompt in prompts:
                await client.forget_prefixes(pool_id, prompt, namespace=_NAMESPACE, force=True)
        is_shared = shards_of(execution)[0].local is not None
    way = "through shared memory" if is_shared else "over gRPC"
    return page_bytes * len(prompts) / min(taken_s), way


async def _store(
    session: Session, execution: Execution, prompts: list[bytes], page_bytes: int
) -> list[bytes]:
    """Store a page for each prompt that there is room for; return these. Raises PoolFullError."""
    ids = range(1, len(prompts) + 1)
    step = await session.step(
        [ops.admit(i, each, ends_with_plan=True) for i, each in zip(ids, prompts, strict=True)]
    )
    done = [i for i in ids if not step.results[i - 1].failures]
    if not done or step.plan is None:
        step.raise_for_status()
        raise CapacityError("the pool has no room for a page")
    await execution.write_pages(step.plan, done, [bytes(page_bytes)] * len(done))
    await session.submit_receipts()
    return [prompts[i - 1] for i in done]
