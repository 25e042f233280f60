"""The rules and alerts of deploy/prometheus/: checked by promtool, tested one by one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.server.metrics import DECLARATIONS as OF_CONTROL
from data_plane.server.metrics import DECLARATIONS as OF_DATA
from engine.serving.metrics import DECLARATIONS as OF_ENGINE
from kvplane.integrations.router.metrics import DECLARATIONS as OF_ROUTER
from kvplane.serving.observability.metrics import SHARED
from tests.e2e.test_boards import panels
from tests.helpers.tools import needs

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "deploy" / "prometheus"
FILES = ("rules.yml", "alerts.yml")
JOBS = {"kvplane_", "kvplane_control_plane", "kvplane_data_plane"}
# Labels that Prometheus, a data plane or a histogram adds to those declared.
EVERYWHERE = ("instance", "job", "le", "pool")


def load(name: str) -> Any:
    return yaml.safe_load((RULES / name).read_text())


ALERTS = [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    needs("promtool")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=240)


def test_promtool_accepts_the_settings_and_the_rules() -> None:
    run = promtool("check", "config", str(RULES / "prometheus.yml"))
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_fires_and_clears_in_its_own_test() -> None:
    run = promtool("test", "rules", str(RULES / "alerts_test.yml"))
    assert run.returncode == 0, run.stdout + run.stderr
    tested = set()
    for test in load("alerts_test.yml")["tests"]:
        cases = test["alert_rule_test"]
        for name in {case["alertname"] for case in cases}:
            fires = ["exp_alerts" in case for case in cases if case["alertname"] == name]
            assert fires == [False, True, False], f"{name} must be silent, fire and clear"
            tested.add(name)
    assert tested == {*NAMES}


@pytest.mark.nightly  # promtool once for each part of each alert
def test_the_tests_find_each_part_of_an_alert_that_never_fires(tmp_path: Path) -> None:
    """Of an expression with "or", the first part or the second."""
    for path in RULES.glob("*.yml"):
        shutil.copy(path, tmp_path)
    for part in (0, -1):
        rules = load("alerts.yml")
        for group in rules["groups"]:
            for rule in group["rules"]:
                parts = rule["expr"].split("\n  or ")
                parts[part] = "vector(0) > 1"
                rule["expr"] = " or ".join(parts)
        (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
        run = promtool("test", "rules", str(tmp_path / "alerts_test.yml"))
        assert run.returncode != 0
        silent = run.stdout + run.stderr
        assert [name for name in NAMES if f"alertname: {name}," not in silent] == []


def test_expressions_select_metrics_and_labels_that_the_planes_declare() -> None:
    """The series of alerts_test.yml are written by hand, so they would not show a wrong name."""
    declarations = (*SHARED, *OF_CONTROL, *OF_DATA, *OF_ENGINE, *OF_ROUTER)
    declared = {each.name: {*each.labels, *EVERYWHERE} for each in declarations}
    rules = [rule for name in FILES for group in load(name)["groups"] for rule in group["rules"]]
    recorded = {rule.get("record") for rule in rules}
    shown = [target["expr"] for _, panel in panels() for target in panel["targets"]]
    selected = [
        each
        for expression in (*shown, *(rule["expr"] for rule in rules))
        for each in re.findall(r"([\w:]*kvplane_\w+[\w:]*)(?:{(.*?)})?", expression)
    ]
    for metric, labels in selected:
        name = re.sub("_(bucket|count|sum)$", "", metric)
        if metric not in recorded | JOBS:
            assert name in declared, metric
            assert {*re.findall(r"(\w+)=", labels)} <= declared[name], metric
    assert len(selected) > len(ALERTS)


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_names_its_place_in_the_runbook(rule: dict[str, Any]) -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert rule["alert"] in headings
    link = "{{ $externalLabels.kvplane_runbook }}#" + rule["alert"].lower()
    assert rule["annotations"]["runbook_url"] == link
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_runbook_that_links_lead_to_is_set_in_one_place() -> None:
    place = load("prometheus.yml")["global"]["external_labels"]["kvplane_runbook"]
    assert place.startswith("http://"), "a path would be no link in Alertmanager"
    uid = place.rpartition("/")[2]
    boards = (ROOT / "deploy" / "grafana" / "boards").glob("*.json")
    assert uid in {json.loads(path.read_text())["uid"] for path in boards}


def test_the_runbook_has_no_alert_that_is_gone() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert set(headings) == {*NAMES}
