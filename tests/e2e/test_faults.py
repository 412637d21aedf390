"""One poison request among healthy ones on the embedded pair, failing in each part in turn: it fails alone."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import httpx
import pytest

import client
from engine import target_pass
from engine.text.codec import Codec
from engine.text.matcher import MatcherState
from pilotfish.v1 import generation_pb2 as pb
from server.admission import answers
from server.model import ServedModel
from server.streams import stream
from server.worker import engine_process
from server.worker.remote import EngineProgram
from tests.server.test_life import metric, read_to_end
from tests.serving import http_client, serving_embedded, until

SETTINGS = {
    "max_model_len": 256,
    "speculation": "fixed",
}
# A poison request has the name of its fault for id and for prompt, and fails at it alone.
PROMPTS = ["def mean(values):\n", "import os\n\n", "class Queue:\n"]
SECRET = "a trace that is for the log alone"


def is_poison(sequence, fault) -> bool:
    return sequence.request_id == fault.__name__ and sequence.num_generated >= 4


def in_tokenizer(engine, patch):
    encode = Codec.encode

    def faulty(self, text, **options):
        if in_tokenizer.__name__ in text:
            raise RuntimeError(SECRET)
        return encode(self, text, **options)

    patch.setattr(Codec, "encode", faulty)


def in_target(engine, patch):
    run = target_pass.TargetPass._pass

    def faulty(self, plan, proposal, watch):
        if any(is_poison(s, in_target) for s in plan.sequences):
            raise RuntimeError(SECRET)
        return run(self, plan, proposal, watch)

    patch.setattr(target_pass.TargetPass, "_pass", faulty)


def in_sampler(engine, patch):
    verify_rows = target_pass.verify_rows

    def faulty(fed, logits):
        if any(is_poison(f.sequence, in_sampler) for f in fed):
            raise RuntimeError(SECRET)
        return verify_rows(fed, logits)

    patch.setattr(target_pass, "verify_rows", faulty)


def not_a_number(engine, patch):
    verify_rows = target_pass.verify_rows

    def faulty(fed, logits):
        first = 0
        for f in fed:
            if is_poison(f.sequence, not_a_number):
                logits[first : first + f.num_rows] = math.nan
            first += f.num_rows
        return verify_rows(fed, logits)

    patch.setattr(target_pass, "verify_rows", faulty)


def in_grammar(engine, patch):
    fill = MatcherState.fill

    def faulty(self, mask):
        if len(self._tokens) > 3:
            raise RuntimeError(SECRET)
        fill(self, mask)

    patch.setattr(MatcherState, "fill", faulty)


def in_detokenizer(engine, patch):
    push = stream.OutputStream.push

    def faulty(self, event):
        if self.request_id == in_detokenizer.__name__:
            raise RuntimeError(SECRET)
        return push(self, event)

    patch.setattr(stream.OutputStream, "push", faulty)


def in_serializer(engine, patch):
    for name in ("stream_responses", "response"):
        make = getattr(answers, name)

        def faulty(chunk, asked, *args, make=make, **options):
            if asked.request_id == in_serializer.__name__:
                raise RuntimeError(SECRET)
            return make(chunk, asked, *args, **options)

        patch.setattr(answers, name, faulty)


def in_draft(engine, patch):
    propose = engine.proposers.by_name["model"].propose

    def faulty(sequences, k_each):
        if any(is_poison(s, in_draft) for s in sequences):
            raise RuntimeError(SECRET)
        return propose(sequences, k_each)

    patch.setattr(engine.proposers.by_name["model"], "propose", faulty)


async def tokens_of(connection, prompt, **options):
    events = [event async for event in connection.stream(prompt, max_tokens=24, **options)]
    return [token for event in events if isinstance(event, client.Delta) for token in event.token_ids]


async def all_of(connection, name, **poison):
    """The healthy ones' tokens, and what the poison one got."""
    calls = [tokens_of(connection, prompt) for prompt in PROMPTS]
    calls.append(tokens_of(connection, name + "\n", request_id=name, **poison))
    *healthy, sick = await asyncio.gather(*calls, return_exceptions=True)
    return healthy, sick


IN_ENGINE = [in_target, in_sampler, not_a_number, in_grammar, in_draft]
IN_FRONT_END = [in_tokenizer, in_detokenizer, in_serializer]
APART = "from tests.e2e.test_faults import faulty_engine; faulty_engine()"


def faulty_engine() -> None:
    """The program of an engine's process with all its faults."""

    def load(config, progress, *, is_successor=False):
        model = ServedModel.load(config, progress)
        for fault in IN_ENGINE:
            fault(model.engine, pytest.MonkeyPatch())
        return model

    engine_process.main(load)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "process"])
