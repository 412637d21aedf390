"""Spans: whose part they are, what they tell, and that each ends once. Without the exporters, which are an extra."""

from __future__ import annotations

import pytest

from pilotfish.server.telemetry.tracing import Tracing
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import collect, request
from tests.server.test_life import LONG
from tests.serving import http_client, serving, until

trace = pytest.importorskip("opentelemetry.trace")
OWN = 32 * "7"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Span:
    def __init__(self, parent, attributes):
        self.parent, self.attributes, self.events, self.status, self.ended = parent, dict(attributes), {}, None, 0

    def set_attribute(self, name, value):
        self.attributes[name] = value

    def set_attributes(self, values):
        self.attributes |= values

    def add_event(self, name, timestamp):
        self.events[name] = timestamp

    def set_status(self, status):
        self.status = status

    def end(self):
        self.ended += 1

    def get_span_context(self):
        return self.parent if self.parent.is_valid else trace.SpanContext(int(OWN, 16), 1, False, trace.TraceFlags(1))


class Tracer:
    def __init__(self):
        self.spans = []

    def start_span(self, name, context, kind, attributes):
        assert name == "generate"
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(Span(parent, attributes))
        return self.spans[-1]


@pytest.fixture
def tracer():
    return Tracer()


async def test_a_request_is_a_part_of_its_callers_trace(tracer):
    async with serving(tracing_with=Tracing(tracer, "fake")) as server:
        await collect(server.inference.GenerateStream(request(request_id="r"), metadata=tuple(CONTEXT.items())))
        async with http_client(server) as http:
            await http.post("/generate", json={"prompt": "ab"}, headers=CONTEXT)
        await server.inference.Generate(request())
        await until(lambda: len(tracer.spans) == 3 and all(span.ended for span in tracer.spans))
    over_grpc, over_http, alone = tracer.spans
    for span in (over_grpc, over_http):
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    assert not alone.parent.is_valid
    found = over_grpc.attributes
    assert found["pilotfish.request_id"] == "r"
    assert found["gen_ai.usage.output_tokens"] == 20
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert over_grpc.events["started"] <= over_grpc.events["first token"]
    assert [span.ended for span in tracer.spans] == [1, 1, 1]
    assert [span.status for span in tracer.spans] == [None] * 3


async def test_refused_cancelled_and_failed_requests_have_an_end_too(tracer):
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine, tracing_with=Tracing(tracer, "fake")) as server:
        with pytest.raises(Exception, match="prompt"):
            await server.inference.Generate(pb.GenerateRequest(prompt=""))
        call = server.inference.GenerateStream(request(stopping=LONG))
        await call.read()
        call.cancel()
        await until(lambda: not server.app.driver.live())
        engine.poison = {9}
        with pytest.raises(Exception, match="poisoned"):
            await server.inference.Generate(request(token_ids=pb.TokenIds(ids=[9])))
        await until(lambda: len(tracer.spans) == 3 and all(span.ended for span in tracer.spans))
    refused, cancelled, failed = tracer.spans
    assert refused.attributes["error.type"] == "InvalidRequest"
    assert failed.attributes["error.type"] == "RequestFailed"
    assert refused.status is failed.status is trace.StatusCode.ERROR
    assert cancelled.attributes["gen_ai.usage.output_tokens"] > 0
    assert [span.ended for span in tracer.spans] == [1, 1, 1]
