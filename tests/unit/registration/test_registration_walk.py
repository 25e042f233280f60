"""Shards and control planes that come, break off, restart and come back in any order: whatever a
pool finds after a rebuild is held by every shard, and no generation is given twice.
"""

from __future__ import annotations

import itertools
from collections import deque
from random import Random

import pytest

from control_plane.pools.pool import Pool
from kvplane.errors import InvalidRequestError, StaleEpochError, StaleIncarnationError
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.pool_writer import generations
from tests.helpers.planning.registration_messages import (
    LAYOUT,
    Prefix,
    blocks,
    half,
    publications,
)
from tests.helpers.planning.registration_world import Plane, World

NUM_SHARDS, NUM_BLOCKS = 2, 6


class Process(Plane):
    """A data plane's run: what it holds, and what is on its way to it."""

    def __init__(self, world: World, index: int, epoch: int) -> None:
        shard = half(index, NUM_SHARDS)
        super().__init__(world, shard=shard, epoch=epoch, num_device_blocks=NUM_BLOCKS)
        self.inbox: deque[rpb.RegisterResponse] = deque()
        self.connected = False
        self.generations: dict[int, int] = {}
        self.published: dict[int, Prefix] = {}

    def break_off(self) -> None:
        self.connected = False
        self.inbox.clear()

    def held(self) -> rpb.BlockReport:
        held = [p for p in self.published.values() if self.generations[p.block[0]] == p.block[1]]
        return rpb.BlockReport(
            blocks=[blocks(self.generations)], publications=[publications(held)], last=True
        )

    def publish(self, told: plan_pb2.Publications) -> None:
        size = LAYOUT.block_size_tokens * 4
        rows = zip(
            columns.read(INT32, told.indices, "indices"),
            columns.read(INT64, told.generations, "generations"),
            columns.read(INT32, told.parent_indices, "parents"),
            columns.read(INT64, told.parent_generations, "parents"),
            columns.fixed(told.hashes, 16),
            columns.fixed(told.token_ids, size),
            strict=True,
        )
        for index, generation, parent, parent_generation, hash_, tokens in rows:
            if self.generations.get(index) == generation:
                self.published[index] = Prefix(
                    (index, generation), (parent, parent_generation), hash_, tokens
                )


class Walk:
    """One control plane after another, and the processes that claim their pool's shards."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.epochs = itertools.count(1)
        self.world = World(0)
        self.num_rebuilds = self.num_restored = 0
        self.processes: dict[int, Process] = {}  # by epoch; those that were replaced go on
        for index in range(NUM_SHARDS):
            self.start_process(index)
        self.restart_control_plane()

    def restart_control_plane(self) -> None:
        self.world = World(self.world.incarnation + 1)
        for process in self.processes.values():
            process.world = self.world
            process.break_off()

    def start_process(self, index: int) -> None:
        epoch = next(self.epochs)
        self.processes[epoch] = Process(self.world, index, epoch)

    def registered(self) -> list[Process]:
        """By shard index."""
        return [self.processes[epoch] for epoch in self.world.pool.epochs]

    def connected(self) -> list[Process]:
        return [process for process in self.processes.values() if process.connected]

    def step(self) -> None:
        actions = [self.connect] * 9 + [self.deliver] * 18 + [self.work] * 9
        actions += [self.break_off, self.restart_process, self.end_all]
        if self.rng.random() < 0.04:
            actions = [self.restart_control_plane]
        was_built = self.is_built()
        self.rng.choice(actions)()
        for process in self.connected():
            process.inbox.extend(self.world.it.take_outgoing(*process.key[:2]))
            if self.rng.random() < 0.5:
                process.inbox.extend(self.world.it.take_missed(*process.key[:2]) or [])
        if self.is_built() and not was_built:
            self.check_rebuilt(self.world.pool)

    def is_built(self) -> bool:
        return bool(self.world.pools) and self.world.pool.built

    def connect(self) -> None:
        """Mostly the latest processes; now and then one that was replaced."""
        process = self.rng.choice([*self.processes.values()][-4:])
        index = process.hello.shard.index
        states = self.world.pool.shards.states if self.world.pools else {}
        known = states[index].hello.epoch if index in states else 0
        try:
            process.register()
        except StaleEpochError:
            assert known > process.hello.epoch
            return
        assert known <= process.hello.epoch
        for other in self.connected():
            if other.hello.shard.index == index:
                other.break_off()  # superseded
        process.connected = True
        if not process.welcome.resumed:
            process.report(process.held())

    def deliver(self) -> None:
        waiting = [process for process in self.connected() if process.inbox]
        if not waiting:
            return
        process = self.rng.choice(waiting)
        message = process.inbox.popleft()
        if message.HasField("fence"):
            done = rpb.FenceDone(session=message.fence.session)
            self.world.it.fence_done(*process.key, done)
        elif message.HasField("report_request"):
            process.report(process.held())
        else:
            process.publish(message.publish.publications)

    def work(self) -> None:
        """A session allocates a few blocks, all shards write them, and they are published."""
        world = self.world
        if not world.pools or not world.pool.ready:
            return
        pool = world.pool
        if not world.open_sessions():
            self.session = world.open_writer()
        num, first = self.rng.randint(1, 3), self.rng.randrange(3)
        if pool.native.num_obtainable(self.session.handle, tpb.TIER_DEVICE) < num:
            return
        placed = self.session.write(range(first, first + 8 * num))
        self.session.free()
        for process in self.registered():
            for block in placed:
                generation = generations(pool)[block]
                assert process.generations.get(block, 0) < generation, "given before"
                process.generations[block] = generation
                process.published.pop(block, None)
        pool.announce()

    def break_off(self) -> None:
        if processes := self.connected():
            process = self.rng.choice(processes)
            process.break_off()
            process.leave()

    def restart_process(self) -> None:
        """Another process of a shard starts while the old one may still be there."""
        self.start_process(self.rng.randrange(NUM_SHARDS))

    def end_all(self) -> None:
        if self.world.pools:
            self.world.sessions.end_all(self.world.pool)

    def check_rebuilt(self, pool: Pool) -> None:
        self.num_rebuilds += 1
        held, known = self.registered(), generations(pool)
        for process in held:
            for block, generation in process.generations.items():
                assert known[block] >= generation
        for run in pool.native.all_publications(1):
            (block,) = columns.read(INT32, run[1], "indices")
            self.num_restored += 1
            for process in held:
                assert process.published[block].block == (block, known[block])
                assert process.generations[block] == known[block]


def test_whatever_comes_and_goes_only_what_all_hold_is_found_again() -> None:
    num_rebuilds = num_restored = 0
    for seed in range(60):
        walk = Walk(seed)
        for _ in range(150):
            try:
                walk.step()
            except (StaleIncarnationError, InvalidRequestError) as error:
                pytest.fail(f"seed {seed}: {error}")
        num_rebuilds += walk.num_rebuilds
        num_restored += walk.num_restored
    assert num_rebuilds > 100
    assert num_restored > 100
