"""What LeaderWorkerSets and PodMonitors may say, which are not Kubernetes' own kinds.

JSON schemas of the fields that leaderworkerset.x-k8s.io/v1 and monitoring.coreos.com/v1 define, as
far as deploy/kubernetes has use for them. A field that is not here is a fault. Pods are not looked
at: they are Kubernetes' own.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_ANYTHING: Final[Schema] = {}
_STRING: Final[Schema] = {"type": "string", "minLength": 1}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_COUNT_OR_SHARE: Final[Schema] = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
_DURATION: Final[Schema] = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": [*required],
        "properties": properties,
        "additionalProperties": False,
    }


def _one_of(*values: str) -> Schema:
    return {"enum": [*values]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(api_version: str, spec: Schema) -> Schema:
    said = {"apiVersion": {"const": api_version}, "kind": _STRING, "metadata": _ANYTHING}
    return _object((*said, "spec"), **said, spec=spec)


_SELECTOR: Final = _object(
    matchLabels={"type": "object", "additionalProperties": {"type": "string"}},
    matchExpressions=_list(
        _object(
            ("key", "operator"),
            key=_STRING,
            operator=_one_of("In", "NotIn", "Exists", "DoesNotExist"),
            values=_list(_STRING),
        )
    ),
)
_RELABELING: Final = _object(
    sourceLabels=_list(_STRING),
    separator={"type": "string"},
    regex={"type": "string"},
    targetLabel=_STRING,
    replacement={"type": "string"},
    action=_one_of("replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"),
)
SCHEMAS: Final[dict[str, Schema]] = {
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1",
        _object(
            ("leaderWorkerTemplate",),
            replicas=_COUNT,
            leaderWorkerTemplate=_object(
                ("workerTemplate",),
                leaderTemplate=_ANYTHING,
                workerTemplate=_ANYTHING,
                size=_COUNT | {"minimum": 1},
                restartPolicy=_one_of(
                    "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
                ),
                subGroupPolicy=_object(
                    subGroupPolicyType=_one_of("LeaderWorker", "LeaderExcluded"),
                    subGroupSize=_COUNT | {"minimum": 1},
                ),
            ),
            rolloutStrategy=_object(
                ("type",),
                type=_one_of("RollingUpdate"),
                rollingUpdateConfiguration=_object(
                    partition=_COUNT, maxUnavailable=_COUNT_OR_SHARE, maxSurge=_COUNT_OR_SHARE
                ),
            ),
            startupPolicy=_one_of("LeaderCreated", "LeaderReady"),
            networkConfig=_object(
                ("subdomainPolicy",), subdomainPolicy=_one_of("Shared", "UniquePerReplica")
            ),
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        _object(
            ("selector", "podMetricsEndpoints"),
            jobLabel=_STRING,
            podTargetLabels=_list(_STRING),
            selector=_SELECTOR,
            namespaceSelector=_object(any={"type": "boolean"}, matchNames=_list(_STRING)),
            podMetricsEndpoints=_list(
                _object(
                    port=_STRING,
                    portNumber=_COUNT | {"minimum": 1, "maximum": 65535},
                    path=_STRING,
                    scheme=_one_of("http", "https", "HTTP", "HTTPS"),
                    interval=_DURATION,
                    scrapeTimeout=_DURATION,
                    honorLabels={"type": "boolean"},
                    relabelings=_list(_RELABELING),
                )
            ),
            sampleLimit=_COUNT,
        ),
    ),
}
