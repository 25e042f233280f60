"""Writes the Grafana boards of deploy/grafana/boards/ from the panels in deploy/grafana/panels.yml,
and a board of the runbook's text, to which alerts link.

make boards
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BOARDS = ROOT / "deploy" / "grafana" / "boards"
PANELS = ROOT / "deploy" / "grafana" / "panels.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SIZES = {"stat": (6, 4), "timeseries": (8, 7), "text": (12, 9), "row": (24, 1)}
VARIABLES = {
    "pool": "label_values(kvplane_pool_ready, pool)",
    "instance": 'label_values(up{job=~"kvplane_.*"}, instance)',
    "tenant": "label_values(kvplane_tenant_items_total, tenant)",
}
Object = dict[str, Any]


def board(title: str, uid: str, panels: Iterable[Object]) -> Object:
    """Return a board in Grafana's JSON, with its panels placed from left to right."""
    placed = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        width, height = SIZES[panel["type"]]
        if x + width > 24 or height != row_height:
            x, y, row_height = 0, y + row_height, height
        place = {"x": x, "y": y, "w": width, "h": height}
        placed.append({"id": number, "gridPos": place, **panel})
        x += width
    firing = {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Kvplane.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
    }
    links = {"title": "Boards", "type": "dashboards", "tags": ["kvplane"], "keepTime": True}
    return {
        "title": title,
        "uid": uid,
        "tags": ["kvplane"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [links],
        "annotations": {"list": [firing]},
        "templating": {"list": variables()},
        "panels": placed,
    }


def variables() -> list[Object]:
    """Return the choices at the top of a board: the source of its data, and values of labels."""
    source = {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    return [source] + [
        {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": query,
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, query in VARIABLES.items()
    ]


def panel(of: Object) -> Object:
    """Return a panel in Grafana's JSON, without its place."""
    look = of["look"]
    defaults: Object = {"unit": look["unit"], "min": 0, "custom": {}}
    if look.get("stacked"):
        defaults["custom"] = {"fillOpacity": 30, "stacking": {"mode": "normal"}}
    if "colours" in look:
        steps = [{"color": colour, "value": value} for colour, value in look["colours"].items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"] |= {"thresholdsStyle": {"mode": "line"}}
    if "words" in look:
        words = {str(value): {"text": text} for value, text in look["words"].items()}
        defaults["mappings"] = [{"type": "value", "options": words}]
    return {
        "type": look.get("kind", "timeseries"),
        "title": of["title"],
        "description": of["description"],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(65 + n), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for n, (legend, expression) in enumerate(of["queries"].items())
        ],
    }


def chapters() -> Iterable[Object]:
    """Yield a panel of text for each chapter of the runbook, without links to other documents."""
    text = re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", RUNBOOK.read_text())
    for chapter in text.split("\n## ")[1:]:
        title, _, content = chapter.partition("\n")
        options = {"mode": "markdown", "content": content.strip()}
        yield {"type": "text", "title": title, "options": options}


def files() -> dict[str, str]:
    """Return names and texts of the boards' files."""
    made = [board("kvplane: runbook", "kvplane-runbook", chapters())]
    for each in yaml.safe_load(PANELS.read_text()):
        panels = []
        for row in each["rows"]:
            panels += [{"type": "row", "title": row["title"]}, *map(panel, row["panels"])]
        made.append(board(each["title"], each["uid"], panels))
    return {
        f"{each['uid'].removeprefix('kvplane-')}.json": json.dumps(each, indent=1) + "\n"
        for each in made
    }


if __name__ == "__main__":
    for name, text in files().items():
        (BOARDS / name).write_text(text)
