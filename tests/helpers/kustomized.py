"""Builds a folder of deploy/kubernetes as kustomize does, as far as these folders use kustomize.

Names get no suffix and objects no namespace; test_kubernetes_schemas.py compares the rest with
kubectl's.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


def objects(folder: Path) -> list[Object]:
    """Return the objects that ``kubectl apply -k folder`` would send, in no particular order."""
    made: list[Object] = []
    _accumulate(made, folder)
    return made


def _accumulate(made: list[Object], folder: Path) -> None:
    """Add a kustomization's objects to those made before it, which a component may change."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in spec.get("resources", []):
        if (folder / name).is_dir():
            made.extend(objects(folder / name))
        else:
            made.extend(copy.deepcopy([*yaml.safe_load_all((folder / name).read_text())]))
    for generated in spec.get("configMapGenerator", []):
        data = {Path(name).name: (folder / name).read_text() for name in generated["files"]}
        metadata = {"name": generated["name"], **generated.get("options", {})}
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in spec.get("components", []):
        _accumulate(made, folder / name)
    for patch in spec.get("patches", []):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        _patch(made, yaml.safe_load(text), patch.get("target"))
    tags = {image["name"]: image["newTag"] for image in spec.get("images", [])}
    for each in made:
        _tag(each, tags)


def _patch(made: list[Object], patch: Any, target: Object | None) -> None:
    """Apply a patch; one with a target may have nothing to change. Raises ValueError when another
    changes nothing, KeyError for a missing path.
    """
    may_miss = target is not None
    if target is None:
        target = {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    found = [
        each
        for each in made
        if re.fullmatch(target["kind"], each["kind"])
        and re.fullmatch(target["name"], each["metadata"]["name"])
    ]
    if not found and not may_miss:
        raise ValueError(f"no object is a {target}")
    for each in found:
        if isinstance(patch, list):
            for operation in patch:
                _apply(each, operation)
        elif patch["$patch"] == "delete":
            made.remove(each)


def _apply(changed: Any, operation: Object) -> None:
    """Apply one operation of a JSON patch: add or replace."""
    *path, last = operation["path"].strip("/").replace("~1", "/").split("/")
    for part in path:
        changed = changed[int(part) if isinstance(changed, list) else part]
    value = copy.deepcopy(operation["value"])
    if isinstance(changed, list):
        if operation["op"] == "add":
            changed.insert(len(changed) if last == "-" else int(last), value)
        else:
            changed[int(last)] = value
    elif operation["op"] == "replace" and last not in changed:
        raise KeyError(operation["path"])
    else:
        changed[last] = value


def _tag(part: Any, tags: dict[str, str]) -> None:
    """Give images their tags, wherever containers are."""
    if isinstance(part, dict):
        for container in part.get("containers") or ():
            if container.get("image") in tags:
                container["image"] += f":{tags[container['image']]}"
    for each in part.values() if isinstance(part, dict) else part:
        if isinstance(each, dict | list):
            _tag(each, tags)
