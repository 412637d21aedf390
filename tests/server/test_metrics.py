"""The page of metrics: its two forms, vLLM's names, traces as exemplars, and how late the event loop is."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from pilotfish.engine.types import FinishReason, Request
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.streams.stream import Timeline
from pilotfish.server.telemetry.metrics import DRAFT_BUCKETS, VLLM_NAMES, Exposition, Metrics, NumDrafts, watch_lag
from tests.server.test_generate import request
from tests.serving import http_client, serving, until

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TRACE = "0af7651916cd43dd8448eb211c80319c"


async def page_of(server, accept="text/plain"):
    async with http_client(server) as http:
        return await http.get("/metrics", headers={"accept": accept})


def samples(text, parse=text_string_to_metric_families):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in parse(text) for s in f.samples}


def test_the_histogram_of_k_is_as_the_library_would_count_it():
    steps = [(3, 0, 2), (0,), (0,) * 16 + (1,) + (0,) * 9 + (2,), (1,) * 70]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = NumDrafts(ours)
    name, about = "draft_tokens_per_sequence", "Drafts per sequence and step (K); 0 is plain decoding."
    expected = Histogram(name, about, namespace="pilotfish", registry=theirs, buckets=DRAFT_BUCKETS)
    for step in steps:
        counted.observe(step)
        for num_draft, sequences in enumerate(step):
            for _ in range(sequences):
                expected.observe(num_draft)
    found, wanted = (generate_latest(registry).decode() for registry in (ours, theirs))
    assert found == wanted.partition("# HELP pilotfish_draft_tokens_per_sequence_created")[0]


async def test_both_formats_have_equal_values(server):
    await server.inference.Generate(request())
    plain, open_ = await page_of(server), await page_of(server, OPENMETRICS)
    assert plain.headers["content-type"].startswith("text/plain")
    assert open_.headers["content-type"].startswith("application/openmetrics-text")
    changing = re.compile("process_|pilotfish_event_loop_lag")
    found, same = samples(plain.text), samples(open_.text, openmetrics_families)
    assert {key: v for key, v in found.items() if not changing.match(key[0])} == {
        key: v for key, v in same.items() if not changing.match(key[0])
    }
    assert found["pilotfish_draft_tokens_per_sequence_sum", ()] == found["pilotfish_spec_draft_tokens_total", ()] > 0
    assert not any(name.endswith("_created") for name, _ in found)
    assert not any("vllm" in name for name, _ in found), "nobody asked for them"


async def test_vllms_names_have_the_values_of_ours():
    async with serving(vllm_metrics=True) as server:
        await server.inference.Generate(request())
        text = (await page_of(server)).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    labels = {"model_name": "fake", "engine": "0"}
    for ours, theirs in VLLM_NAMES.items():
        assert families[theirs].type == families[ours].type
        for mine, other in zip(families[ours].samples, families[theirs].samples, strict=True):
            assert mine.name.removeprefix(ours) == other.name.removeprefix(theirs)
            assert mine.value == other.value
            assert labels.items() <= other.labels.items()
    assert samples(text)["vllm:request_success_total", tuple(sorted({**labels, "finished_reason": "length"}.items()))]


@pytest.mark.parametrize("trace_id", [TRACE, None])
def test_a_traced_request_is_an_example_of_its_bucket(trace_id):
    registry = CollectorRegistry()
    requests = Metrics(registry).requests
    timeline = Timeline(1.0, started=1.5, first_token=2.0, last_token=2.0, ended=4.0, trace_id=trace_id)
    requests.start(timeline)
    requests.deliver(timeline, None)
    requests.end(FinishReason.LENGTH, timeline)
    page, _ = Exposition(registry).page(OPENMETRICS)
    examples = {
        (sample.name, sample.exemplar.value): sample.exemplar.labels
        for family in openmetrics_families(page.decode())
        for sample in family.samples
        if sample.exemplar
    }
    seconds = {"queue_time": 0.5, "time_to_first_token": 1.0, "request_duration": 3.0}
    wanted = {(f"pilotfish_{name}_seconds_bucket", value): {"trace_id": TRACE} for name, value in seconds.items()}
    assert examples == (wanted if trace_id else {})


async def test_a_loop_that_is_held_shows():
    late = []
    watching = asyncio.create_task(watch_lag(late.append, time.monotonic, every_seconds=0.001))
    await until(lambda: late)
    late.clear()
    time.sleep(0.2)  # noqa: ASYNC251  # holding the loop is the point
    await until(lambda: late)
    watching.cancel()
    await asyncio.wait([watching])
    assert late[0] > 0.15


def test_the_queue_is_as_full_as_its_tighter_bound():
    queue, registry = AdmissionQueue(4, 100), CollectorRegistry()
    Metrics(registry).requests.queue_usage.set_function(lambda: queue.usage)
    usage = lambda: registry.get_sample_value("pilotfish_queue_usage_ratio")  # noqa: E731
    assert usage() == 0
    queue.push(Request(request_id="a", token_ids=(1,)), 10, due=1.0)
    assert usage() == 0.25
    queue.push(Request(request_id="b", token_ids=(1,)), 80, due=1.0)
    assert usage() == 0.9
