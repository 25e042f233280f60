"""Random operations of one item, most of them possible, for each row of ``OPERATIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from kvplane import ops
from kvplane.results import SequenceState
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_LAST_ID: Final = 7


@dataclass(frozen=True)
class Known:
    """A session's live sequences by id, the ids that wait to be admitted, and those that were cut.
    ``most_tokens``: those of the whole device tier.
    """

    live: Mapping[int, SequenceState]
    waiting: Sequence[int]
    cut: Sequence[int]
    most_tokens: int


def operation_of(name: str, rng: Random, known: Known) -> cpb.Operation:
    """Return an operation of this name; sometimes a column of it has a byte too many."""
    operation = _MAKERS[name](rng, known)
    if rng.random() < 0.03:
        message = getattr(operation, name)
        columns = [f.name for f, value in message.ListFields() if isinstance(value, bytes)]
        if columns:
            column = rng.choice(columns)
            setattr(message, column, getattr(message, column) + b"\0")
    return operation


def deferred_of(states: Sequence[SequenceState]) -> cpb.DeferredTokens:
    """Return the tokens of all positions that were scheduled without them."""
    late = [state for state in states if state.num_tokens < state.num_scheduled_tokens]
    tokens = [tokens_written(state) for state in late]
    return ops.deferred_tokens(
        [state.sequence_id for state in late],
        [state.admitted_by for state in late],
        [state.num_tokens for state in late],
        [len(each) for each in tokens],
        [token for each in tokens for token in each],
    )


def tokens_written(state: SequenceState) -> list[int]:
    """Return the tokens of slots that were scheduled without them: alike for all forks, because
    they may share the slots.
    """
    return [at % 2 for at in range(state.num_tokens, state.num_scheduled_tokens)]


def _rarely(rng: Random, wrong: Any, usual: Any) -> Any:
    return wrong if rng.random() < 0.04 else usual


def _live_id(rng: Random, known: Known) -> int:
    """Return the id of a live sequence; sometimes another."""
    others = [*known.waiting, *known.cut, rng.randint(1, _LAST_ID), rng.choice((0, -1, 99))]
    if not known.live or rng.random() < 0.12:
        return rng.choice(others)
    return rng.choice(list(known.live))


def _new_id(rng: Random, known: Known) -> int:
    """Return an id that is not live; sometimes another."""
    unused = [i for i in range(1, _LAST_ID + 1) if i not in known.live]
    if not unused or rng.random() < 0.08:
        return rng.choice([*known.live, *known.waiting, 0])
    return rng.choice([*unused, *known.waiting, *known.waiting])


def _prompt(rng: Random, known: Known) -> list[int]:
    """Return a prompt that shares its beginning with half of the others."""
    num = rng.choice((1, 7, 8, 9, 16, 17, 24, 24, 33, 33, 48))
    if rng.random() < 0.06:
        num = known.most_tokens + rng.choice((-8, 0, 1))
    tokens = [rng.randrange(2)] * num + rng.choice(([], [], [2], [3, 2]))
    if rng.random() < 0.02:
        tokens[rng.randrange(len(tokens))] = -1
    return tokens[: rng.choice((0, 99))] if rng.random() < 0.02 else tokens


def _admit(rng: Random, known: Known) -> cpb.Operation:
    return ops.admit(
        _new_id(rng, known),
        _prompt(rng, known),
        num_compute_tokens=_rarely(rng, -1, rng.choice((None, None, None, 0, 8, 11))),
        max_total_tokens=_rarely(rng, rng.choice((-1, known.most_tokens + 1)), rng.choice((0, 48))),
        skip_prefix_lookup=rng.random() < 0.1,
        fork_sequence_ids=[_new_id(rng, known) for _ in range(rng.choice((0, 0, 0, 1, 2)))],
        wait=rng.random() < 0.5,
    )


def _append(rng: Random, known: Known) -> cpb.Operation:
    sequence_id = _live_id(rng, known)
    state = known.live.get(sequence_id)
    first = state.num_scheduled_tokens if state is not None else 0
    num_slots = _rarely(rng, known.most_tokens, rng.choice((0, 1, 1, 1, 2, 8, 10, 24)))
    written = tokens_written(state) if state is not None else []
    tokens = written + [rng.randrange(2) for _ in range(num_slots)]
    tokens = tokens[: rng.choice((0, len(written), len(tokens)))]
    if rng.random() < 0.05:
        first, num_slots = first + rng.choice((-1, 0, 1)), num_slots * rng.choice((1, -1))
    if tokens and rng.random() < 0.03:
        tokens[-1] = -5
    return ops.append(
        sequence_id,
        tokens,
        num_slots,
        first_positions=first,
        num_tokens=_rarely(rng, rng.choice((-1, len(tokens) + 1)), None),
        num_lookahead_slots=_rarely(rng, -1, rng.choice((0, 0, 0, 0, 3, 9, 30))),
    )


def _fork(rng: Random, known: Known) -> cpb.Operation:
    return ops.fork(_live_id(rng, known), _new_id(rng, known))


def _free(rng: Random, known: Known) -> cpb.Operation:
    return ops.free(_live_id(rng, known))


def _truncate(rng: Random, known: Known) -> cpb.Operation:
    sequence_id = _live_id(rng, known)
    state = known.live.get(sequence_id)
    most = max(state.num_tokens, state.num_scheduled_tokens) if state is not None else 9
    return ops.truncate(sequence_id, most - rng.choice((-1, 0, 1, 3, 9, most)))


def _ids_of(rng: Random, known: Known, tier: int) -> list[int]:
    """Return ids of sequences of a tier, most of the time."""
    of_tier = [i for i, state in known.live.items() if state.tier == tier]
    if not of_tier or rng.random() < 0.1:
        return [_live_id(rng, known) for _ in range(rng.randint(0, 2))]
    ids = rng.sample(of_tier, rng.randint(1, min(2, len(of_tier))))
    return ids + ids[:1] if rng.random() < 0.05 else ids


def _swap(rng: Random, known: Known) -> cpb.Operation:
    if rng.random() < 0.5:
        return ops.swap(_ids_of(rng, known, tpb.TIER_DEVICE), "host")
    return ops.swap(_ids_of(rng, known, tpb.TIER_HOST), "device")


_MAKERS: Final[dict[str, Callable[[Random, Known], cpb.Operation]]] = {
    "admit": _admit,
    "append": _append,
    "fork": _fork,
    "free": _free,
    "truncate": _truncate,
    "swap": _swap,
}
