"""Checks deploy/kubernetes with no cluster: every object against Kubernetes' own schema, and that
scripts/kustomized.py makes what kubectl makes, where kubectl is installed.

    make manifests

LeaderWorkerSet and PodMonitor are not Kubernetes' own: scripts/custom_resources.py has schemas of
them, and the pods of a LeaderWorkerSet are checked as a Pod.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from scripts.custom_resources import SCHEMAS
from scripts.kustomized import Object, objects

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
VARIANTS = ("base", "fleet", "node")
VERSIONS = ("1.30", "1.37")


def main() -> int:
    faults = []
    for variant in VARIANTS:
        made = objects(FOLDER / variant)
        faults += [f"{variant}: {fault}" for each in made for fault in schema_faults(each)]
        print(f"{variant}: {len(made)} objects, Kubernetes {' and '.join(VERSIONS)}")
        if shutil.which("kubectl") is not None and simple(made) != simple(by_kubectl(variant)):
            faults.append(f"{variant}: kubectl makes other objects")
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


def schema_faults(made: Object) -> list[str]:
    """What is wrong with an object, as far as schemas say."""
    name = f"{made['kind']} {made['metadata']['name']}"
    if made["kind"] in SCHEMAS:
        validator = jsonschema.Draft202012Validator(SCHEMAS[made["kind"]])
        found = [
            f"{name}: {each.json_path}: {each.message}" for each in validator.iter_errors(made)
        ]
        if found or made["kind"] == "PodMonitor":
            return found
        template = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        made = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
    faults = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(made, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = "/".join(str(each) for each in error.path)
            faults.append(f"{name}: {path}: {error.message} (Kubernetes {version})")
    return faults


def by_kubectl(variant: str) -> list[Object]:
    command = ["kubectl", "kustomize", str(FOLDER / variant)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [*yaml.safe_load_all(done.stdout)]


def simple(made: list[Object]) -> list[str]:
    """In order, without what kubectl adds: a namespace, a label, and suffixes of names."""
    return sorted(json.dumps(_without_additions(each), sort_keys=True) for each in made)


def _without_additions(made: Any) -> Any:
    if isinstance(made, list):
        return [_without_additions(each) for each in made]
    if isinstance(made, str):
        return re.sub(r"^layout-[a-z0-9]{10}$", "layout", made)
    if not isinstance(made, dict):
        return made
    kept = {
        key: _without_additions(value)
        for key, value in made.items()
        if key not in ("namespace", "app.kubernetes.io/part-of")
    }
    return {key: value for key, value in kept.items() if (key, value) != ("labels", {})}


if __name__ == "__main__":
    sys.exit(main())
