"""ControlService, HTTP and metrics: what the server says about itself."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from prometheus_client import CollectorRegistry

from pilotfish.engine.text.codec import Codec
from pilotfish.server import version
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import CODEC, VOCAB_SIZE
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import detail, error_of, request
from tests.server.test_life import metric
from tests.server.test_security import ALICE, BOB, bearer
from tests.server.test_security import tokens as tokens  # noqa: PLC0414  # a fixture
from tests.serving import http_client, serving, until


async def test_server_and_model_info(server):
    info = await server.control.GetServerInfo(control.GetServerInfoRequest())
    assert (info.state, info.version, info.max_queue_requests) == (control.SERVER_STATE_READY, version(), 256)
    model = await server.control.GetModelInfo(control.GetModelInfoRequest())
    assert (model.model, model.vocab_size, model.max_model_len) == ("fake", VOCAB_SIZE, 4096)
    assert (list(model.eos_token_ids), list(model.proposers)) == ([0], ["ngram", "none"])
    assert model.has_tokenizer
    assert (model.speculation.num_draft_tokens, model.speculation.mode) == (8, pb.SPECULATION_MODE_AUTO)


async def test_load_counts_running_and_waiting():
    engine = FakeEngine(batch=2)
    engine.gate.clear()
    async with serving(engine) as server:
        asked = request(stopping=pb.StoppingParams(max_tokens=30))
        calls = [server.inference.Generate(asked) for _ in range(5)]
        await until(lambda: len(server.app.driver.live()) == 5)
        load = await server.control.GetLoad(control.GetLoadRequest())
        assert load.total_pages == 2
        assert load.running_requests + load.waiting_requests == 5
        assert load.queued_tokens == load.waiting_requests * (len(CODEC.encode("ab")) + 30)
        engine.gate.set()
        await asyncio.gather(*calls)
        load = await server.control.GetLoad(control.GetLoadRequest())
        assert (load.running_requests, load.waiting_requests, load.free_pages) == (0, 0, 2)
        assert load.spec_gain_ratio == engine.load.spec_gain


async def test_tokenize_and_detokenize_are_the_models_own(server):
    text = "€ab " * 1000
    tokens = await server.control.Tokenize(control.TokenizeRequest(text=text))
    assert tuple(tokens.token_ids) == CODEC.encode(text)
    back = await server.control.Detokenize(control.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text
    error = await error_of(server.control.Tokenize(control.TokenizeRequest(model="other", text="a")))
    assert error.code() == grpc.StatusCode.NOT_FOUND


LONG = 3000  # characters or tokens that are converted beside the loop; the fake's context has room for them


class Held(Codec):
    """A tokenizer that holds what is long until the gate opens."""

    def __init__(self):
        super().__init__(CODEC.tokenizer)
        self.gate, self.has_begun = threading.Event(), threading.Event()

    def encode(self, text, *, bare=False):
        self._hold(text)
        return super().encode(text, bare=bare)

    def decode(self, ids, **how):
        self._hold(ids)
        return super().decode(ids, **how)

    def _hold(self, given):
        if len(given) >= LONG:
            self.has_begun.set()
            assert self.gate.wait(30)


@asynccontextmanager
async def holding(**options):
    """A server whose tokenizer holds what is long; the gate opens in the end, also after a failure."""
    codec = Held()
    async with serving(codec=codec, **options) as server:
        try:
            yield server, codec
        finally:
            codec.gate.set()


def conversions(server, length, **options):
    """A call of each method that encodes or decodes, by the method's name; each is made when it is asked for."""
    prompt, stopping = "a" * length, pb.StoppingParams(max_tokens=3)
    return {
        "Tokenize": lambda: server.control.Tokenize(control.TokenizeRequest(text=prompt), **options),
        "Detokenize": lambda: server.control.Detokenize(control.DetokenizeRequest(token_ids=[5] * length), **options),
        "Generate": lambda: server.inference.Generate(request(prompt=prompt, stopping=stopping), **options),
    }


async def held(codec, call):
    """A call that the tokenizer holds."""
    codec.has_begun.clear()
    task = asyncio.ensure_future(call())
    assert await asyncio.to_thread(codec.has_begun.wait, 30)
    return task


async def require_refused(call):
    """The call hears at once that there is no room, and when to come again."""
    error = await error_of(call())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    return error.details()