async def test_a_poison_request_fails_alone_wherever_it_fails(apart, monkeypatch):
    where = {"program": EngineProgram(APART), "engine_process": True} if apart else {}
    async with serving_embedded(**where, **SETTINGS) as server:
        address, engine = f"127.0.0.1:{server.app.grpc_port}", server.app.driver.model.engine
        async with client.AsyncClient(address) as connection:
            wanted, _ = await all_of(connection, "nobody")
            for fault in IN_FRONT_END if apart else [*IN_FRONT_END, *IN_ENGINE]:
                fault(engine, monkeypatch)
            for fault in [*IN_FRONT_END, *IN_ENGINE]:
                options = {"regex": "[a-z ]{60}"} if fault is in_grammar else {}
                healthy, sick = await all_of(connection, fault.__name__, **options)
                assert healthy == wanted, fault.__name__
                if fault is not in_draft:  # that costs drafts alone
                    assert isinstance(sick, client.ServerFaultError), (fault.__name__, sick)
                    assert SECRET not in sick.message
                await until(lambda: not server.app.driver.live())
                await until(lambda: engine.free_pages == engine.total_pages)
            assert (await all_of(connection, "nobody"))[0] == wanted
            assert metric(server, "engine_up") == 1
            assert metric(server, "engine_restarts_total") == 0
            if not apart:
                engine.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
async def test_no_number_of_poison_requests_stops_an_idle_server(apart, monkeypatch):
    where = {"program": EngineProgram(APART), "engine_process": True} if apart else {}
    async with serving_embedded(**where, **SETTINGS) as server:
        address, engine = f"127.0.0.1:{server.app.grpc_port}", server.app.driver.model.engine
        if not apart:
            in_target(engine, monkeypatch)
        async with client.AsyncClient(address) as connection:
            wanted = await tokens_of(connection, PROMPTS[0])
            for _ in range(7):
                with pytest.raises(client.ServerFaultError):
                    await tokens_of(connection, "a", request_id=in_target.__name__)
            assert await tokens_of(connection, PROMPTS[0]) == wanted
            assert metric(server, "engine_restarts_total") == 0


async def test_a_draft_fault_costs_drafts_and_no_token(monkeypatch):
    async with serving_embedded(**SETTINGS | {"proposer": "model"}) as server:
        address, engine = f"127.0.0.1:{server.app.grpc_port}", server.app.driver.model.engine
        async with client.AsyncClient(address) as connection:
            wanted = await all_of(connection, in_draft.__name__)
            in_draft(engine, monkeypatch)
            assert await all_of(connection, in_draft.__name__) == wanted
            assert metric(server, "draft_failures_total") > 0
            assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("stream", [False, True])
async def test_a_poison_request_over_http_hears_no_trace(stream):
    body = {"prompt": "ab", "max_tokens": 4, "stream": stream}
    async with serving_embedded(**SETTINGS) as server, http_client(server) as http:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Codec, "encode", lambda *_args, **_options: 1 / 0)
            answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        assert (await http.post("/v1/completions", json=body)).status_code == 200


# --------------------------------------------------------------------------------------------- signals to a process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Process:
    """`pilotfish serve` on the embedded pair."""

    def __init__(self, *options: str) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        ports = ["--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port), "--threads", "1"]
        program = "from server.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "serve", *ports, "--warm-up-seconds", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def wait_for(self, *states: str) -> None:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.stderr.read().decode()
            try:
                if httpx.get(f"http://127.0.0.1:{self.http_port}/health").json()["status"] in states:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        raise TimeoutError(f"never was {states}")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def code(self) -> int:
        return self.process.wait(60)


@pytest.mark.slow
def test_sigterm_before_the_model_is_loaded_ends_cleanly():
    with Process() as server:
        server.wait_for("starting", "ready")
        server.terminate()
        assert server.code() == 0


@pytest.mark.slow
async def test_sigterm_under_load_cuts_no_stream_and_a_second_one_does():
    with Process("--drain-seconds", "60", "--max-model-len", "1000") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as connection:
            short = [connection.stream(prompt, max_tokens=200, ignore_eos=True) for prompt in PROMPTS]
            request = pb.GenerateRequest(prompt="a", stopping=pb.StoppingParams(max_tokens=900, ignore_eos=True))
            request.speculation.mode = pb.SPECULATION_MODE_OFF  # it must outlast the others
            long = connection._inference.GenerateStream(request)
            assert (await long.read()).delta.token_ids
            begun = await asyncio.gather(*map(anext, short))  # what has not come yet would be refused
            server.terminate()
            for first, stream in zip(begun, short, strict=True):
                events = [first, *[event async for event in stream]]
                assert sum(len(event.token_ids) for event in events if isinstance(event, client.Delta)) == 200
            with pytest.raises(client.UnavailableError):
                await tokens_of(connection, "b")
            server.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_to_end(long)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(server.code) == 0
