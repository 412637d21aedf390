"""What a malformed or hostile call does to others: nothing. Each point that was found once has a test by its name.

Sizes are those that froze a server for seconds. No test measures time: each asserts what is not done, or where.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
import threading
import time

import grpc
import pytest
from google.protobuf.message import DecodeError

from engine.errors import InvalidRequest
from engine.text.codec import Codec
from models import embedded_target
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from server.admission.status import refusal
from server.errors import Unavailable
from server.grpc.fields import MAX_ENTRIES, MAX_NUMBERS, require_few
from server.grpc.health import Health
from server.http import bodies, types
from server.http.bodies import MAX_ERRORS, WrongBody, read_body
from server.http.types import ChatBody, CompletionBody, GenerateBody
from server.lifecycle import State
from tests.engine.text.test_codec import CODEC
from tests.server.http.test_gateway import talking
from tests.server.test_generate import collect, request
from tests.server.test_limits import raw
from tests.serving import http_client, serving, until

JSON = "application/json"


def refused(kind, text: str) -> str:
    """What is wrong with a body, as far as it is looked at."""
    with pytest.raises((WrongBody, InvalidRequest)) as error:
        read_body(kind, text.encode("utf-8", "surrogatepass"), JSON)
    wrong = error.value.wrong if isinstance(error.value, WrongBody) else error.value.violations
    assert 0 < len(wrong) <= MAX_ERRORS
    return "; ".join(map(str, wrong))


def many(entry: str, count: int) -> str:
    return ",".join([entry] * count)


# ------------------------------------------------------------------------------------------------------ bodies of HTTP


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (ChatBody, f'{{"messages":[{many("{}", 5000)}]}}', "messages has 5000 entries; the limit is 4096"),
        (ChatBody, f'{{"messages":[{many("{}", 4000)}]}}', "messages[0].role is missing"),
        (
            CompletionBody,
            f'{{"prompt":"x","stop":[{many("7", 100_000)}]}}',
            "stop has 100000 entries; the limit is 1024",
        ),
        (CompletionBody, f'{{"prompt":"x","stop":[{many("7", 1000)}]}}', "stop[0] is 7"),
        (
            GenerateBody,
            json.dumps(dict.fromkeys(map(str, range(100_000)), 1)),
            "body has 100000 fields; the limit is 100",
        ),
        (CompletionBody, f'{{"prompt":[{many("-1", 190_000)}]}}', "prompt[0] is -1"),
        (CompletionBody, f'{{"prompt":[{many("[1]", 150_000)}]}}', "prompt has 150000 entries; the limit is 128"),
        (GenerateBody, f'{{"prompt":"x","guided_choice":[{many("1", 70_000)}]}}', "guided_choice has 70000 entries"),
        (
            GenerateBody,
            f'{{"prompt":"x","logit_bias":{json.dumps({str(i): 1 for i in range(20_000)})}}}',
            "logit_bias has",
        ),
        (GenerateBody, "[" * 100_000, "body is no JSON that can be read: it is too deep"),
        (GenerateBody, '{"seed":' + "9" * 100_000 + "}", "body is no JSON that can be read: a number is too long"),
    ],
)
def test_an_invalid_body_is_not_walked_to_its_end(kind, text, problem):
    assert problem in refused(kind, text)


def test_values_are_counted_before_they_are_made(monkeypatch):
    monkeypatch.setattr(bodies.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "more than 200000 strings" in refused(ChatBody, f'{{"messages":[{many("{}", 500_000)}]}}')
    assert "more than 200000 strings" in refused(GenerateBody, '"' * 500_001)
    for one_text in ('"' + '\\"' * 2_000_000, '"\\'):  # without its end, which the parser would tell
        with pytest.raises(pytest.fail.Exception, match="it was parsed"):
            read_body(GenerateBody, one_text.encode(), JSON)


def test_a_text_is_one_value_whatever_is_in_it():
    body, _ = read_body(GenerateBody, json.dumps({"prompt": '{"a": [1, 2, 3]},\\"' * 100_000}).encode(), JSON)
    assert len(body.prompt) > 1_500_000


async def test_large_bodies_are_read_beside_the_loop(monkeypatch):
    threads = []
    validate = types.GenerateBody.model_validate.__func__

    def watched(cls, found):
        threads.append(threading.current_thread())
        return validate(cls, found)

    monkeypatch.setattr(types.GenerateBody, "model_validate", classmethod(watched))
    async with talking() as server:
        for length, on_loop in ((10, True), (3000, False), (300_000, False)):
            await server.http.post("/generate", json={"prompt": "ab " * (length // 3), "max_new_tokens": 1})
            assert (threads.pop() is threading.main_thread()) == on_loop, length


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt":"x","\\ud800":1}',
        '{"prompt":"x","logit_bias":{"\\ud800":1}}',
        '{"prompt":"x","speculation":{"\\udfff":1}}',
        '{"prompt":"\\ud800"}',
    ],
)
async def test_half_a_surrogate_pair_is_a_fault_of_the_body_wherever_it_stands(text):
    async with talking() as server:
        answer = await server.http.post("/generate", content=text, headers={"content-type": JSON})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid"


async def test_what_is_no_utf8_is_called_so():
    async with talking() as server:
        answer = await server.http.post("/generate", content=b'{"prompt":"\xff"}', headers={"content-type": JSON})
        assert answer.json()["error"]["message"] == "body is no UTF-8: the byte 0xff at 11"


async def test_a_page_of_another_name_cannot_use_a_server_on_loopback(tmp_path):
    paths = ("/metrics", "/health", "/", "/v1/models")
    async with serving() as server, http_client(server) as http:
        for path in paths:
            for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "8.8.8.8", ""):
                answer = await http.get(path, headers={"host": name})
                assert answer.status_code == 403, (path, name)
                assert f"the header Host is {name!r}" in answer.json()["error"]["message"]
            for name in ("localhost", "LOCALHOST:1234", "127.0.0.1:8000", "127.9.9.9", "[::1]:80"):
                assert (await http.get(path, headers={"host": name})).status_code == 200, (path, name)
    tokens = tmp_path / "tokens"
    tokens.write_text("me 0123456789abcdef\n", "utf-8")
    async with serving(token_file=tokens) as server, http_client(server) as http:
        assert (await http.get("/health", headers={"host": "evil.example"})).status_code == 200


async def test_no_page_loads_scripts_of_others():
    async with serving() as server, http_client(server) as http:
        assert [(await http.get(path)).status_code for path in ("/docs", "/redoc")] == [404, 404]
        described = (await http.get("/openapi.json")).json()
        bodies_of = [described["paths"][path]["post"]["requestBody"] for path in ("/generate", "/v1/chat/completions")]
        for reference in set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(bodies_of))):
            part = described
            for step in reference.removeprefix("#/").split("/"):
                part = part[step.replace("~1", "/")]
            assert part["type"] in ("object", "string"), reference


@pytest.mark.parametrize("path", ["/generate", "/nothing", "/health"])
async def test_a_body_that_trickles_loses_its_connection(path, monkeypatch):
    monkeypatch.setattr("server.http.limits.ANSWER_SECONDS", 0.2)
    async with serving(body_seconds=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: 9999\r\n\r\n"
        writer.write(head.encode())

        async def trickle():
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.05)

        trickling = asyncio.ensure_future(trickle())
        try:
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
        finally:
            trickling.cancel()
            writer.close()


async def test_a_body_of_another_type_is_refused():
    async with talking() as server:
        answer = await server.http.post("/generate", content=b'{"prompt":"a"}', headers={"content-type": "text/plain"})
        assert "body is of type 'text/plain'; expected application/json" in answer.json()["error"]["message"]
        assert (await raw(server, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")


# --------------------------------------------------------------------------------------------------- messages of gRPC


def nested(number: int, inside: bytes) -> bytes:
    size, head = len(inside), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + inside


ENTRIES = MAX_ENTRIES + 1


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (nested(5, b"\x0a\0" * ENTRIES), "messages.messages"),
        (nested(7, b"\x1a\0" * ENTRIES), "stopping.stop"),
        (nested(10, nested(4, b"\x0a\0" * ENTRIES)), "guided.choice.choices"),
        (nested(13, b"\x12\0" * ENTRIES), "resume.outputs"),
        (b"\x7a\0" * ENTRIES, "unknown"),
        (nested(4, nested(1, b"\1" * (MAX_NUMBERS + 1))), "token_ids.ids"),
        (nested(7, nested(4, b"\xff\1" * (MAX_NUMBERS + 1))), "stopping.stop_token_ids"),
    ],
)
def test_fields_are_counted_before_a_message_is_parsed(data, field):
    with pytest.raises(InvalidRequest) as error:
        require_few(data, pb.GenerateRequest.DESCRIPTOR)
    assert error.value.violations[0].field == field


def test_what_is_allowed_and_what_is_no_message_pass():
    largest = pb.GenerateRequest(
        prompt="a" * 4_000_000,
        sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0), banned_token_ids=range(100_000)),
        stopping=pb.StoppingParams(stop=["a"] * 16, max_tokens=5),
    ).SerializeToString()
    require_few(largest, pb.GenerateRequest.DESCRIPTOR)
    for broken in (b"\xff" * 1000, largest[:-3], nested(7, b"\x1a\x7f"), b"\x0f", b"\x0a"):
        require_few(broken, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(b"\xff" * 1000)


IDS = [1] * 300_000


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"token_ids": pb.TokenIds(ids=IDS)}, "prompt has 300000 tokens; the limit is 4095"),
        ({"sampling": pb.SamplingParams(banned_token_ids=IDS)}, "sampling.banned_token_ids has 300000 ids"),
        ({"sampling": {"allowed_token_ids": pb.TokenIds(ids=IDS)}}, "sampling.allowed_token_ids has 300000 ids"),
        (
            {"stopping": pb.StoppingParams(stop_token_ids=IDS)},
            "stopping.stop_token_ids has 300000 ids; the limit is 16",
        ),
        ({"stopping": pb.StoppingParams(stop=["a"] * 9000)}, "stopping.stop has 9000 strings; the limit is 16"),
        (
            {"sampling": pb.SamplingParams(logit_bias=dict.fromkeys(range(9000), 1))},
            "sampling.logit_bias has 9000 tokens",
        ),
        ({"guided": {"choice": pb.Choice(choices=["a"] * 9000)}}, "guided.choice has 9000 texts; expected 1 to 4096"),
        ({"prompt": "ab" * 1_000_000}, "prompt has 2000000 bytes"),
    ],
)
async def test_entries_are_counted_before_they_are_copied(server, fields, problem, monkeypatch):
    monkeypatch.setattr(Codec, "encode", lambda *_, **__: (1, 2) if "prompt" not in problem else pytest.fail("encoded"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.inference.Generate(request(**fields))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert problem in error.value.details()


async def test_texts_and_tokens_to_convert_are_bounded(server):
    with pytest.raises(grpc.aio.AioRpcError, match="text has 4000000 bytes, which are more than 4096 tokens"):
        await server.control.Tokenize(control.TokenizeRequest(text="a b " * 1_000_000))
    with pytest.raises(grpc.aio.AioRpcError, match="token_ids has 1000000 ids; the limit is 4096"):
        await server.control.Detokenize(control.DetokenizeRequest(token_ids=[1] * 1_000_000))


def test_a_batch_of_one_has_the_same_tokens():
    codec = Codec.load(embedded_target())
    text = "def f(x):\n    return x  # €\n" * 200
    assert codec.encode(text) == tuple(codec.tokenizer.encode(text).ids)
    assert codec.decode(codec.encode(text)) == text
    assert CODEC.encode("ab", bare=True) == tuple(CODEC.tokenizer.encode("ab", add_special_tokens=False).ids)


@pytest.mark.parametrize("value", [1e-40, 1e-300, 5e-324, 0.0, 0.009, 10.01, float("nan"), float("inf")])
async def test_a_penalty_that_makes_logits_infinite_is_refused(server, value):
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling.repetition_penalty is .*; expected 0.01 to 10"):
        await server.inference.Generate(request(sampling=pb.SamplingParams(repetition_penalty=value)))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


@contextlib.asynccontextmanager
async def watching_without_reading(port: int):
    """A call of `grpc.health.v1.Health/Watch` on a connection whose window has no room for an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x",
              "te": "trailers", "content-type": "application/grpc"}  # fmt: skip
    head = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)))
    writer.write(frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5)))

    async def acknowledge() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                start = await reader.readexactly(9)
                payload, kind, is_answer = await reader.readexactly(int.from_bytes(start[:3])), start[3], start[4] & 1
                if kind in (4, 6) and not is_answer:  # settings and pings
                    writer.write(frame(kind, 1, 0, payload if kind == 6 else b""))

    acknowledging = asyncio.create_task(acknowledge())
    try:
        yield
    finally:
        writer.close()
        await acknowledging


