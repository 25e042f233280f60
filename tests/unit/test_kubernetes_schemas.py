"""Kubernetes' own schemas admit what deploy/kubernetes says, and kubectl makes the same of it.

LeaderWorkerSet and PodMonitor are not Kubernetes' own: FIELDS has those of leaderworkerset.x-k8s.io
and monitoring.coreos.com that deploy/kubernetes uses.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import yaml

from tests.helpers.kustomized import Object, objects

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VARIANTS = ("base", "fleet", "node", "serving")
MONITORS = FOLDER / "components" / "pod-monitors"
VERSIONS = ("1.30", "1.37")
PACKAGE = "kubernetes-validate==1.37.*"
TEXT = '".+"'
FIELDS = {
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "replicas": r"\d+",
        "leaderWorkerTemplate size": r"[1-9]\d*",
        "leaderWorkerTemplate restartPolicy":
            '"(Default|RecreateGroupOnPodRestart|RecreateGroupAfterStart|None)"',
    },
    "monitoring.coreos.com/v1 PodMonitor": {
        "jobLabel": TEXT,
        "selector matchLabels app.kubernetes.io/name": TEXT,
        "selector matchExpressions key": TEXT,
        "selector matchExpressions operator": '"(In|NotIn|Exists|DoesNotExist)"',
        "selector matchExpressions values": TEXT,
        "podMetricsEndpoints port": TEXT,
        "podMetricsEndpoints interval": r'"(\d+(ms|[smhdwy]))+"',
        "podMetricsEndpoints relabelings targetLabel": TEXT,
        "podMetricsEndpoints relabelings replacement": '".*"',
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def kubernetes_validate() -> Iterator[Any]:
    """Kept under build/, as no environment of this project has it."""
    folder = ROOT / "build" / "kubernetes"
    if not (folder / "kubernetes_validate").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, PACKAGE], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("kubernetes_validate")


def leaves(value: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Where each value is, and the value as JSON; an item of a list is where the list is."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, *path, key)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, *path)
    else:
        yield " ".join(path), json.dumps(value)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_schemas_admit_every_object(variant: str, kubernetes_validate: Any) -> None:
    for made in objects(FOLDER / variant):
        if made["kind"] == "LeaderWorkerSet":
            template = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            made = {"apiVersion": "v1", "kind": "Pod", **template}
        for version in VERSIONS:
            kubernetes_validate.validate(made, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_that_are_not_kubernetes_own_say_what_they_may(variant: str) -> None:
    monitors = yaml.safe_load_all((MONITORS / "pod-monitors.yaml").read_text())
    for made in (*objects(FOLDER / variant), *monitors):
        fields = FIELDS.get(f"{made['apiVersion']} {made['kind']}")
        if fields is None:
            assert made["kind"] not in ("LeaderWorkerSet", "PodMonitor")
            continue
        assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
        made["spec"].get("leaderWorkerTemplate", {}).pop("workerTemplate", None)
        for field, value in leaves(made["spec"]):
            assert field in fields
            assert re.fullmatch(fields[field], value), f"{field}: {value}"


def simple(made: list[Object]) -> list[str]:
    """In order, without what kubectl adds: a namespace, a label, and suffixes of names."""
    return sorted(json.dumps(_without_additions(each), sort_keys=True) for each in made)


def _without_additions(made: Any) -> Any:
    if isinstance(made, list):
        return [_without_additions(each) for each in made]
    if isinstance(made, str):
        return re.sub(r"^(layout|access|kvplane-\w+)-[a-z0-9]{10}$", r"\1", made)
    if not isinstance(made, dict):
        return made
    kept = {
        key: _without_additions(value)
        for key, value in made.items()
        if key not in ("namespace", "app.kubernetes.io/part-of")
    }
    return {key: value for key, value in kept.items() if (key, value) != ("labels", {})}


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubectl_makes_the_same_objects(variant: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / variant)]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SkipTest("needs kubectl") from None
    assert simple(objects(FOLDER / variant)) == simple([*yaml.safe_load_all(done.stdout)])