async def until_served(call):
    """The server may hear of a cancelled call only after the next one has come."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.002)


async def test_conversions_and_generation_share_one_bound_of_what_arrives():
    async with holding(max_queue_requests=1) as (server, codec):
        small = conversions(server, 2)
        for times, call_of_a_long_one in enumerate(conversions(server, LONG).values(), 1):
            arriving = await held(codec, call_of_a_long_one)
            for call in small.values():
                assert await require_refused(call) == "1 requests are being encoded; the limit is 1"
            assert metric(server, "admission_rejected_total", reason="queue_full") == times * len(small)
            codec.gate.set()
            await arriving
            for call in small.values():
                await call()
            codec.gate.clear()


async def test_a_conversion_that_is_refused_or_cancelled_gives_its_place_back():
    async with holding(max_queue_requests=1) as (server, codec):
        for _ in range(3):
            error = await error_of(server.control.Tokenize(control.TokenizeRequest(model="other", text="a")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
        left = await held(codec, conversions(server, LONG)["Tokenize"])
        left.cancel()
        codec.gate.set()
        await asyncio.gather(left, return_exceptions=True)
        for call in conversions(server, 2).values():
            await until_served(call)


async def test_a_conversion_is_one_of_its_callers_live_requests(tokens):
    async with holding(token_file=tokens, max_requests_per_token=1) as (server, codec):
        alices, bobs = (conversions(server, 2, metadata=bearer(token)) for token in (ALICE, BOB))
        live = await held(codec, conversions(server, LONG, metadata=bearer(ALICE))["Tokenize"])
        for call in alices.values():
            assert await require_refused(call) == "alice has 1 live requests; the limit is 1"
        assert metric(server, "admission_rejected_total", reason="quota") == len(alices)
        for call in bobs.values():
            await call()
        codec.gate.set()
        await live
        for call in alices.values():
            await call()


@pytest.mark.parametrize("first", ["Tokenize", "Detokenize"])
async def test_a_conversion_is_one_of_its_callers_requests_per_second(tokens, first):
    async with serving(token_file=tokens, requests_per_second=1e-6) as server:
        alices = conversions(server, 2, metadata=bearer(ALICE))
        await alices[first]()
        for call in alices.values():
            assert (await require_refused(call)).startswith("alice sends more than 1e-06 requests per second")
        await conversions(server, 2, metadata=bearer(BOB))[first]()


async def test_http_reports_health_models_and_metrics(server):
    await server.inference.Generate(request())
    async with http_client(server) as http:
        health = await http.get("/health")
        assert health.status_code == 200
        told = health.json()
        assert told.pop("uptime_seconds") >= 0
        assert told == {
            "status": "ready",
            "model": "fake",
            "draft_model": None,
            "device": "cpu",
            "speculation": "auto",
            "num_draft_tokens": 8,
            "acceptance_rate": 1.0,  # as the fake has it
            "acceptance_length": 3.0,
            "spec_gain": 1.25,
            "running": 0,
            "waiting": 0,
        }
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_metrics_count_a_request_once(server):
    stopping = pb.StoppingParams(max_tokens=20)
    for _ in range(3):
        await server.inference.Generate(request(stopping=stopping))
    value = server.app.metrics.registry.get_sample_value
    assert value("pilotfish_requests_total", {"finish_reason": "length"}) == 3
    for name in ("queue_time", "time_to_first_token", "time_per_output_token", "request_duration"):
        assert value(f"pilotfish_{name}_seconds_count") == 3
    rounds = -(-20 // 3)  # bursts of three
    assert value("pilotfish_inter_token_latency_seconds_count") == 3 * (rounds - 1)
    assert value("pilotfish_generated_tokens_total") == 60
    assert value("pilotfish_batch_size_count", {"kind": "verify"}) == 3 * rounds
    assert value("pilotfish_spec_accepted_tokens_per_position_total", {"position": "1"}) == 3 * rounds
    assert value("pilotfish_requests_running") == 0
    assert value("pilotfish_spec_gain_ratio") == 1.25


def test_every_series_exists_from_the_start():
    registry = CollectorRegistry()
    Metrics(registry)
    names = {family.name for family in registry.collect() if family.samples}
    of_a_model = {"pilotfish_cache_config_info"}  # its labels are known when it is loaded
    assert {family.name for family in registry.collect()} == names | of_a_model
    for reason in ("stop", "length", "cancelled", "deadline", "aborted", "error"):
        assert registry.get_sample_value("pilotfish_requests_total", {"finish_reason": reason}) == 0
