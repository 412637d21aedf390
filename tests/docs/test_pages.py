"""Pages that list what there is are whole: features, metrics, alerts, and the promises of reproducibility."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import yaml
from prometheus_client import CollectorRegistry

from pilotfish.server.telemetry.metrics import Metrics
from tests.docs.conftest import ROOT
from tests.features import HEAD, tables

FEATURES, OPERATIONS, REPRODUCIBILITY = (
    (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("features", "operations", "reproducibility")
)


# ---------------------------------------------------------------------------------------------------- the features


@pytest.fixture
def cells(tests_of):
    return [test for test in tests_of("tests/exactness/test_options.py") if test.get_closest_marker("feature")]


def test_the_table_of_features_is_that_of_the_tests(cells):
    """A failed cell shows by itself; this fails when an option, a condition or a proposer came or went."""
    assert HEAD + "".join(tables({cell.nodeid: True for cell in cells})) == FEATURES, "run `make features`"


def test_make_test_runs_a_cell_of_every_row(cells):
    runs = defaultdict(bool)
    for cell in cells:
        row, _, _ = cell.name.rpartition("-")
        runs[row] |= cell.get_closest_marker("slow") is None
    assert len(runs) > 30
    assert [row for row, is_run in runs.items() if not is_run] == []


# --------------------------------------------------------------------------------------------- metrics and alerts


def test_every_metric_is_listed_as_it_is_exported():
    registry = CollectorRegistry()
    Metrics(registry)
    wanted = {}
    for family in registry.collect():
        name = family.name.removeprefix("pilotfish_") + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        wanted[name + "".join(f"{{{label}}}" for label in labels)] = (family.type, family.documentation)
    listed = re.findall(r"^\| `(\w+(?:\{\w+\})?)` \| (gauge|counter|histogram) \| (.*) \|$", OPERATIONS, re.MULTILINE)
    assert {name: (kind, meaning) for name, kind, meaning in listed} == wanted


def test_every_alert_is_listed_in_the_order_of_the_rules():
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text("utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(Pilotfish\w+)` \|", OPERATIONS, re.MULTILINE) == alerts


# ------------------------------------------------------------------------------------------------ reproducibility


def test_each_promise_of_reproducibility_names_its_tests_and_nothing_is_promised_elsewhere():
    items = re.findall(r"^- (.*(?:\n  .*)*)", REPRODUCIBILITY, re.MULTILINE)
    assert len(items) > 25
    untested = [item for item in items if not re.search(r"`tests/[\w/]+\.py::\w+`", item)]
    assert [item for item in untested if not item.startswith("**Another CPU")] == []
    rest = re.sub(r"^(- .*(?:\n  .*)*|#.*)$", "", REPRODUCIBILITY, flags=re.MULTILINE)
    assert len(rest.split()) < 80, "the page has grown a text that names no test"


@pytest.mark.parametrize(("path", "name"), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", REPRODUCIBILITY))
def test_a_test_that_a_promise_names_is_there(path, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)