async def test_a_watcher_of_health_that_reads_nothing_delays_neither_recovery_nor_shutdown():
    begun = []
    watch = Health.Watch

    async def watched(self, asked, context):
        begun.append(asked)
        await watch(self, asked, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Health, "Watch", watched)
        async with serving() as server, watching_without_reading(server.app.grpc_port):
            await until(lambda: begun)
            server.engine.gate.clear()
            call = server.inference.GenerateStream(request(stopping=pb.StoppingParams(max_tokens=300)))
            await until(lambda: server.engine.num_running)
            server.engine.fault = RuntimeError("boom")
            server.engine.gate.set()
            _, tokens, _, _ = await collect(call)
            assert tuple(tokens) == server.engine.expected(300)
            server.app.stop()
            async with asyncio.timeout(20):
                await server.running


async def test_who_comes_while_the_engine_restarts_hears_when_to_come_again():
    async with serving() as server:
        await server.app.lifecycle.move(State.RECOVERING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(server.inference.GenerateStream(request()))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        await server.app.lifecycle.move(State.READY)
        assert (await server.inference.Generate(request())).outputs
    assert refusal(Unavailable("DRAINING", "another one may be tried at once")).retry_seconds is None


async def test_large_messages_have_their_turns_and_their_memory_one_by_one():
    async with serving() as server:
        alive, most = 0, 0
        check = server.engine.check

        def watched(asked):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            time.sleep(0.01)
            alive -= 1
            return check(asked)

        server.engine.check = watched
        large = request(prompt=None, token_ids=pb.TokenIds(ids=[30] * 4000), cache_salt="s" * 255)
        padded = large.SerializeToString() + nested(15, bytes(400_000))
        call = server.channel.unary_unary("/pilotfish.v1.InferenceService/Generate")
        await asyncio.gather(*(call(padded) for _ in range(6)))
        assert most == 1
