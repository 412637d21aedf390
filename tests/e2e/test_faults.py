"""One poison request among healthy ones on the embedded pair, failing in each part in turn: it fails alone."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import pytest

from pilotfish import client
from pilotfish.engine import target_pass
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.text.matcher import MatcherState
from pilotfish.server.grpc import messages
from pilotfish.server.streams import stream
from pilotfish.server.worker import engine_process
from pilotfish.server.worker.fork_server import ForkServer
from tests.e2e.seams import before
from tests.server.test_life import metric
from tests.serving import grpc_client, http_client, serving, serving_embedded, until

# A poison request has the name of its fault for id and for prompt, and fails at it alone.
PROMPTS = ["def mean(values):\n", "import os\n\n", "class Queue:\n"]
SECRET = "a trace that is for the log alone"


def is_poison(sequence, fault) -> bool:
    return sequence.request_id.partition("#")[0] == fault.__name__ and sequence.num_generated >= 4


def failing(patch, owner, name, is_met):
    """Let a function fail wherever `is_met` holds for its arguments."""

    def fail(*args, **options):
        if is_met(*args, **options):
            raise RuntimeError(SECRET)

    before(patch, owner, name, fail)


def in_tokenizer(engine, patch):
    failing(patch, Codec, "encode", lambda _codec, text, **_: in_tokenizer.__name__ in text)


def in_target(engine, patch):
    failing(
        patch, target_pass.TargetPass, "_pass", lambda _self, works, *_: _any((w.sequence for w in works), in_target)
    )


def in_sampler(engine, patch):
    failing(patch, target_pass, "verify_rows", lambda fed, _: _any((f.sequence for f in fed), in_sampler))


def _any(sequences, fault) -> bool:
    return any(is_poison(sequence, fault) for sequence in sequences)


def not_a_number(engine, patch):
    def spoil(fed, logits):
        first = 0
        for f in fed:
            if is_poison(f.sequence, not_a_number):
                logits[first : first + f.num_rows] = math.nan
            first += f.num_rows

    before(patch, target_pass, "verify_rows", spoil)


def in_grammar(engine, patch):
    failing(patch, MatcherState, "fill", lambda state, _mask: len(state._tokens) > 3)


def in_detokenizer(engine, patch):
    failing(patch, stream.OutputStream, "push", lambda self, _: self.request_id == in_detokenizer.__name__)


def in_serializer(engine, patch):
    failing(patch, messages, "_of_event", lambda _, asked: asked.request_id == in_serializer.__name__)
    failing(patch, messages, "response", lambda stream: stream.request_id == in_serializer.__name__)


def in_draft(engine, patch):
    failing(
        patch,
        engine.proposers.by_name["model"],
        "propose",
        lambda works, _: _any((w.sequence for w in works), in_draft),
    )


async def tokens_of(connection, prompt, **options):
    events = [event async for event in connection.stream(prompt, max_tokens=16, **options)]
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
        engine = engine_process.load_engine(config, progress, is_successor=is_successor)
        for fault in IN_ENGINE:
            fault(engine, pytest.MonkeyPatch())
        return engine

    engine_process.main(load)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "process"])
async def test_a_poison_request_fails_alone_wherever_it_fails(apart, monkeypatch):
    """And no number of them stops the server."""
    where = {"start_forks": partial(ForkServer, APART)} if apart else {}
    settings = {"max_model_len": 256, "speculation": "fixed", "proposer": "model"}
    async with serving_embedded(**where, **settings) as server, grpc_client(server) as connection:
        engine = server.app.driver.model.engine
        wanted, _ = await all_of(connection, "nobody")
        undrafted = await tokens_of(connection, in_draft.__name__ + "\n")
        for fault in IN_FRONT_END if apart else [*IN_FRONT_END, *IN_ENGINE]:
            fault(engine, monkeypatch)
        for fault in [*IN_FRONT_END, *IN_ENGINE]:
            options = {"regex": "[a-z ]{60}"} if fault is in_grammar else {}
            healthy, sick = await all_of(connection, fault.__name__, **options)
            assert healthy == wanted, fault.__name__
            if fault is in_draft:  # that costs drafts alone
                assert sick == undrafted
                assert metric(server, "draft_failures_total") > 0
            else:
                assert isinstance(sick, client.ServerFaultError), (fault.__name__, sick)
                assert SECRET not in sick.message
            await until(lambda: not server.app.driver.live())
            await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        for _ in range(7):  # more in a row than crashes that end a server, and nobody beside them
            with pytest.raises(client.ServerFaultError):
                await tokens_of(connection, "a", request_id=in_target.__name__)
        assert (await all_of(connection, "nobody"))[0] == wanted
        assert metric(server, "engine_up") == 1
        assert metric(server, "engine_restarts_total") == 0
        if not apart:
            engine.check_invariants()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_poison_request_over_http_hears_no_trace(stream):
    body = {"prompt": "ab", "max_tokens": 4, "stream": stream}
    async with serving() as server, http_client(server) as http:
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, Codec, "encode", lambda *_, **__: True)
            answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        assert (await http.post("/v1/completions", json=body)).status_code == 200
