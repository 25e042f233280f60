"""Writes the Grafana boards of deploy/grafana/boards/ from the panels below.

make boards
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BOARDS = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "boards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
SIZES = {"stat": (6, 4), "timeseries": (8, 7)}
P = 'pool=~"$pool"'


class Panel(NamedTuple):
    """``unit``: Grafana's name of it. ``queries``: legend to expression."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    stacked: bool = False


def of_pool(metric: str) -> str:
    return f"{metric}{{{P}}}"


def total(metric: str, by: str, labels: str = P) -> str:
    return f"sum by ({by}) ({metric}{{{labels}}})"


def rate(metric: str, by: str) -> str:
    """Return the increase per second, summed."""
    return f"sum by ({by}) (rate({of_pool(metric)}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "", labels: str = P) -> str:
    """Return a quantile of a histogram."""
    groups = f"{by}, le" if by else "le"
    inner = f"sum by ({groups}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {inner})"


def both(metric: str, by: str = "", labels: str = P) -> dict[str, str]:
    """Return median and 99th percentile, by legend."""
    legend = f" {{{{{by}}}}}" if by else ""
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        f"{name}{legend}": quantile(share, metric, by, labels) for name, share in shares.items()
    }


# fmt: off
LOOKED_UP = f'({rate("kvplane_lookup_tokens_total", "pool")} > 0)'
OVERVIEW = (
    Panel("Planes up", "Planes that Prometheus can scrape.", "short",
          {"{{job}}": total("up", "job", 'job=~"kvplane_.*"')}, "stat"),
    Panel("Pool ready", "1 when sessions can be opened.", "short",
          {"{{pool}}": of_pool("kvplane_pool_ready")}, "stat"),
    Panel("Sessions", "Open sessions: one for each engine.", "short",
          {"{{pool}}": of_pool("kvplane_sessions")}, "stat"),
    Panel("Hit ratio", "Share of prompt tokens that were found cached.", "percentunit",
          {"{{pool}}": rate("kvplane_hit_tokens_total", "pool") + " / " + LOOKED_UP}, "stat"),
    Panel("Device blocks",
          "Held blocks are in use; cached ones hold prefixes and can be had at any time; retired "
          "ones wait for a receipt or a fence.", "short",
          {"{{state}}": total("kvplane_blocks", "state", f'{P}, tier="device"')}, stacked=True),
    Panel("Sequences", "Live sequences by tier, and admissions that wait in the queue.", "short",
          {"{{state}}": total("kvplane_sequences", "state")}, stacked=True),
    Panel("Prompt tokens",
          "Tokens looked up at admission, and those of them that were found, a second.", "short",
          {"looked up": rate("kvplane_lookup_tokens_total", "pool"),
           "found, {{tier}}": rate("kvplane_hit_tokens_total", "tier")}),
    Panel("Steps and plans", "Steps answered and plans run to their end, a second.", "ops",
          {"steps": "sum(rate(kvplane_step_duration_seconds_count[$__rate_interval]))",
           "plans run": rate("kvplane_plans_run_total", "pool")}),
    Panel("Step latency", "Time that a step takes inside the control plane.", "s",
          both("kvplane_step_duration_seconds", labels="")),
    Panel("Command latency, p99",
          "Time that the data plane takes for a command, waiting for the device included.", "s",
          {"{{command}}": quantile(0.99, "kvplane_command_duration_seconds", "command")}),
    Panel("Items not done",
          "Items of operations answered LATER, NEVER or FAILED, a second, by reason.", "ops",
          {"{{status}} {{reason}}": "sum by (status, reason) "
           "(rate(kvplane_refused_items_total[$__rate_interval]))"}),
    Panel("Bandwidth of kernels",
          "Bytes of keys and values that kernels moved, for each second that they ran.", "Bps",
          {"{{kernel}}": rate("kvplane_kernel_bytes_total", "kernel") + " / ("
           + rate("kvplane_kernel_seconds_total", "kernel") + " > 0)"}),
    Panel("Plans in flight", "Plans made and not yet receipted.", "short",
          {"{{pool}}": of_pool("kvplane_plans_in_flight")}),
    Panel("Lag of event loops, p99", "How late timers are: calls wait for as long.", "s",
          {"{{job}}": quantile(0.99, "kvplane_event_loop_lag_seconds", "job", "")}),
    Panel("Memory of the processes",
          "Resident memory; of a data plane, its pools are part of it.", "bytes",
          {"{{job}}": 'process_resident_memory_bytes{job=~"kvplane_.*"}'}),
    Panel("Processor time", "Cores in use.", "short",
          {"{{job}}": 'rate(process_cpu_seconds_total{job=~"kvplane_.*"}[$__rate_interval])'}),
)

