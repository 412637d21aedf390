"""docs/operations.md lists every metric and every alert, in the words of the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")


def test_every_metric_is_listed_as_it_is_exported():
    registry = CollectorRegistry()
    Metrics(registry)
    wanted = {}
    for family in registry.collect():
        name = family.name.removeprefix("pilotfish_") + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        wanted[name + "".join(f"{{{label}}}" for label in labels)] = (family.type, family.documentation)
    listed = re.findall(r"^\| `(\w+(?:\{\w+\})?)` \| (gauge|counter|histogram) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {name: (kind, meaning) for name, kind, meaning in listed} == wanted


def test_every_alert_is_listed_in_the_order_of_the_rules():
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text("utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(Pilotfish\w+)` \|", PAGE, re.MULTILINE) == alerts
