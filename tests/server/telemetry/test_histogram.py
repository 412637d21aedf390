"""Our histograms export what those of prometheus_client do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference
from prometheus_client.exposition import generate_latest as text
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from server.telemetry.histogram import Histogram

BOUNDS = (0, 0.001, 1, 2.5, 1e6)
VALUES = st.sampled_from([0, 0.0005, 0.001, 1, 1.0, 2.6, 1e6, 1e7]) | st.floats(0, 2e6)
OBSERVED = st.lists(st.tuples(st.sampled_from(["a", "b"]), VALUES, st.integers(0, 3)))


@pytest.mark.parametrize("has_label", [False, True])
@pytest.mark.parametrize("encode", [text, openmetrics])
@given(observed=OBSERVED)
def test_a_page_is_that_of_prometheus_client(encode, has_label, observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"label": "kind", "values": ("a", "b")} if has_label else {}
    series = Histogram(ours, "x_seconds", "About.", BOUNDS, **labels).series
    reference = Reference("x_seconds", "About.", ["kind"] if has_label else [], buckets=BOUNDS, registry=theirs)
    children = {name: reference.labels(name) if has_label else reference for name in "ab"}
    for name, value, times in observed:
        series[name if has_label else ""].observe(value, times=times)
        for _ in range(times):
            children[name].observe(value)
    expected = [line for line in encode(theirs).splitlines() if b"_created" not in line]
    assert [_rounded(line) for line in encode(ours).splitlines()] == [_rounded(line) for line in expected]


def test_an_exemplar_is_that_of_the_newest_traced_value_of_its_bucket():
    registry = CollectorRegistry()
    (series,) = Histogram(registry, "x_seconds", "About.", BOUNDS).series.values()
    for value, trace in ((0.5, "first"), (0.7, "second"), (0.8, None), (3, "above")):
        series.observe(value, None if trace is None else {"trace_id": trace})
    lines = openmetrics(registry).decode().splitlines()
    found = {line.split(" # ")[0]: line.split(" # ")[1].rsplit(" ", 1)[0] for line in lines if " # " in line}
    assert found == {
        'x_seconds_bucket{le="1.0"} 3.0': '{trace_id="second"} 0.7',
        'x_seconds_bucket{le="1e+06"} 4.0': '{trace_id="above"} 3.0',
    }


def _rounded(line):
    """A product is not to the last bit the sum of as many values."""
    name, _, value = line.decode().rpartition(" ")
    return (name, pytest.approx(float(value))) if name.endswith("_sum") or "_sum{" in name else line
