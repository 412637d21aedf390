"""Hostile gRPC calls: other callers do not wait for them, and each gets an answer or hears what is wrong with it."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from itertools import cycle
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtest.experiments.hostile import CALLS
from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.text.codec import Codec
from pilotfish.server.admission import check
from pilotfish.server.admission.status import refusal, trailers
from pilotfish.server.errors import Unavailable
from pilotfish.server.grpc.messages import request_of
from pilotfish.server.grpc.server import MAX_ENTRIES, MAX_NUMBERS, require_few
from pilotfish.server.grpc.services import Health
from pilotfish.server.streams.stream import MAX_INTERRUPTIONS
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import CODEC, VOCAB_SIZE
from tests.pauses import pauses
from tests.server.fake_engine import FakeEngine, served
from tests.server.test_generate import collect, error_of, request
from tests.serving import serving, serving_embedded, until

GENERATE = "/pilotfish.v1.InferenceService/Generate"
LIMIT = 4096 - 1  # tokens of a prompt of the fake engine
MOST_PAUSE = 5.0  # seconds; a call that stalls others does so for longer, and a busy machine for less


async def ended_with(server, data, path=GENERATE, **options):
    """The status code of a call with these bytes, and the violations or the details of its error."""
    method = server.channel.unary_unary(path)
    try:
        await method(data, timeout=60, **options)
    except grpc.aio.AioRpcError as error:
        return error.code().name, violations(error) or [error.details()]
    return "OK", []


def violations(error):
    status = status_pb2.Status.FromString(dict(error.trailing_metadata()).get("grpc-status-details-bin", b""))
    found = error_details_pb2.BadRequest()
    told = bool(status.details) and status.details[0].Unpack(found)
    return [f"{v.field} {v.description}" for v in found.field_violations] if told else []


@pytest.mark.slow
async def test_the_largest_calls_neither_stall_the_loop_nor_end_as_faults_of_the_server():
    async with serving(options=[("grpc.max_send_message_length", -1)]) as server:
        for name, call in CALLS.items():
            if name.startswith("gRPC"):
                async with pauses() as seen:
                    code, _ = await ended_with(server, call.make(), call.path)
                assert code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"), name
                assert seen.longest < MOST_PAUSE, name


# ------------------------------------------------------------------------------------------------ texts and tokens


class NeverEncodes(Codec):
    """A tokenizer that is not asked."""

    def encode(self, text, *, bare=False):
        raise AssertionError("encoded")

    def decode(self, ids, **how):
        raise AssertionError("decoded")


async def test_what_cannot_fit_is_refused_by_its_size_before_it_is_converted():
    text, most = "€" * 20_000, LIMIT * len("<|end|>")
    said = f"has 60000 bytes, more than {LIMIT} tokens can have; the limit is {most} bytes"
    async with serving(codec=NeverEncodes(CODEC.tokenizer)) as server:
        code, told = await ended_with(server, pb.GenerateRequest(prompt=text).SerializeToString())
        assert (code, told) == ("INVALID_ARGUMENT", [f"prompt {said}"])
        asked = control.TokenizeRequest(text=text).SerializeToString()
        code, told = await ended_with(server, asked, "/pilotfish.v1.ControlService/Tokenize")
        assert code == "INVALID_ARGUMENT"
        assert told[0].startswith("text has 60000 bytes")
        asked = control.DetokenizeRequest(token_ids=[1] * 5000).SerializeToString()
        ended = await ended_with(server, asked, "/pilotfish.v1.ControlService/Detokenize")
        assert ended == ("INVALID_ARGUMENT", ["token_ids has 5000 ids; the limit is 4096"])
        asked = control.DetokenizeRequest(token_ids=[1] * 4000 + [VOCAB_SIZE, 10**6]).SerializeToString()
        code, told = await ended_with(server, asked, "/pilotfish.v1.ControlService/Detokenize")
        assert (code, told) == (
            "INVALID_ARGUMENT",
            [f"token_ids[4000] is {VOCAB_SIZE}; expected 0 to {VOCAB_SIZE - 1}"],
        )


# ----------------------------------------------------------------------------------------------------------- lists

MANY = 50_000
EXCESSIVE = [  # requests with too many entries, and what is said of them
    ({"token_ids": {"ids": [1] * MANY}}, f"prompt has {MANY} tokens; the limit is {LIMIT}"),
    ({"stopping": {"stop": ["x"] * MANY}}, f"stopping.stop has {MANY} strings; the limit is 16"),
    (
        {"stopping": {"stop_token_ids": range(MANY)}, "resume": {"fingerprint": "fa4e"}},
        f"stopping.stop_token_ids has {MANY} ids; the limit is 16",
    ),
    ({"sampling": {"logit_bias": dict.fromkeys(range(MANY), 1.0)}}, f"logit_bias has {MANY} tokens; the limit is 1024"),
    (
        {"sampling": {"allowed_token_ids": {"ids": [1] * MANY}, "banned_token_ids": [1] * MANY}},
        f"sampling.allowed_token_ids has {MANY} ids; the limit is {VOCAB_SIZE}",
        f"sampling.banned_token_ids has {MANY} ids; the limit is {VOCAB_SIZE}",
    ),
    ({"guided": {"choice": {"choices": ["x"] * MANY}}}, f"guided.choice has {MANY} texts; expected 1 to 4096"),
    ({"messages": {"messages": [{"role": "user"}] * MANY}}, f"messages has {MANY} messages; expected 1 to 4096"),
    (
        {"resume": {"fingerprint": "fa4e", "outputs": [{}] * MANY}},
        f"resume.outputs has {MANY} outputs; sampling.n is 1",
    ),
    (
        {"resume": {"fingerprint": "fa4e", "outputs": [{"token_ids": [1] * MANY}]}},
        f"resume.outputs[0].token_ids has {MANY} tokens; the limit is 4096",
    ),
    # before there was a limit, a tuple of four billion entries was begun
    (
        {"sampling": {"seed": 1, "n": 2**32 - 1}, "resume": {"fingerprint": "fa4e"}},
        f"sampling.n is {2**32 - 1}; expected 1 to 64",
    ),
]


@pytest.mark.parametrize("case", EXCESSIVE, ids=[f"{i}" for i in range(len(EXCESSIVE))])
def test_entries_beyond_a_limit_are_counted_and_not_copied(case):
    fields, *said = case
    message = pb.GenerateRequest(**{"sampling": {"seed": 1}} | fields)
    if message.WhichOneof("input") is None:
        message.prompt = "ab"
    model = served(FakeEngine(), compile_grammar=lambda _: None, chat=SimpleNamespace(render=lambda _: "ab"))
    tracemalloc.start()
    try:
        found = []
        request, prompt, prediction = request_of(message, model, found)
        text = check.text_of(prompt, request, model, found)
        check.prediction_of(prediction, model, found)
        with pytest.raises(InvalidRequest) as refused:
            check.checked(request, prompt, text, model, found)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(problem in str(refused.value) for problem in said)
    assert peak < MANY  # a list of them takes eight bytes for each


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


async def test_a_stream_that_was_interrupted_four_billion_times_goes_on(server):
    resume = pb.Resume(fingerprint="fa4e", interruptions=2**32 - 1, outputs=[pb.ReceivedOutput(token_ids=[5])])
    asked = pb.GenerateRequest(prompt="ab", sampling=pb.SamplingParams(seed=1), resume=resume)
    messages = [message async for message in server.inference.GenerateStream(asked)]
    assert messages[-1].finished.interruptions == MAX_INTERRUPTIONS


# --------------------------------------------------------------------------------------------------------- numbers

LEAST, MOST = 5e-324, 2**32 - 1  # of the positive doubles, and of 32 bits
REALS = {  # field: values that are served, and that are barely not; `tests/e2e/bad_inputs.py` has the rest
    "temperature": ([LEAST, 1e-300, 1e-46, 1e-40, 1e-38, 100.0, -0.0], [-LEAST, 100.1]),
    "top_p": ([0.0, -0.0, LEAST, 1e-300, 1e-40, 1 - 2**-53], [-LEAST, 1.1]),
    "min_p": ([LEAST, 1e-300, 1 - 2**-53, 1.0], [-LEAST, 1.1]),
    "repetition_penalty": ([0.01, 10.0], [LEAST, 1e-38, 0.0099, 10.1]),
    "presence_penalty": ([-2.0, 2.0, LEAST], [-2.1, 2.1]),
    "frequency_penalty": ([-2.0, 2.0, LEAST], [-2.1, 2.1]),
}
WHOLE = [  # the largest numbers of their types
    {"sampling": {"top_k": MOST, "temperature": 1.0, "seed": 2**64 - 1}},
    {"sampling": {"seed": 2**63, "temperature": 1.0, "n": 3}},
    {"output": {"stream_interval": MOST}},
]
DRAFTED = {"mode": pb.SPECULATION_MODE_FIXED, "num_draft_tokens": 8, "proposer": "model"}
SPECULATIONS = [  # of the last one the tokens are others
    pb.SpeculationOptions(mode=pb.SPECULATION_MODE_OFF),
    pb.SpeculationOptions(**DRAFTED, verification=pb.VERIFICATION_COUPLED),
    pb.SpeculationOptions(**DRAFTED, verification=pb.VERIFICATION_REJECTION),
]
OTHERS = [{}, {"temperature": 1.0}, {"temperature": 1e-40, "logit_bias": {5: 100.0, 6: -100.0}}]


def cases(is_served):
    """Requests with extreme numbers, which are served, or are not."""
    others = cycle(OTHERS)
    for field, values in REALS.items():
        for value in values[0 if is_served else 1]:
            yield {"sampling": {"seed": 2**64 - 1} | next(others) | {field: value}}
    for bias in (100.0, -100.0, LEAST) if is_served else (100.1,):
        yield {"sampling": {"logit_bias": {5: bias}}}
    yield from WHOLE if is_served else ()


async def answer(server, fields, speculation=None):
    """The tokens of an answer."""
    fields = {"stopping": pb.StoppingParams(max_tokens=12, ignore_eos=True), "speculation": speculation} | fields
    found = await server.inference.Generate(pb.GenerateRequest(prompt="def f(x):\n    return x x x", **fields))
    return [tuple(output.token_ids) for output in found.outputs]


async def test_every_number_out_of_its_range_is_refused_as_invalid(server):
    for fields in cases(True):
        await answer(server, fields)
    for fields in cases(False):
        error = await error_of(answer(server, fields))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, fields


@pytest.mark.slow
async def test_every_extreme_number_gets_its_answer():
    async with serving_embedded() as server:
        for fields in cases(True):
            asked = (answer(server, fields, speculation) for speculation in SPECULATIONS)
            plain, coupled, _ = await asyncio.gather(*asked)
            assert plain == coupled, f"{fields}: drafts changed the answer"


# ------------------------------------------------------------------------------------------------------- odd bytes


def test_only_a_server_that_comes_back_names_a_time_to_try_again():
    def told(reason):
        refused = refusal(Unavailable(reason, "not now"))
        pairs = dict(trailers(refused, "not now"))
        status, retry = status_pb2.Status.FromString(pairs["grpc-status-details-bin"]), error_details_pb2.RetryInfo()
        found = [detail for detail in status.details if detail.Unpack(retry)]
        return pairs.get("grpc-retry-pushback-ms"), retry.retry_delay.ToMilliseconds() if found else None

    assert told("STARTING") == ("1000", 1000)
    assert told("ENGINE_RESTARTING") == ("500", 500)
    assert {told(reason) for reason in ("DRAINING", "ENGINE_DEAD", "ENGINE_HUNG")} == {(None, None)}


def groups(depth):
    """An unknown field of messages in messages, or groups in groups, and the prompt after it."""
    return b"\x7b" * depth + b"\x7c" * depth + b"\x1a\x01a"


ODD = {  # bytes, and how they end; `tests/e2e/bad_inputs.py` has others
    "a role that is no UTF-8": (b"\x2a\x05\x0a\x03\x0a\x01\xff", "INVALID_ARGUMENT"),
    "a key of a map that is no number": (b"\x1a\x01a\x32\x04\x52\x02\x0a\x00", "OK"),  # to protobuf an unknown field
    "groups in groups": (groups(50), "OK"),
    "too many groups in groups": (groups(1000), "INVALID_ARGUMENT"),
    "a group without an end": (b"\x7b" * 1000, "INVALID_ARGUMENT"),
    "an end without a group": (b"\x7c", "INVALID_ARGUMENT"),
    "an unknown field": (b"\x1a\x01a" + b"\x7a\x80\x80\x40" + bytes(1 << 20), "OK"),
}


async def test_odd_bytes_are_no_fault_of_the_server(server):
    found = {name: await ended_with(server, data) for name, (data, _) in ODD.items()}
    assert {name: code for name, (code, _) in found.items()} == {name: code for name, (_, code) in ODD.items()}
    assert "DecodeError" not in str(found)


async def test_groups_before_a_list_do_not_hide_its_length(server):
    """Two bytes of an unknown group, then 600,000 empty turns, which would take a hundred megabytes."""
    ended = await ended_with(server, b"\x7b\x7c" + nested(5, b"\x0a\x00" * 600_000))
    assert ended == ("INVALID_ARGUMENT", ["unknown is encoded as a group, which this API does not use"])


async def test_metadata_of_the_greatest_size_is_taken_and_more_is_refused():
    async with serving(max_header_bytes=16 << 10) as server:
        asked = pb.GenerateRequest(prompt="ab").SerializeToString()
        pairs = tuple((f"key-{i}", "x") for i in range(300))
        assert (await ended_with(server, asked, metadata=pairs))[0] == "OK"
        code, _ = await ended_with(server, asked, metadata=(("long", "x" * (20 << 10)),))
        assert code == "RESOURCE_EXHAUSTED"
        assert (await ended_with(server, asked))[0] == "OK"


# ----------------------------------------------------------------------------------------------------- many and slow


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
        call = server.channel.unary_unary(GENERATE)
        await asyncio.gather(*(call(padded) for _ in range(6)))
        assert most == 1


async def test_a_watcher_of_health_that_reads_nothing_delays_neither_recovery_nor_shutdown(monkeypatch):
    watch, written = Health.Watch, []

    async def write(answer):
        written.append(answer)
        await asyncio.Event().wait()

    async def unread(self, asked, _):
        await watch(self, asked, SimpleNamespace(write=write))

    monkeypatch.setattr(Health, "Watch", unread)
    async with serving() as server:
        watching = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        await until(lambda: written)
        server.engine.gate.clear()
        call = server.inference.GenerateStream(request(stopping=pb.StoppingParams(max_tokens=300)))
        await until(lambda: server.engine.load.num_running)
        server.engine.fault = RuntimeError("boom")
        server.engine.gate.set()
        _, tokens, _, _ = await collect(call)
        assert tuple(tokens) == server.engine.expected(300)
        assert not watching.done()
        server.app.stop()
        async with asyncio.timeout(20):
            await server.running
