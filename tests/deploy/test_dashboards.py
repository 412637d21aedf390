"""Dashboards and rules as files: fresh, of Grafana's own shape, and of families that there are."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from deploy.grafana import dashboards
from pilotfish.server.telemetry.metrics import Metrics
from tests.deploy.prometheus import DEPLOY, FOLDER

FILES = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = FOLDER / "rules.yml"
CASES = DEPLOY.parent / "tests" / "deploy" / "rules_test.yml"


def test_the_files_are_what_the_module_makes():
    want = {f"{name}.json": dashboards.as_json(board) for name, board in dashboards.boards().items()}
    assert {path.name: path.read_text() for path in FILES} == want, "run `make dashboards`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grafanas_types_have_every_field(path):
    """What they read and write again is what was there: a field or value that they do not know would get lost."""
    register_default_plugins()
    found = json.loads(path.read_text())
    assert _read_and_written(found) == found
    found["panels"][0]["options"]["legendary"] = True
    assert _read_and_written(found) != found, "it would have let anything pass"


def _read_and_written(board):
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_fill_the_grid_and_have_descriptions(path):
    board = json.loads(path.read_text())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) == len({p["id"] for p in board["panels"]})
    for panel in board["panels"]:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("path", [*FILES, RULES], ids=lambda path: path.stem)
def test_every_family_that_is_asked_for_exists(path):
    registry = CollectorRegistry()
    Metrics(registry)
    names = {sample.name for family in registry.collect() for sample in family.samples}
    asked = set(re.findall(r"pilotfish_\w+", path.read_text()))
    assert asked
    assert asked <= names


def test_the_data_source_of_the_dashboards_is_provisioned():
    provisioned = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    [source] = provisioned["datasources"]
    for path in FILES:
        variables = {v["name"]: v for v in json.loads(path.read_text())["templating"]["list"]}
        assert variables["datasource"]["query"] == source["type"] == "prometheus"


def test_every_alert_has_a_case_in_which_it_fires():
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
