"""Pilotfish behind routers: their configuration is valid, and every name in it is one that the server really has.

What the other projects take is retold here from their documentation: InferencePool of the Gateway API's inference
extension 1.6, HTTPRoute of the Gateway API 1.4, llm-d's endpoint picker 0.10 and SMG 1.13.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

import httpx
import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pilotfish.engine.startup.build import PAGE_SIZE
from pilotfish.models import embedded_target
from pilotfish.server.config import ServerConfig
from pilotfish.server.model import model_name
from tests.deploy.prometheus import DEPLOY
from tests.deploy.test_containers import options_of
from tests.deploy.test_kubernetes import ALWAYS, OWN, one, rendered, validate
from tests.serving import serving

DOCS = (DEPLOY.parent / "docs" / "operations.md").read_text("utf-8")


def closed(required, **properties):
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def listed(items, least, most):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


NAME = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = closed(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
LABELS = {"type": "object", "minProperties": 1, "maxProperties": 64, "additionalProperties": {"type": "string"}}
# Of both kinds the fields that are used here.
INFERENCE_POOL = closed(
    ["selector", "targetPorts"],
    selector=closed(["matchLabels"], matchLabels=LABELS),
    targetPorts=listed(PORT, 1, 8),
    endpointPickerRef=closed(  # with a port because it is a Service
        ["name", "port"], name=NAME, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
    ),
)
PATH = closed(
    [], type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value={"type": "string", "pattern": "^/"}
)
HTTP_ROUTE = closed(
    [],
    parentRefs=listed(closed(["name"], name=NAME), 0, 32),
    rules=listed(
        closed(
            [],
            matches=listed(closed([], path=PATH), 0, 64),
            backendRefs=listed(closed(["name"], group={"type": "string"}, kind=NAME, name=NAME), 0, 16),
            timeouts=closed([], request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        ),
        1,
        16,
    ),
)
SCHEMAS = {
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
}
KINDS = ALWAYS | OWN["cpu"] | {"InferencePool", "HTTPRoute", "Role", "RoleBinding"}

# Flags of the endpoint picker that are not deprecated, with those of its logger.
PICKER_FLAGS = {
    "grpc-port", "ha-enable-leader-election", "drain-timeout", "pool-group", "pool-namespace", "pool-name",
    "endpoint-selector", "endpoint-target-ports", "refresh-metrics-interval", "refresh-prometheus-metrics-interval",
    "metrics-staleness-threshold", "tracing", "health-checking", "metrics-port", "grpc-health-port", "enable-pprof",
    "cert-path", "enable-cert-reload", "secure-serving", "metrics-endpoint-auth", "config-file", "config-text",
    "zap-devel", "zap-encoder", "zap-log-level", "v",
}  # fmt: skip
# Its plugins, as far as they are used here, and the parameters of each.
KV_EVENTS = {"zmqEndpoint", "topicFilter", "concurrency", "engineType", "discoverPods", "podDiscoveryConfig"}
PLUGINS = {
    "token-producer": {"modelName", "vllm"},
    "metrics-data-source": {"scheme", "path", "insecureSkipVerify", "interval"},
    "core-metrics-extractor": {"engineLabelKey", "defaultEngine", "engineConfigs"},
    "endpoint-notification-source": set(),
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing", "speculativeTTL",
    },
    "prefix-cache-scorer": {"prefixMatchInfoProducerName", "matchLengthWeight", "matchLengthScaleTokens"},
    "queue-scorer": set(),
    "kv-cache-utilization-scorer": set(),
    "single-profile-handler": set(),
    "max-score-picker": set(),
}  # fmt: skip
SPECS = {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec"}
# Of `smg launch`, those that the page uses.
SMG_FLAGS = {
    "worker-urls", "policy", "host", "port", "service-discovery", "service-discovery-port",
    "service-discovery-namespace", "selector",
}  # fmt: skip
SMG_POLICIES = {
    "random", "round_robin", "passthrough", "cache_aware", "power_of_two", "least_load", "manual",
    "consistent_hashing", "prefix_hash",
}  # fmt: skip


@pytest.fixture(scope="module")
def objects():
    return rendered("gateway")


@pytest.fixture(scope="module")
def picker(objects):
    """The configuration that the picker is given, by the file that its flag names."""
    pod = one(objects, "Deployment", "pilotfish-picker")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    [file] = [arg.removeprefix("--config-file=") for arg in container["args"] if arg.startswith("--config-file=")]
    folder, _, name = file.rpartition("/")
    assert (folder, volume["name"]) == (mount["mountPath"], mount["name"])
    return yaml.safe_load(one(objects, "ConfigMap", volume["configMap"]["name"])["data"][name])


@pytest.fixture(scope="module")
def parameters(picker):
    return {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}


@pytest.fixture(scope="module")
def pods(objects):
    return one(objects, "Deployment", "pilotfish")["spec"]["template"]


@pytest.fixture(scope="module")
def options(pods, objects):
    [source] = pods["spec"]["containers"][0]["envFrom"]
    return options_of(one(objects, "ConfigMap", source["configMapRef"]["name"])["data"])


def check(manifest):
    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        validate(manifest)
    else:
        jsonschema.validate(manifest["spec"], schema)


def port_of(endpoint):
    return int(endpoint.rpartition(":")[2])


# -------------------------------------------------------------------------------------------------------- validity


def test_every_object_is_valid(objects):
    assert {manifest["kind"] for manifest in objects} == KINDS
    for manifest in objects:
        if manifest["kind"] == "ServiceMonitor":  # which test_kubernetes checks; importing its type takes seconds
            assert manifest == one(rendered("cpu"), "ServiceMonitor")
        else:
            check(manifest)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "pilotfish"


def test_the_picker_is_asked_about_the_pods_of_the_pool(objects, pods):
    pool, route = one(objects, "InferencePool"), one(objects, "HTTPRoute")
    [rule] = route["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"] == [{"number": ServerConfig.model_fields["http_port"].default}]
    reference = pool["spec"]["endpointPickerRef"]
    service = one(objects, "Service", reference["name"])["spec"]
    assert reference["port"]["number"] in [port["port"] for port in service["ports"]]
    deployment = one(objects, "Deployment", "pilotfish-picker")["spec"]["template"]
    assert service["selector"].items() <= deployment["metadata"]["labels"].items()
    [container] = deployment["spec"]["containers"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    assert f"--pool-group={pool['apiVersion'].partition('/')[0]}" in container["args"]
    flags = {arg.removeprefix("--").partition("=")[0] for arg in container["args"]}
    assert flags <= PICKER_FLAGS
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {probe["grpc"]["port"] for probe in (container["livenessProbe"], container["readinessProbe"])} == {
        ports["grpc-health"]
    }
    assert f"--grpc-health-port={ports['grpc-health']}" in container["args"]


def test_the_picker_may_do_no_more_than_it_needs(objects):
    pod = one(objects, "Deployment", "pilotfish-picker")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["serviceAccountName"] == one(objects, "RoleBinding")["subjects"][0]["name"]
    assert {verb for rule in one(objects, "Role")["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


# --------------------------------------------------------------------------------------------- the picker's plugins


def test_the_picker_supports_its_plugins_and_their_parameters(picker):
    assert (picker["apiVersion"], picker["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    names = [plugin["type"] for plugin in picker["plugins"]]
    assert len(set(names)) == len(names)
    for plugin in picker["plugins"]:
        assert plugin.get("parameters", {}).keys() <= PLUGINS[plugin["type"]]
    used = [source["pluginRef"] for source in picker["dataLayer"]["sources"]]
    used += [extractor["pluginRef"] for source in picker["dataLayer"]["sources"] for extractor in source["extractors"]]
    used += [plugin["pluginRef"] for profile in picker["schedulingProfiles"] for plugin in profile["plugins"]]
    assert set(used) <= set(names)
    assert set(names) - set(used) == {"token-producer", "single-profile-handler"}, "nothing refers to these"


async def test_every_metric_that_the_picker_reads_is_one_that_the_server_shows(parameters, pods):
    extractor = parameters["core-metrics-extractor"]
    [engine] = extractor["engineConfigs"]
    assert engine["name"] == extractor["defaultEngine"] == pods["metadata"]["labels"]["llm-d.ai/engine-type"]
    assert engine.keys() - {"name"} == SPECS
    async with serving() as server:
        url = f"http://127.0.0.1:{server.app.http_port}{parameters['metrics-data-source']['path']}"
        async with httpx.AsyncClient() as http:
            page = (await http.get(url)).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for spec in SPECS:
        assert families[engine[spec]].type == "gauge"
        assert len(families[engine[spec]].samples) == 1
    [info] = families[engine["cacheInfoSpec"]].samples
    assert info.labels == {
        "block_size": str(server.engine.facts.page_size),
        "num_gpu_blocks": str(server.engine.facts.total_pages),
    }


def test_the_picker_tokenizes_by_the_servers_and_counts_in_their_pages(parameters, objects, options):
    producer = parameters["token-producer"]
    assert producer["modelName"] == model_name(str(embedded_target())) == model_name(options.target)
    service, _, port = producer["vllm"]["url"].removeprefix("http://").partition(":")
    assert int(port) in [entry["port"] for entry in one(objects, "Service", service)["spec"]["ports"]]
    assert options.page_size is None
    assert parameters["precise-prefix-cache-producer"]["tokenProcessorConfig"] == {"blockSizeTokens": PAGE_SIZE}


def test_only_the_picker_receives_the_events(parameters, objects, pods, options):
    events = parameters["precise-prefix-cache-producer"]["kvEventsConfig"]
    assert events.keys() <= KV_EVENTS
    assert events["engineType"] == "vllm"
    ports = {port["name"]: port["containerPort"] for port in pods["spec"]["containers"][0]["ports"]}
    found = events["podDiscoveryConfig"]
    assert found == {"socketPort": ports["kv-events"], "replaySocketPort": ports["kv-replay"]}
    assert found["socketPort"] == port_of(options.kv_events_endpoint)
    assert found["replaySocketPort"] == port_of(options.kv_events_replay_endpoint)
    assert options.kv_events_topic is None
    assert events["topicFilter"] == "kv@", "with which the default topic begins"
    name = "app.kubernetes.io/name"
    rules = [rule for rule in one(objects, "NetworkPolicy")["spec"]["ingress"] if "kv-events" in str(rule["ports"])]
    labels = one(objects, "Deployment", "pilotfish-picker")["spec"]["template"]["metadata"]["labels"]
    assert rules == [
        {
            "from": [{"podSelector": {"matchLabels": {name: labels[name]}}}],
            "ports": [{"port": "kv-events"}, {"port": "kv-replay"}],
        }
    ]


# ------------------------------------------------------------------------------------------------------------- SMG


def test_smgs_commands_have_flags_that_it_knows(objects):
    blocks = re.findall(r"```\n(.*?)```", DOCS, re.DOTALL)
    commands = [shlex.split(block.replace("\\\n", "")) for block in blocks if block.startswith("smg launch")]
    assert len(commands) == 2
    for _, _, *words in commands:
        assert {word.removeprefix("--") for word in words if word.startswith("--")} <= SMG_FLAGS
        assert words[words.index("--policy") + 1] in SMG_POLICIES
    _, discovering = commands
    given = dict(pairwise(discovering))
    name, _, value = given["--selector"].partition("=")
    assert one(objects, "Deployment", "pilotfish")["spec"]["template"]["metadata"]["labels"][name] == value
    assert int(given["--service-discovery-port"]) == ServerConfig.model_fields["http_port"].default
    assert given["--service-discovery-namespace"] == one(objects, "Deployment", "pilotfish")["metadata"]["namespace"]
