"""The benchmark of a step runs, and tells whether a captured step has the right bits."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.gpu import step
from data_plane.plans.batches.fixed_rows import FixedRows

WORDS = ("--batch", "2", "--context", "70", "--layers", "2", "--steps", "1")
SIZES = argparse.Namespace(batch=2, context=20, layers=1, steps=1)
CPU = torch.device("cpu")


def test_the_hosts_time_of_a_layer_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(WORDS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 decodes after 70, 2 layers" in lines[0]
    names = ("Executor.layer", "FixedStep.layer", "FixedStep.run")
    assert [line.split()[0] for line in lines[1:]] == [*names]
    assert all(float(line.split()[1]) > 0 for line in lines[1:])


def test_a_step_with_other_bits_than_by_layers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step.compare(SIZES, CPU)
    load = FixedRows.load

    def short_of_a_token(rows: FixedRows, batch: object) -> None:
        load(rows, batch)  # type: ignore[arg-type]
        lens = rows._packed[-SIZES.batch :]
        lens[lens > 0] -= 1

    monkeypatch.setattr(FixedRows, "load", short_of_a_token)
    assert not step.compare(SIZES, CPU)
