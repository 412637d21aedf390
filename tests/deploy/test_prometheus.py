"""What Prometheus sees of a real server is what the server did, and every panel and rule of deploy/ finds its data."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from pilotfish.client import AsyncClient, Completion
from pilotfish.engine.stats import StepStats
from pilotfish.models.corpus import held_out_prompts
from tests.deploy.prometheus import DEPLOY, FOLDER, PROMTOOL, Prometheus, needs_prometheus, watching
from tests.serving import serving_embedded

pytestmark = needs_prometheus

BATCH, LOAD_SECONDS, MAX_TOKENS = 8, 4.0, 48
PANELS = [
    (path.stem, panel["title"], target["expr"])
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]


@dataclass
class Seen:
    """A run: what the server told its own metrics, what its callers got, what Prometheus answered."""

    steps: list[StepStats] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    answers: dict[str, float | None] = field(default_factory=dict)
    points: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    rules: list[dict[str, Any]] = field(default_factory=list)
    page: str = ""


QUERIES = {
    "batch size": 'sum(pilotfish_batch_size_sum{kind="verify"}) / sum(pilotfish_batch_size_count{kind="verify"})',
    "up to 6": 'sum(pilotfish_batch_size_bucket{kind="verify", le="6.0"})',
    "passes": 'sum(pilotfish_batch_size_count{kind="verify"})',
    "drafted": "sum(pilotfish_spec_draft_tokens_total)",
    "acceptance": "sum(pilotfish_spec_accepted_tokens_total) / sum(pilotfish_spec_draft_tokens_total)",
    "rounds": "sum(pilotfish_spec_drafts_total)",
    "K": "sum(pilotfish_draft_tokens_per_sequence_sum)",
    "generated": "sum(pilotfish_generated_tokens_total)",
    "requests": 'sum(pilotfish_requests_total{finish_reason=~"stop|length"})',
    "first tokens": "sum(pilotfish_time_to_first_token_seconds_count)",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return asyncio.run(_run(tmp_path_factory.mktemp("prometheus")))


async def _run(folder) -> Seen:
    seen = Seen()
    async with serving_embedded(max_batch_size=BATCH, max_model_len=608) as server:
        observe = server.app.metrics.steps.observe
        server.app.metrics.steps.observe = lambda stats: (seen.steps.append(stats), observe(stats))
        target = f"127.0.0.1:{server.app.http_port}"
        async with watching(target, folder) as prometheus, AsyncClient(f"127.0.0.1:{server.app.grpc_port}") as client:
            await prometheus.until("pilotfish_engine_up", 1)
            start = time.time()
            await _load(client, seen)
            await prometheus.until(QUERIES["generated"], sum(step.generated_tokens for step in seen.steps))
            await _ask(prometheus, seen, start, time.time())
        async with httpx.AsyncClient() as http:
            seen.page = (await http.get(f"http://{target}/metrics")).text
    return seen


async def _load(client: AsyncClient, seen: Seen) -> None:
    """Twice as many callers as there is room for, each with one request after the other, for some scrapes.

    One of them wants drafts in each step: AUTO may find none worth its time on this machine.
    """
    first, *others = (prompt[-300:] for prompt in held_out_prompts(2 * BATCH))
    end = time.monotonic() + LOAD_SECONDS

    async def call(prompt: str, **options: Any) -> None:
        while time.monotonic() < end:
            seen.completions.append(await client.generate(prompt, max_tokens=MAX_TOKENS, **options))

    await asyncio.gather(call(first, speculation="fixed", num_draft_tokens=8), *map(call, others))


async def _ask(prometheus: Prometheus, seen: Seen, start: float, end: float) -> None:
    seen.answers = {name: await prometheus.value(query) for name, query in QUERIES.items()}
    for board, title, expr in PANELS:
        query = expr.replace("$__rate_interval", "4s").replace("$instance", ".+")
        seen.points[board, title, expr] = await prometheus.values(query, start, end)
    groups = (await prometheus.ask("rules"))["groups"]
    seen.rules = [rule for group in groups for rule in group["rules"]]


@pytest.mark.slow
def test_batch_sizes_are_those_of_the_steps(seen):
    sizes = [f.sequences for step in seen.steps for f in step.forwards if f.kind == "verify"]
    assert seen.answers["passes"] == len(sizes)
    assert seen.answers["batch size"] == pytest.approx(sum(sizes) / len(sizes))
    assert seen.answers["up to 6"] == sum(size <= 6 for size in sizes)
    assert max(sizes) == BATCH


@pytest.mark.slow
def test_acceptance_equals_that_of_the_callers(seen):
    told = [completion.finished.speculation_stats for completion in seen.completions]
    drafted, accepted = sum(t.drafted for t in told), sum(t.accepted for t in told)
    assert drafted > accepted > 0
    assert seen.answers["drafted"] == seen.answers["K"] == drafted
    assert seen.answers["rounds"] == sum(t.rounds for t in told)
    assert seen.answers["acceptance"] == pytest.approx(accepted / drafted)


@pytest.mark.slow
def test_requests_and_tokens_are_what_callers_got(seen):
    assert len(seen.completions) >= 2 * BATCH
    assert seen.answers["requests"] == seen.answers["first tokens"] == len(seen.completions)
    assert seen.answers["generated"] == sum(c.finished.usage.completion_tokens for c in seen.completions)


@pytest.mark.slow
def test_every_panel_is_answered_with_data(seen):
    assert len(seen.points) == len(set(PANELS)) > 20
    assert [panel for panel, points in seen.points.items() if not points] == []


@pytest.mark.slow
def test_every_rule_is_evaluated_and_none_fires_on_a_healthy_server(seen):
    assert seen.rules
    assert {rule["name"]: rule["lastError"] for rule in seen.rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in seen.rules if rule["state"] == "firing"] == []


@pytest.mark.slow
def test_names_are_as_prometheus_likes_them(seen):
    assert_promtool_likes("check", "metrics", text=seen.page)


def test_rules_fire_when_they_must():
    assert_promtool_likes("test", "rules", str(DEPLOY.parent / "tests" / "deploy" / "rules_test.yml"))


def test_the_configuration_is_one():
    assert_promtool_likes("check", "config", str(FOLDER / "prometheus.yml"))


def assert_promtool_likes(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