CACHE = (
    Panel("Hit ratio by tier",
          "Share of prompt tokens found cached, by the tier that had them.", "percentunit",
          {"{{tier}}": rate("kvplane_hit_tokens_total", "pool, tier")
           + " / on (pool) group_left () " + LOOKED_UP},
          stacked=True),
    Panel("Read again after a cut",
          "Tokens looked up, and found, by sequences that were admitted again after they were "
          "cut, a second. They are part of the hit ratio.", "short",
          {"looked up": rate("kvplane_reread_lookup_tokens_total", "pool"),
           "found": rate("kvplane_reread_hit_tokens_total", "pool")}),
    Panel("Evictions",
          "Published blocks allocated for another use, a second, by tier and reason.", "ops",
          {"{{tier}} {{reason}}": rate("kvplane_evictions_total", "tier, reason")}),
    Panel("Life of a block", "From publication to eviction.", "s",
          both("kvplane_block_lifetime_seconds", "tier")),
    Panel("Idle before eviction",
          "From the last admission that found a block to its eviction. Below the reuse gap, "
          "blocks are evicted too early.", "s",
          both("kvplane_block_idle_before_eviction_seconds", "tier")),
    Panel("Reuse gap", "Between two admissions that found a block.", "s",
          both("kvplane_block_reuse_gap_seconds", "tier")),
    Panel("Host blocks", "Blocks of the host tier by use.", "short",
          {"{{state}}": total("kvplane_blocks", "state", f'{P}, tier="host"')}, stacked=True),
    Panel("Blocks moved between tiers",
          "Swaps of sequences, and cached prefixes demoted to the host tier, a second.", "ops",
          {"swapped {{direction}}": rate("kvplane_swapped_blocks_total", "direction"),
           "demoted": rate("kvplane_demoted_blocks_total", "pool")}),
    Panel("Bytes copied and swapped", "By direction, a second, on the data plane.", "Bps",
          {"{{direction}}": rate("kvplane_transferred_bytes_total", "direction")}),
    Panel("Publications and changes",
          "Blocks published, and changes of the prefix index that followers are sent, a second.",
          "ops",
          {"published": rate("kvplane_publications_total", "pool"),
           "changes": rate("kvplane_index_changes_total", "pool"),
           "forgotten": rate("kvplane_forgotten_blocks_total", "pool"),
           "copied for a writer": rate("kvplane_copies_on_write_total", "pool")}),
    Panel("Allocation latency, p99", "Time that an operation takes in the core.", "s",
          {"{{operation}}": quantile(0.99, "kvplane_allocation_duration_seconds", "operation")}),
    Panel("Wait for admission", "Time that granted admissions waited in the queue.", "s",
          both("kvplane_admission_wait_seconds")),
    Panel("Sequences cut",
          "Sequences whose blocks were given to others, a second, by reason.", "ops",
          {"{{reason}}": rate("kvplane_cut_sequences_total", "reason")}),
    Panel("Age of what waits",
          "The oldest plan without a receipt, the blocks that have been retired longest, and the "
          "last heartbeat.", "s",
          {"plan": of_pool("kvplane_oldest_plan_age_seconds"),
           "retired blocks": of_pool("kvplane_oldest_retired_age_seconds"),
           "heartbeat, shard {{shard}}": of_pool("kvplane_heartbeat_age_seconds")}),
    Panel("Blocks reclaimed",
          "Blocks in the tables of sessions when they ended, a second, by why they ended.", "ops",
          {"{{cause}}": rate("kvplane_reclaimed_blocks_total", "cause")}),
    Panel("Tokens of a plan", "Query tokens of plans that have some.", "short",
          both("kvplane_batch_tokens")),
    Panel("Sequences of a plan", "Sequences of plans that have some.", "short",
          both("kvplane_batch_sequences")),
    Panel("Kernels busy",
          "Seconds of kernels in a second, of the calls that are timed.", "percentunit",
          {"{{kernel}}": rate("kvplane_kernel_seconds_total", "kernel")}),
    Panel("Commands waiting",
          "Commands of gRPC calls that run or wait to run on the data plane.", "short",
          {"{{pool}}": of_pool("kvplane_command_queue_depth")}),
    Panel("Memory of the tiers", "Bytes of the pools.", "bytes",
          {"{{tier}}": total("kvplane_pool_bytes", "tier")}, stacked=True),
)
# fmt: on


def board(title: str, uid: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Return a board in Grafana's JSON."""
    placed = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        width, height = SIZES[panel.kind]
        if x + width > 24:
            x, y = 0, y + row_height
        place = {"x": x, "y": y, "w": width, "h": height}
        placed.append(_panel(number, panel, place))
        x, row_height = x + width, height
    variable = {
        "name": "pool",
        "label": "Pool",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(kvplane_pool_ready, pool)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": title,
        "uid": uid,
        "tags": ["kvplane"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": placed,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(65 + n), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for n, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def files() -> dict[str, str]:
    """Return names and texts of the boards' files."""
    boards = {
        "overview.json": board("kvplane: overview", "kvplane-overview", OVERVIEW),
        "cache.json": board("kvplane: prefix cache and memory", "kvplane-cache", CACHE),
    }
    return {name: json.dumps(each, indent=1) + "\n" for name, each in boards.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (BOARDS / name).write_text(text)
