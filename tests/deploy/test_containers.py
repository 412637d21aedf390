"""The image and the compose file as files; whether the image's install steps work is `make test-image`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from compose_spec import PyOptions, parse_duration

from pilotfish.server.app import LAST_MESSAGES_SECONDS
from pilotfish.server.config import ServerConfig
from pilotfish.server.http.gateway import LAST_RESPONSES_SECONDS
from tests.deploy.dockerfile import DOCKERFILE, stages
from tests.deploy.prometheus import DEPLOY, FOLDER

ROOT = DEPLOY.parent
COMPOSE = DEPLOY / "compose.yaml"
TARGETS = ("cpu", "cuda")


def services():
    return PyOptions(apply_merge=True).from_yaml(COMPOSE.read_text()).to_dict()["services"]


def options_of(variables):
    """Of a server in this environment; an unknown name or a bad value raises."""
    ours = {name: value for name, value in variables.items() if name.startswith("PILOTFISH_") and value}
    ours.pop("PILOTFISH_CACHE", None)  # of engine/machine
    return ServerConfig(**{name.removeprefix("PILOTFISH_").lower(): value for name, value in ours.items()})


def hadolint(path):
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, str(path)], capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------------ the image


def test_hadolint_finds_nothing(tmp_path):
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout
    careless = tmp_path / "Dockerfile"
    careless.write_text("FROM debian\nRUN apt-get install gcc\n")
    assert hadolint(careless).returncode != 0, "it would have let anything pass"


def test_each_target_ends_alike():
    for stage in map(stages().get, TARGETS):
        assert stage.command("ENTRYPOINT") == ["pilotfish"], "exec form: SIGTERM reaches it"
        assert stage.command("CMD") == ["serve"]
        assert stage.command("HEALTHCHECK") == ["pilotfish", "health"]
        assert stage.last("STOPSIGNAL") == "SIGTERM"
        assert int(stage.last("USER").split(":")[0]) >= 10000


def test_what_is_copied_is_there_and_is_what_the_wheel_needs():
    copied = {source for sources, _ in stages()["sources"].copies() for source in sources}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {package.split("/")[0] for package in packages}
    needed |= {"pyproject.toml", "hatch_build.py", project["project"]["readme"]}
    assert needed | set(project["project"]["license-files"]) <= copied
    allowed = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied


def test_a_compiler_is_where_something_compiles():
    """C when the image is built; on CUDA, Triton, whose launchers lie in the cache. Elsewhere nothing in it is run."""
    installs = {
        name: any("gcc" in rest for _, rest in stages()[name].instructions) for name in ("installed-cpu", *TARGETS)
    }
    assert installs == {"installed-cpu": True, "cpu": False, "cuda": True}
    caches = {
        name: [volume for volume in services()[name]["tmpfs"] if "/cache" in volume]
        for name in services()
        if "pilot" in name
    }
    assert {name: "exec" in volume for name, [volume] in caches.items()} == {
        "pilotfish-cpu": False,
        "pilotfish-gpu": True,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_its_variables_are_options(target):
    assert options_of(stages()[target].environment()).host == "0.0.0.0"


def test_constraints_name_every_dependency_once():
    lines = (DEPLOY / "docker" / "constraints.txt").read_text().splitlines()
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {entry.split(">")[0].split("[")[0] for entry in project["dependencies"]}
    assert len(set(names)) == len(names)
    assert wanted <= set(names)


# --------------------------------------------------------------------------------------------------------- compose


def test_compose_has_every_key():
    assert services().keys() == {"pilotfish-cpu", "pilotfish-gpu", "prometheus", "grafana"}
    with pytest.raises(ValueError, match="memry"):
        PyOptions(apply_merge=True).from_yaml(COMPOSE.read_text().replace("memory: 4G", "memry: 4G"))


def test_each_profile_is_whole():
    profiles = {name: set(service["profiles"]) for name, service in services().items()}
    watching = {"prometheus": {"cpu", "gpu"}, "grafana": {"cpu", "gpu"}}
    assert profiles == {"pilotfish-cpu": {"cpu"}, "pilotfish-gpu": {"gpu"}, **watching}
    assert services()["pilotfish-cpu"]["deploy"]["resources"]["limits"]["memory"] == "4gb"
    [device] = services()["pilotfish-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", ["pilotfish-cpu", "pilotfish-gpu", "prometheus", "grafana"])
def test_nothing_can_write_where_it_need_not_or_be_reached_from_elsewhere(name):
    service = services()[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize(("name", "target"), [("pilotfish-cpu", "cpu"), ("pilotfish-gpu", "cuda")])
def test_servers_are_built_from_a_stage_with_options_that_there_are(name, target):
    service = services()[name]
    assert service["build"] == {"context": "..", "dockerfile": "deploy/docker/Dockerfile", "target": target}
    assert (COMPOSE.parent / ".." / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    given = {
        name: value and value.replace("${PILOTFISH_KV_MEMORY:-8}", "8")
        for name, value in service["environment"].items()
    }
    options = options_of(given)
    after = max(LAST_MESSAGES_SECONDS, LAST_RESPONSES_SECONDS)
    assert parse_duration(service["stop_grace_period"]) > options.drain_seconds + 2 * after


def test_files_that_are_mounted_exist_and_prometheus_looks_for_the_servers():
    mounts = [volume.split(":")[0] for service in services().values() for volume in service["volumes"]]
    local = [mount for mount in mounts if mount.startswith("./") and mount != "./models"]
    assert len(local) >= 4
    assert [mount for mount in local if not (DEPLOY / mount).exists()] == []
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    [discovery] = job["dns_sd_configs"]
    assert set(discovery["names"]) == {name for name in services() if name.startswith("pilotfish")}


def test_grafana_finds_its_provisioned_files():
    folders = {volume.split(":")[1]: DEPLOY / volume.split(":")[0] for volume in services()["grafana"]["volumes"][:2]}
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/pilotfish.yaml").read_text())["providers"][0]
    home = Path(services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folders[str(home.parent)] / home.name).exists()
