"""The manifests as Kustomize renders them: every field known to the schemas, and true to what the server is.

Core kinds are validated strictly by kubernetes-validate's schemas; ServiceMonitor and ScaledObject by models made from
their CRDs, which forget what they do not know.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pilotfish.server.app import LAST_MESSAGES_SECONDS
from pilotfish.server.config import ServerConfig
from pilotfish.server.grpc.services import LIVENESS
from pilotfish.server.http.gateway import LAST_RESPONSES_SECONDS
from tests.deploy.dockerfile import stages
from tests.deploy.prometheus import DEPLOY, PROMTOOL, needs_prometheus
from tests.deploy.test_containers import options_of
from tests.deploy.test_containers import services as compose_services

FOLDER = DEPLOY / "kubernetes" / "overlays"
OVERLAYS = ("cpu", "gpu", "keda")
VERSION = "1.37"  # of the schemas; fields are those of the oldest that has all of them, 1.30
ALWAYS = {
    "Namespace", "ServiceAccount", "ConfigMap", "Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy",
    "ServiceMonitor",
}  # fmt: skip
OWN = {"cpu": {"HorizontalPodAutoscaler"}, "gpu": {"PersistentVolumeClaim"}, "keda": {"ScaledObject"}}


@cache
def rendered(overlay):
    program = Path(sys.executable).with_name("kubectl")
    command = str(program) if program.exists() else shutil.which("kubectl")
    done = subprocess.run([command, "kustomize", str(FOLDER / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request):
    return request.param


@pytest.fixture(scope="module")
def objects(overlay):
    return rendered(overlay)


@pytest.fixture(scope="module")
def pod(objects):
    return one(objects, "Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    [container] = pod["containers"]
    return container


@pytest.fixture(scope="module")
def options(objects):
    return options_of(one(objects, "ConfigMap")["data"])


def one(objects, kind, name=None):
    [found] = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def validate(manifest):
    if manifest["kind"] not in ("ServiceMonitor", "ScaledObject"):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    else:
        # Every process that collects tests would wait for these imports.
        from cloudcoil.models.keda.v1alpha1 import ScaledObject
        from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

        model = {"ServiceMonitor": ServiceMonitor, "ScaledObject": ScaledObject}[manifest["kind"]]
        known = model.model_validate(manifest).model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert known == manifest, "it has fields that its CRD does not"


# -------------------------------------------------------------------------------------------------------- validity


def test_every_object_is_valid(objects, overlay):
    assert {manifest["kind"] for manifest in objects} == ALWAYS | OWN[overlay]
    for manifest in objects:
        validate(manifest)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "pilotfish"


# ------------------------------------------------------------------------------------- true to the server and image


def test_ports_and_names_agree(objects, container):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    fields = ServerConfig.model_fields
    assert ports == {"grpc": fields["grpc_port"].default, "http": fields["http_port"].default}
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    front, headless = one(objects, "Service", "pilotfish"), one(objects, "Service", "pilotfish-headless")
    for service in (front, headless):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    assert headless["spec"]["clusterIP"] == "None"
    for kind, selector in (("Deployment", "selector"), ("PodDisruptionBudget", "selector")):
        assert one(objects, kind)["spec"][selector]["matchLabels"].items() <= labels.items()
    assert container["envFrom"] == [{"configMapRef": {"name": one(objects, "ConfigMap")["metadata"]["name"]}}]


def test_prometheus_scrapes_each_pod_once(objects):
    monitor = one(objects, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    [service] = [o for o in objects if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= {
        port["name"] for port in service["spec"]["ports"]
    }
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "pilotfish", "the job that the rules ask for"


def test_probes_ask_for_the_right_health(container):
    port = ServerConfig.model_fields["grpc_port"].default
    assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"] == {"port": port}
    assert container["livenessProbe"]["grpc"] == {"port": port, "service": LIVENESS}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300


def test_a_pod_has_time_to_drain(pod, container, options):
    leaving = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    probe = container["readinessProbe"]
    last = 2 * max(LAST_MESSAGES_SECONDS, LAST_RESPONSES_SECONDS)
    assert pod["terminationGracePeriodSeconds"] >= leaving + options.drain_seconds + last + 5
    assert leaving >= probe["periodSeconds"]


def test_it_may_do_no_more_than_it_needs(pod, container):
    user = stages()["runtime"].last("USER").split(":")
    security = pod["securityContext"]
    assert [str(security["runAsUser"]), str(security["runAsGroup"])] == user
    assert security["runAsNonRoot"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"], "else it gets variables PILOTFISH_PORT_..., which are no options"


def test_what_the_image_writes_to_is_writable(pod, container):
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    image = stages()["runtime"].environment()
    for place in ("/tmp", image["PILOTFISH_CACHE"], image["HOME"]):
        assert "emptyDir" in volumes[mounts[place]]
    assert image["HF_HOME"].startswith("/models")


def test_images_are_those_that_compose_builds(container, overlay):
    service = "pilotfish-gpu" if overlay == "gpu" else "pilotfish-cpu"
    assert container["image"] == compose_services()[service]["image"]


def test_only_friends_come_in_and_nothing_goes_out(objects):
    policy = one(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    [monitoring] = [rule for rule in policy["ingress"] if "monitoring" in str(rule["from"])]
    assert monitoring["ports"] == [{"port": "http"}]


# --------------------------------------------------------------------------------------------------- each overlay


def test_the_cpu_overlay_has_two_cores_and_scales_at_70_percent():
    objects = rendered("cpu")
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}
    scaler = one(objects, "HorizontalPodAutoscaler")["spec"]
    [metric] = scaler["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    assert scaler["scaleTargetRef"]["name"] == one(objects, "Deployment")["metadata"]["name"]
    assert "replicas" not in one(objects, "Deployment")["spec"], "else each apply undoes what the autoscaler chose"


def test_the_gpu_overlay_asks_for_one_gpu_and_a_model():
    objects = rendered("gpu")
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    assert claims == [one(objects, "PersistentVolumeClaim")["metadata"]["name"]]
    assert one(objects, "ConfigMap")["data"]["PILOTFISH_DEVICE"] == "cuda"


@needs_prometheus
def test_the_keda_overlay_scales_by_queries_that_prometheus_understands(tmp_path):
    scaler = one(rendered("keda"), "ScaledObject")["spec"]
    queries = [trigger["metadata"]["query"] for trigger in scaler["triggers"]]
    assert [re.search(r"pilotfish_\w+", query)[0] for query in queries] == [
        "pilotfish_requests_waiting",
        "pilotfish_requests_running",
    ]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    batches = int(scaler["triggers"][1]["metadata"]["threshold"]) / ServerConfig.model_fields["max_batch_size"].default
    assert batches == 0.75
