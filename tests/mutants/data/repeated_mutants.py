"""Faults of layers that are called step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data_plane.execution import repeated_layers
from data_plane.plans import progress, sessions, write_checks


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def repeated_layers_take_any_tensors() -> None:
    """Tensors are not compared with those that were checked."""
    known: Any = repeated_layers._Known
    repeated_layers._Known = lambda _, *rest: known(_Any(), *rest)  # type: ignore[assignment,misc]


def repeated_layers_take_any_options() -> None:
    """Options are not compared with those that were checked."""
    known: Any = repeated_layers._Known

    def of_any(signature: Any, _: Any, *rest: Any) -> Any:
        return known(signature, _Any(), *rest)

    repeated_layers._Known = of_any  # type: ignore[assignment,misc]


def repeated_layers_of_ended_sessions() -> None:
    """They write for a session that has ended."""
    sessions._end = lambda session: None


def repeated_layers_write_what_was_published() -> None:
    """What others have changed since the plan began is not looked at."""
    write_checks.WriteChecks.is_unchanged = lambda self, run: True  # type: ignore[method-assign]


def repeated_layers_come_in_any_order() -> None:
    """They are written though one before them was not, and again."""
    progress.Progress.comes_next = lambda self, layer: True  # type: ignore[method-assign]


def repeated_layers_are_counted_whole_plans_at_a_time() -> None:
    """Those of a plan that ends within are not counted."""
    count = repeated_layers.RepeatedLayers.count

    def of_whole(self: Any) -> None:
        if len(self._ran) < len(self._indices):
            self._ran.clear()
        count(self)

    repeated_layers.RepeatedLayers.count = of_whole  # type: ignore[method-assign]


def repeated_layers_keep_their_batch() -> None:
    """They go on with the pass that was begun first."""
    begin = repeated_layers.RepeatedLayers.begin

    def first(self: Any, *named: Any, **by_name: Any) -> None:
        before = self._begun
        begin(self, *named, **by_name)
        if before is not None:
            self._begun.batches = before.batches

    repeated_layers.RepeatedLayers.begin = first  # type: ignore[method-assign]


REPEATED_MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        repeated_layers_take_any_tensors,
        repeated_layers_take_any_options,
        repeated_layers_of_ended_sessions,
        repeated_layers_write_what_was_published,
        repeated_layers_come_in_any_order,
        repeated_layers_are_counted_whole_plans_at_a_time,
        repeated_layers_keep_their_batch,
    )
}
