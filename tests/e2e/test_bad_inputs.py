"""A table of bad inputs over both doors on the embedded pair: each is refused as documented, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from contextlib import asynccontextmanager

import grpc
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.v1 import control_pb2
from pilotfish.v1 import generation_pb2 as pb
from tests.e2e.bad_inputs import RAW, every
from tests.server.fake_engine import FakeEngine
from tests.serving import http_client, serving, serving_embedded, until

SETTINGS = {
    "max_model_len": 512,
}
NORMAL = {"prompt": "def mean(values):\n", "stopping": pb.StoppingParams(max_tokens=24)}
JSON = {"content-type": "application/json"}


async def normal_tokens(server):
    """What a good request gets: over gRPC whole and streamed, and over HTTP."""
    whole = (await server.inference.Generate(pb.GenerateRequest(**NORMAL))).outputs[0]
    stream = server.inference.GenerateStream(pb.GenerateRequest(**NORMAL))
    ids = [token async for message in stream for token in message.delta.token_ids]
    async with http_client(server) as http:
        answer = await http.post("/generate", json={"prompt": NORMAL["prompt"], "max_new_tokens": 24})
    assert answer.json()["generated_text"] == whole.text
    assert ids == list(whole.token_ids)
    return ids


async def grpc_problem(server, bad):
    """What is wrong with how gRPC refuses it; None if nothing is."""
    fields = (
        bad.grpc if bad.field == "input" or _has_input(bad.grpc) else {"token_ids": pb.TokenIds(ids=[1])} | bad.grpc
    )
    try:
        await server.inference.Generate(pb.GenerateRequest(**fields), timeout=60)
    except grpc.aio.AioRpcError as error:
        if error.code().name != bad.code:
            return f"{error.code().name}: {error.details()}"
        told = _told_over_grpc(error) if bad.code == "INVALID_ARGUMENT" else [error.details()]
        named = any(line.startswith(bad.field) and bad.said.lower() in line.lower() for line in told)
        return None if named else f"says {told[:3]}"
    return "was served"


def _has_input(fields):
    return bool({"prompt", "token_ids", "messages"} & fields.keys())


def _told_over_grpc(error):
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    found = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(found)
    return [f"{violation.field} {violation.description}" for violation in found.field_violations]


async def http_problem(http, bad):
    """The same over HTTP."""
    body = bad.http
    if not isinstance(body, bytes):
        body = json.dumps({"prompt": [1]} | body).encode()
    answer = await http.post("/v1/completions", content=body, headers=JSON)
    if answer.status_code != bad.status:
        return f"{answer.status_code}: {answer.text[:300]}"
    error = answer.json()["error"]
    if bad.code == "INVALID_ARGUMENT" and not any(f"{bad.param} " in part for part in _parts(error)):
        return f"does not name {bad.param}: {error}"
    return None if bad.said.lower() in error["message"].lower() else f"does not say {bad.said!r}: {error}"


def _parts(error):
    return [f"{error['param']} ", *(part + " " for part in error["message"].split("; "))]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def leaving_nothing(server):
    """Same tokens, pages, tasks and descriptors after as before."""
    tokens = await normal_tokens(server)
    await until(lambda: not server.app.driver.live())
    gc.collect()
    engine = server.app.driver.model.engine
    before = engine.load.free_pages, descriptors(), len(asyncio.all_tasks())
    yield
    assert await normal_tokens(server) == tokens
    await until(lambda: not server.app.driver.live())

    def is_as_before():
        gc.collect()
        return (engine.load.free_pages, descriptors(), len(asyncio.all_tasks())) == before

    await until(is_as_before, 20)
    assert engine.load.free_pages == engine.facts.total_pages
    engine.check_invariants()
    assert not server.app.driver.queue
    assert not server.app.driver.queue.num_tokens


async def test_every_bad_input_is_refused_as_documented_and_nothing_stays_behind():
    async with serving_embedded(**SETTINGS) as server:
        engine = server.app.driver.model.engine
        table = every(engine.facts.limits.vocab_size, engine.facts.limits.max_model_len - 1)
        assert len(table) >= 150
        problems = {}
        async with leaving_nothing(server), http_client(server) as http:
            for number, bad in enumerate(table):
                name = f"{number} {bad.field} {str(bad.grpc or bad.http)[:80]}"
                if bad.grpc is not None and (found := await grpc_problem(server, bad)):
                    problems[f"gRPC {name}"] = found
                if bad.http is not None and (found := await http_problem(http, bad)):
                    problems[f"HTTP {name}"] = found
            problems |= await raw_problems(server, http)
        assert not problems, "\n".join(f"{name}: {found}" for name, found in problems.items())


async def raw_problems(server, http):
    """Bytes that are no message, bodies beyond the limit, methods that do not exist: what is answered otherwise."""
    found = {}
    for method in ("Generate", "GenerateStream"):
        for data in RAW:
            send = server.channel.unary_unary(f"/pilotfish.v1.InferenceService/{method}")
            found[f"{method} {data[:20]!r}"] = await code_of(send(data)) == "INVALID_ARGUMENT"
    large = pb.GenerateRequest(prompt="a" * (5 << 20))
    found["too large"] = await code_of(server.inference.Generate(large)) == "RESOURCE_EXHAUSTED"
    packed = server.inference.Generate(large, compression=grpc.Compression.Gzip)
    found["too large once unpacked"] = await code_of(packed) == "RESOURCE_EXHAUSTED"
    nothing = server.channel.unary_unary("/pilotfish.v1.InferenceService/Nothing")
    found["no such method"] = await code_of(nothing(b"")) == "UNIMPLEMENTED"
    vocab = server.app.driver.model.engine.facts.limits.vocab_size
    found |= {
        "detokenize": await code_of(server.control.Detokenize(control_pb2.DetokenizeRequest(token_ids=[vocab])))
        == "INVALID_ARGUMENT",
        "abort nothing": await code_of(server.control.Abort(control_pb2.AbortRequest())) == "INVALID_ARGUMENT",
        "abort nobody": await code_of(server.control.Abort(control_pb2.AbortRequest(request_id="x" * 10**6)))
        == "NOT_FOUND",
        "tokenize for another": await code_of(server.control.Tokenize(control_pb2.TokenizeRequest(model="other")))
        == "NOT_FOUND",
        "body too large": (await http.post("/generate", content=b"a" * (5 << 20), headers=JSON)).status_code == 413,
        "GET": (await http.get("/generate")).status_code == 405,
        "no such path": (await http.post("/v1/../etc")).status_code == 404,
        "headers too large": (await http.get("/health", headers={"x": "y" * 20_000})).status_code == 431,
    }
    return {name: "has another status" for name, is_right in found.items() if not is_right}


async def code_of(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def read_all(call):
    return [message async for message in call]


# ---------------------------------------------------------------------------------------------- bytes of all kinds

VALID = pb.GenerateRequest(
    prompt="ab",
    request_id="r",
    sampling=pb.SamplingParams(temperature=0.5, top_k=3, logit_bias={1: 2.0}, n=2),
    stopping=pb.StoppingParams(max_tokens=5, stop=["x"]),
    speculation=pb.SpeculationOptions(mode=pb.SPECULATION_MODE_FIXED, num_draft_tokens=2),
).SerializeToString()
BODY = json.dumps(
    {"prompt": "ab", "n": 2, "temperature": 0.5, "logit_bias": {"1": 2.0}, "stop": ["x"], "max_tokens": 5}
)
CODES = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED", "NOT_FOUND", "ALREADY_EXISTS"}
STATUSES = {200, 400, 404}


def damaged(data: bytes, seed: int) -> bytes:
    """The same bytes with a few changed, lost or doubled."""
    rng, changed = random.Random(seed), bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at]
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 9)]
            case _:
                changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


async def survive(inputs: list[bytes], seeds: list[int]) -> None:
    engine = FakeEngine(burst=50)
    engine.max_model_len = 64
    async with serving(engine) as server, http_client(server) as http:
        send = server.channel.unary_unary("/pilotfish.v1.InferenceService/Generate")
        stream = server.channel.unary_stream("/pilotfish.v1.InferenceService/GenerateStream")
        messages = [*inputs, *(damaged(VALID, seed) for seed in seeds)]
        calls = [call for data in messages for call in (code_of(send(data)), code_of(read_all(stream(data))))]
        found = set(await asyncio.gather(*calls))
        assert found <= CODES, found
        bodies = [*inputs, *(damaged(BODY.encode(), seed) for seed in seeds)]
        paths = ("/generate", "/v1/completions", "/v1/chat/completions")
        answers = [await http.post(path, content=body, headers=JSON) for body in bodies for path in paths]
        assert {answer.status_code for answer in answers} <= STATUSES, [a.text for a in answers if a.status_code >= 500]
        await until(lambda: not server.app.driver.live())
        assert engine.load.free_pages == engine.facts.total_pages
        answer = await server.inference.Generate(pb.GenerateRequest(prompt="ab", stopping=NORMAL["stopping"]))
        assert tuple(answer.outputs[0].token_ids) == engine.expected(24)


@settings(max_examples=2)
@given(
    st.lists(st.binary(max_size=200), min_size=10, max_size=10),
    st.lists(st.integers(0, 2**32), min_size=30, max_size=30),
)
def test_no_bytes_bring_it_down(inputs, seeds):
    asyncio.run(survive(inputs, seeds))
