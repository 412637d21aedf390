"""Arrivals, sums and readings: what needs no server."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from importlib.resources import files
from itertools import pairwise
from random import Random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer

from engine.stats import Forward, StepStats
from loadtest import plots, report
from loadtest.arrivals import Arrivals
from loadtest.experiments.curve import Curve
from loadtest.experiments.overload import full_rate
from loadtest.metrics import ScrapedMetrics
from loadtest.phases import Account, Phase
from loadtest.process import ProcessUsage
from loadtest.samples import Objective, Outcome, Sample, Summary, levels
from loadtest.swarm import processes
from loadtest.workload import LONG_PROMPT, MAX_TOKENS, WORKLOADS, corpus
from server.config import ServerConfig
from server.telemetry.metrics import Metrics as ServerMetrics


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 2.0])
def test_arrivals_have_the_rate_and_the_variation_that_were_asked_for(variation):
    times = list(Arrivals(50.0, variation).times(400.0, Random(1)))
    assert times == sorted(times)
    assert len(times) == pytest.approx(20_000, rel=0.1)
    pauses = [b - a for a, b in pairwise(times)]
    assert statistics.stdev(pauses) / statistics.mean(pauses) == pytest.approx(variation, rel=0.1, abs=1e-9)
    assert list(Arrivals(50.0, variation).times(400.0, Random(1))) == times


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_again_and_not_the_same_throughout(name):
    first, second = ([WORKLOADS[name](random) for _ in range(40)] for random in (Random(3), Random(3)))
    assert first == second
    assert len({ask.prompt for ask in first}) > 20
    assert all(ask.prompt and ask.options["max_tokens"] for ask in first)


def test_the_longest_prompt_and_output_fit_the_embedded_pair():
    tokenizer = Tokenizer.from_file(str(files("models") / "target" / "tokenizer.json"))
    config = json.loads((files("models") / "target" / "config.json").read_text("utf-8"))
    lines = [match.end() for match in re.finditer("\n", corpus())]
    prompts = tokenizer.encode_batch([corpus()[line : line + LONG_PROMPT] for line in lines])
    longest = max(len(prompt.ids) for prompt in prompts)
    assert longest + 4 * MAX_TOKENS[1] <= config["max_position_embeddings"]


def test_shared_prefixes_are_shared():
    random = Random(2)
    beginnings = {WORKLOADS["shared_prefixes"](random).prompt[:500] for _ in range(60)}
    assert 1 < len(beginnings) <= 4


def sample(outcome=Outcome.SERVED, first=0.5, tokens=5, status="OK", **fields):
    settings = {"intended": 0.0, "sent": 0.1, "ended": 2.0, "first": first, "last": 1.5, "tokens": tokens}
    return Sample(outcome=outcome, status=status, **settings | fields)


SAMPLES = [
    sample(gaps=(0.25, 0.75), drafted=8, accepted=4, rounds=2),
    sample(first=1.4, tokens=1),
    sample(Outcome.REFUSED, None, 0, "RESOURCE_EXHAUSTED", retry_seconds=0.5, last=None),
    sample(Outcome.REFUSED, None, 0, "RESOURCE_EXHAUSTED", last=None),
]


def test_sums_add_up_and_latencies_are_of_those_who_were_served():
    summary = Summary.of(SAMPLES, 2.0, Objective(1.0, 0.3))
    assert summary.adds_up
    assert (summary.sent, summary.served, summary.refused, summary.unhinted) == (4, 2, 2, 1)
    assert summary.statuses == {"OK": 2, "RESOURCE_EXHAUSTED": 2}
    assert summary.tokens_per_second == 3.0
    assert summary.good == 1  # the other's first token came late
    assert summary.time_to_first_token["p50"] == pytest.approx(0.95)
    assert summary.inter_token["p50"] == 0.5
    assert summary.time_per_token == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 0.25))
    assert (summary.acceptance_rate, summary.acceptance_length) == (0.5, 3.0)


def test_capacity_is_what_ended_while_all_callers_were_there():
    ends = [
        10.0,
        10.0,
        19.0,
        20.0,
        26.0,
        30.0,
        41.0,
    ]  # the last was sent at 30; nothing before 10 counts, nor is 41 among it
    samples = [sample(sent=30.0 if end == 41.0 else 0.0, ended=end) for end in ends]
    assert full_rate(samples) == pytest.approx(4 / 20)


def test_capacity_that_nobody_saw_is_no_number():
    with pytest.raises(RuntimeError, match=r"capacity cannot be measured: .*'refused': 2"):
        full_rate([s for s in SAMPLES if s.outcome is Outcome.REFUSED])


def test_as_many_users_as_the_machine_can_bear():
    assert processes.bearable(64, 20.4) == processes.MOST_USERS
    assert processes.bearable(64, 4.0) == 84
    assert processes.bearable(64, 0.5) == 15, "or one call would take longer than anybody waits"
    assert processes.bearable(64, 0.01) == 1
    assert (processes.coming(64, 20.0), processes.coming(64, 4.0)) == (processes.COMING, 16.0)
    assert ServerConfig.model_fields["max_queue_seconds"].default >= 2 * processes.WAITING


def test_goodput_where_nobody_is_served_well_is_no_number_and_no_crash():
    found = Curve(0.1, (phase("slow", 1.0, None, objective=Objective(0.0, 0.0)),))
    assert math.isnan(found.kept)
    assert not any("goodput" in problem for problem in found.problems(timed=False))
    assert any("goodput" in problem for problem in found.problems())


def test_levels_lie_between_neighbours_and_of_nothing_there_are_none():
    assert levels([10.0, 0.0, math.nan]) == pytest.approx({"p50": 5.0, "p90": 9.0, "p99": 9.9})
    assert all(map(math.isnan, levels([]).values()))


def step(metrics, sequences):
    forward = Forward("verify", sequences, 2 * sequences)
    metrics.steps.observe(
        StepStats(forwards=(forward,), rounds=sequences, drafted=4, accepted_per_position=(2, 1), generated_tokens=5)
    )


def read(metrics):
    return ScrapedMetrics.parse(generate_latest(metrics.registry).decode())


def test_the_servers_account_is_what_was_added_between_two_readings():
    metrics = ServerMetrics(CollectorRegistry())
    step(metrics, 64)
    before = read(metrics)
    step(metrics, 2)
    step(metrics, 4)
    metrics.requests.reject("queue_full")
    account = Account.between(before, read(metrics))
    assert (account.batch_size, account.tokens, account.rejected, account.ended) == (3.0, 10.0, 1.0, 0.0)
    assert (account.acceptance_rate, account.acceptance_length) == (6 / 8, 1 + 6 / 6)
    assert {bound: count for bound, count in account.batch_sizes.items() if count} == {2.0: 1.0, 4.0: 1.0}


def phase(name, rate, concurrency, objective=Objective()):  # noqa: B008 - frozen
    metrics = ServerMetrics(CollectorRegistry())
    before = read(metrics)
    step(metrics, 3)
    account = Account.between(before, read(metrics))
    summary = Summary.of(SAMPLES, 2.0, objective)
    usages = (ProcessUsage(100, 10), ProcessUsage(200, 10))
    return Phase(name=name, rate=rate, concurrency=concurrency, summary=summary, account=account, usages=usages)


def test_what_is_written_can_be_read_again(tmp_path):
    phases = [phase("a", 2.0, None), phase("b", 4.0, None), phase("c", None, 7)]
    report.write(tmp_path, {"command": "x"}, phases, {"a": SAMPLES})
    found = json.loads((tmp_path / "results.json").read_text())
    assert [p["name"] for p in found["phases"]] == ["a", "b", "c"]
    assert found["phases"][0]["adds_up"] is False  # the server knows nothing of the four
    with (tmp_path / "phases.csv").open() as file:
        assert [row["rate_per_second"] for row in csv.DictReader(file)] == ["2.0", "4.0", ""]
    with (tmp_path / "requests.csv").open() as file:
        assert [row["outcome"] for row in csv.DictReader(file)] == ["served", "served", "refused", "refused"]
    assert len(report.table(phases)) == 2 + len(phases)


def test_every_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    phases = [phase("a", 2.0, None), phase("b", 4.0, None), phase("c", None, 7)]
    pictures = list(plots.curves(tmp_path, phases, Objective()))
    assert len(pictures) == len(set(pictures)) == 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
