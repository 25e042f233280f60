"""What an observer of the traffic is told of a step's operations."""

from __future__ import annotations

from kvplane_blocks import prompt_hashes
from planning_rig import BLOCK_SIZE, PlanningRig

from control_plane.planning.steps.planner import Planner, read_operations
from control_plane.planning.traffic import observed, session_ends
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb

PROMPT = list(range(2 * BLOCK_SIZE + 3))


class Observer:
    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def admitted(self, session_id: int, sequence_id: int, num_tokens: int, hashes: bytes) -> None:
        self.told.append((session_id, sequence_id, num_tokens, hashes))

    def freed(self, session_id: int, sequence_id: int, num_tokens: int) -> None:
        self.told.append((session_id, sequence_id, num_tokens))


def run(
    rig: PlanningRig, observer: Observer, *operations: cpb.Operation
) -> list[tuple[object, ...]]:
    """What it is told of these operations of one step."""
    session = rig.session
    session.numbers.use()
    session.native.begin(session.slot, session.numbers.last)
    planner = Planner(rig.sharing.members[session.id], rig.sharing)
    step = observed(observer, session, planner.run)
    observer.told = []
    for i, operation in enumerate(read_operations(operations, 1000)):
        step(i, operation, cpb.OperationResult())
    return observer.told


def test_admissions_are_told_with_hashes_of_full_blocks_and_frees_with_lengths() -> None:
    rig, observer = PlanningRig(), Observer()
    tokens = ops.pack_tokens(PROMPT)
    hashes = prompt_hashes(rig.session.root, tokens, BLOCK_SIZE)
    assert len(hashes) == 2 * 16
    append = ops.append(1, [5, 6], 2, first_position=len(PROMPT))
    assert run(rig, observer, ops.admit(1, PROMPT)) == [(1, 1, len(PROMPT), hashes)]
    assert run(rig, observer, append) == []
    assert run(rig, observer, ops.free([1])) == [(1, 1, len(PROMPT) + 2)]


def test_what_is_refused_is_not_told() -> None:
    rig, observer = PlanningRig(num_device_blocks=4), Observer()
    run(rig, observer, ops.admit(1, PROMPT))
    again, other = ops.admit(1, PROMPT), ops.admit(2, PROMPT[::-1])
    ragged = cpb.Operation(free=cpb.Free(sequence_ids=b"1234567890"))
    assert not run(rig, observer, again, other, ops.free([7]), ops.free([-1]), ragged)


def test_a_sequence_that_is_named_twice_is_freed_once() -> None:
    rig, observer = PlanningRig(), Observer()
    run(rig, observer, ops.admit(1, PROMPT), ops.admit(2, [1]))
    assert run(rig, observer, ops.free([2, 1, 2])) == [(1, 2, 1), (1, 1, len(PROMPT))]


def test_the_end_of_a_session_frees_its_sequences() -> None:
    rig, observer = PlanningRig(), Observer()
    run(rig, observer, ops.admit(1, PROMPT), ops.admit(2, [1]))
    observer.told = []
    session_ends(observer, rig.session)
    assert sorted(observer.told) == [(1, 1, len(PROMPT)), (1, 2, 1)]


def test_an_admission_that_is_granted_later_is_told_and_a_sequence_that_is_cut() -> None:
    rig, observer = PlanningRig(num_device_blocks=4), Observer()
    rig.sharing._observer = observer
    other = rig.open(2)
    rig.admit(1, PROMPT)
    tokens = [7] * (2 * BLOCK_SIZE)
    (later,), _ = rig.step(ops.admit(5, tokens, wait=True), session=other)
    assert later.failures
    assert not observer.told
    rig.step(ops.free([1]))
    rig.run()
    rig.sharing.serve()
    hashes = prompt_hashes(other.root, ops.pack_tokens(tokens), BLOCK_SIZE)
    assert observer.told == [(2, 5, len(tokens), hashes)]
    rig.step(ops.admit(2, PROMPT, wait=True))
    for second in range(13):
        rig.pool.set_time(float(second))
        rig.sharing.tick()
    assert observer.told[1] == (2, 5, len(tokens)), "it did nothing while the other waited"
