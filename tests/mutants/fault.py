"""What a planted fault is, and where all of them are listed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLES: Final = Path(__file__).parent / "faults"
Machine = Callable[[Path], tuple[bool, str]]
"""Takes a tree; returns whether it fails there, as it must with a fault, and what it printed."""


@dataclass(frozen=True)
class Fault:
    """``file`` has ``old`` once; with ``new`` in its place, ``killed_by`` must fail.

    killed_by: ids of tests, with " + " between them, or a machine. only: an expression for -k.
    also: more places of the same fault, each a file, ``old`` and ``new``. timeout_s: of each test,
    for faults that make tests wait for ever.
    """

    name: str
    file: str
    old: str
    new: str
    killed_by: str | Machine
    only: str = ""
    also: tuple[tuple[str, str, str], ...] = ()
    timeout_s: int = 120

    @property
    def places(self) -> tuple[tuple[str, str, str], ...]:
        """All places of the fault."""
        return ((self.file, self.old, self.new), *self.also)


def planted(
    file: str, killed_by: str | Machine, texts: Mapping[str, tuple[str, str]], *, only: str = ""
) -> tuple[Fault, ...]:
    """Return faults of one file that the same tests must notice. ``texts``: by the fault's name,
    ``old`` and ``new``.
    """
    return tuple(Fault(name, file, old, new, killed_by, only) for name, (old, new) in texts.items())


def first(head: str, *lines: str) -> tuple[str, str]:
    """Return ``old`` and ``new`` that put lines before all else in a function. ``head``: the last
    line of its signature, with its indent.
    """
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    return f"{head}\n", "\n".join((head, *(indent + line for line in lines), ""))


# A push tries these, at least one for each invariant of docs/architecture.md but the first.
ON_PUSH: Final[dict[str, tuple[str, ...]]] = {
    "nobody writes a shared or published block": (
        "data/published_write_allowed",
        "late_layers/published_blocks_are_written, bound",
        "passes/a_layer_of_another_pass_runs",
    ),
    "publish after write": ("data/receipt_given_early",),
    "reuse after quiet": ("data/fenced_ordinals_forgotten", "planes/fence_forgotten, all orders"),
    "all or nothing": ("data_tables/refused_plans_not_undone",),
    "exact prefixes": ("conformance/namespaces_are_not_kept_apart",),
    "three answers": ("core/headroom_in_an_empty_pool",),
    "stale references are refused": (
        "data/verification_skipped",
        "data_tables/generation_unchecked",
        "planes/epoch_order_ignored",
        "planes/sessions_outlive_a_shard, all orders",
    ),
    "retry is safe": ("core/duplicates_run_again", "planes/repeats_not_recognised, all orders"),
    "soft state": ("withdrawals/the_last_blocks_are_left_out",),
    "one answer": ("kernels/bits_depend_on_the_batch",),
    "a lease is renewed by messages": ("core/leases_never_end",),
    "only whom it concerns": ("planes/tenants_not_cleared",),
    "who waits is served": ("admission/the_head_is_passed",),
}


def all_faults() -> dict[str, Fault]:
    """Return every fault by its area, which is the name of its table, and its name."""
    found: dict[str, Fault] = {}
    for table in sorted(TABLES.glob("*.py")):
        faults: tuple[Fault, ...] = importlib.import_module(
            f"tests.mutants.faults.{table.stem}"
        ).FAULTS
        for fault in faults:
            key = f"{table.stem}/{fault.name}"
            assert key not in found, f"two faults are called {key}"
            found[key] = fault
    return found
