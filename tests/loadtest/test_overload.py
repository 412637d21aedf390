"""The driver against a whole server around a fake engine: what it notes is what happened; and `overload` in short."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
from importlib.resources import files
from itertools import pairwise
from random import Random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer

from loadtest.experiments.overload import REFUSED, Overload, Phase, Run, Sample, full_rate, overload, poisson
from loadtest.process import ScrapedMetrics, usage
from loadtest.workload import LONG, LONGEST_PROMPT, MAX_TOKENS, corpus, request
from pilotfish import client
from pilotfish.client import GenerateOptions
from pilotfish.server.telemetry.metrics import Metrics as ServerMetrics
from tests.server.fake_engine import FakeEngine
from tests.serving import serving, until

TOKENS = 20


def run_on(server, max_tokens=TOKENS):
    connection = client.AsyncClient(f"127.0.0.1:{server.app.grpc_port}", retry=None)
    return connection, Run(connection, lambda random: ("ab", GenerateOptions(max_tokens=max_tokens)))


async def test_an_open_loop_does_not_wait_for_answers():
    engine = FakeEngine(batch=2)
    engine.gate.clear()
    moments = list(poisson(200.0, 0.3, Random(1)))
    async with serving(engine) as server:
        connection, run = run_on(server)
        async with connection:
            asyncio.get_running_loop().call_later(0.5, engine.gate.set)
            await run.open_loop(moments)
    assert sorted(call.intended for call in run.calls) == moments
    assert all((call.status, call.tokens) == ("OK", TOKENS) for call in run.calls)
    # Nothing came before the gate was opened, and that counts from the moment a request was meant to be sent.
    assert all(call.first - call.intended > 0.5 - call.intended - 0.1 for call in run.calls)


async def test_a_closed_loop_lasts_until_a_rate_can_be_told_from_it():
    async with serving(FakeEngine(batch=2, step_seconds=0.005)) as server:
        connection, run = run_on(server)
        async with connection:
            await run.closed_loop(2, 0.0, minimum=5)
    assert 5 <= len(run.calls) <= 6, "each of two callers ends with the call after which there are enough"
    assert full_rate(run.calls) > 0


async def test_refusals_and_faults_are_noted_with_what_the_server_said():
    engine = FakeEngine(batch=1)
    engine.gate.clear()
    async with serving(engine, max_queue_requests=1) as server:
        connection, run = run_on(server)
        async with connection:
            served = [asyncio.create_task(run.send())]
            await until(lambda: engine.load.num_running)
            served.append(asyncio.create_task(run.send()))
            await until(lambda: server.app.driver.queue)
            refused = await run.send()
            engine.gate.set()
            await asyncio.gather(*served)
            wrong = await Run(connection, lambda random: ("ab", GenerateOptions(temperature=-1.0))).send()
    assert [call.status for call in run.calls] == [REFUSED, "OK", "OK"]
    assert refused.retry_seconds > 0
    assert (wrong.status, wrong.first, wrong.tokens) == ("INVALID_ARGUMENT", None, 0)


def test_arrivals_are_those_of_independent_callers():
    times = list(poisson(50.0, 400.0, Random(1)))
    assert times == sorted(times)
    assert len(times) == pytest.approx(20_000, rel=0.1)
    pauses = [b - a for a, b in pairwise(times)]
    assert statistics.stdev(pauses) / statistics.mean(pauses) == pytest.approx(1, rel=0.1)


def test_requests_are_the_same_again_differ_and_fit_the_embedded_pair():
    first, second = ([request(random, LONG) for _ in range(40)] for random in (Random(3), Random(3)))
    assert first == second
    assert len({prompt for prompt, _ in first}) > 20
    tokenizer = Tokenizer.from_file(str(files("pilotfish.models") / "target" / "tokenizer.json"))
    config = json.loads((files("pilotfish.models") / "target" / "config.json").read_text("utf-8"))
    lines = [match.end() for match in re.finditer("\n", corpus())][::8]  # each place is in several of them
    prompts = tokenizer.encode_batch([corpus()[line : line + LONGEST_PROMPT] for line in lines])
    longest = max(len(prompt.ids) for prompt in prompts)
    assert longest + LONG * MAX_TOKENS[1] <= config["max_position_embeddings"]


def call(ended=2.0, *, sent=0.0, status="OK", first=None, retry=None):
    return Sample(sent, sent, ended, first, 5, status, retry)


def phase(name, calls, *, counted=None, memory=(100, 100), timed_from=0.0):
    return Phase(name, "load", 2.0, calls, len(calls) if counted is None else counted, memory, timed_from)


def test_capacity_is_what_ended_while_all_callers_were_there():
    # The last was sent at 30: nothing before 10 counts, nor what ended at 41.
    calls = [call(end, sent=30.0 if end == 41.0 else 0.0) for end in (10.0, 10.0, 19.0, 20.0, 26.0, 30.0, 41.0)]
    assert full_rate(calls) == pytest.approx(4 / 20)
    with pytest.raises(RuntimeError, match=r"capacity cannot be measured: .*'RESOURCE_EXHAUSTED': 2"):
        full_rate([call(status=REFUSED)] * 2)


def test_an_overload_in_which_all_is_well_has_no_problems_and_any_other_has():
    refused, first = call(status=REFUSED, retry=0.5), [call(first=0.5), call(first=1.5)]
    good = phase("good", [*first, refused])
    assert good.waits == (pytest.approx(1.0), pytest.approx(1.49))
    assert phase("late", first, timed_from=1.0).waits == (0.0, 0.0), "what came before the time that counts"
    assert not list(Overload(good, good, good).problems())
    assert "| good: load | 3 | 2 | 1 | 0 | 1.0 | 8 | 1 / 1.49 |" in Overload(good, good, good).lines()
    for bad, problem in (
        (phase("bad", [*first, refused], counted=2), "3 sent; the server ended or refused 2"),
        (phase("bad", [*first, call(status=REFUSED)]), "1 refusals without a retry delay"),
        (phase("bad", [*first, refused, call(status="INTERNAL")]), "neither served nor refused"),
        (phase("bad", first), "no request was refused"),
        (phase("bad", [call(first=9.0), *first, refused]), "time to first token grew to"),
        (phase("bad", [*first, refused], memory=(100, 103)), "memory grew by 3.0%"),
    ):
        [found] = Overload(good, good, bad).problems()
        assert problem in found
        timed = "grew" in problem
        assert bool(list(Overload(good, good, bad).problems(timed=False))) is not timed


def test_the_servers_own_count_is_the_sum_of_a_names_series():
    metrics = ServerMetrics(CollectorRegistry())
    for reason in ("queue_full", "queue_full", "deadline"):
        metrics.requests.reject(reason)
    found = ScrapedMetrics.parse(generate_latest(metrics.registry).decode())
    assert found.total("admission_rejected_total") == 3.0
    assert found.total("nothing_total") == 0.0


class InThisProcess:
    """What `overload` asks of a server's process, of a server that runs here."""

    def __init__(self, server):
        self.address, self.http_address = (f"127.0.0.1:{port}" for port in (server.app.grpc_port, server.app.http_port))

    def metrics(self):
        return ScrapedMetrics.read(self.http_address)

    def usage(self):
        return usage(os.getpid())


async def test_everything_sent_is_served_or_refused_with_a_hint():
    ask = lambda random: ("ab", GenerateOptions(max_tokens=random.randint(10, 20)))  # noqa: E731
    told = []
    async with serving(FakeEngine(batch=2, step_seconds=0.02), max_queue_requests=4) as server:
        found = await overload(InThisProcess(server), ask, 20.0, 0.5, told.append)
    assert list(found.problems(timed=False)) == []
    assert {call.status for call in found.overload.calls} == {"OK", REFUSED}
    assert [line.partition(":")[0] for line in told] == ["warming up", "capacity", "at capacity", "overload"]
