"""The soak: its loads run one after another, and it says what each came to."""

from __future__ import annotations

import pytest

from benchmarks.engine import soak


@pytest.mark.nightly
def test_each_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "STEP_S", 0.1)
    phases = soak.run(40.0)
    assert [phase.num_sessions for phase in phases] == [40, 400, 40, 400, 40]
    assert min(phase.goodput_tokens_per_s for phase in phases) > 0
    assert phases[0].num_finished >= soak.NUM_NORMAL / 4
    rows = list(soak.table(phases))
    assert len(rows) == 2 + len(phases)
    assert rows[3].startswith("| overload | 400 |")
