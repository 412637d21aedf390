"""The interfaces for text over HTTP, side by side: what asks for an answer, and where its text and its error stand.

And a server to talk to, around a fake engine, with OpenAI's official client and a plain one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from pilotfish.engine.types import DraftStats, FinishedOutput, FinishReason
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.http.bodies import ParsedBody
from pilotfish.server.http.calls import encoded
from pilotfish.server.model import PLAIN
from pilotfish.server.streams.stream import OutputStream
from tests.engine.text.test_codec import CODEC
from tests.server.fake_grammar import FakeCompiler
from tests.serving import http_client, serving

Json = Mapping[str, Any]
on_the_shared_server = pytest.mark.asyncio(loop_scope="module")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "u"}]}
TEMPLATE = """{% for m in messages %}
{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{{- m.content }};
{%- endfor %}"""


@asynccontextmanager
async def talking(engine=None, **options):
    """A server, the official client and a plain one."""
    async with serving(engine, chat=ChatTemplate(TEMPLATE, {}), compile_grammar=FakeCompiler(), **options) as server:
        url = f"http://127.0.0.1:{server.app.http_port}"
        theirs = openai.DefaultAsyncHttpxClient(verify=False)  # for the reason that `http_client` has
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=theirs) as client,
            http_client(server) as http,
        ):
            server.client, server.http = client, http
            yield server


def answering(kind, body, codec=CODEC, model_format=PLAIN, **fields):
    """The answers to a body, of one admitted stream with these fields of its request."""
    facts = SimpleNamespace(limits=SimpleNamespace(eos_token_ids=frozenset()))
    model = SimpleNamespace(codec=codec, format=model_format, engine=SimpleNamespace(facts=facts))
    read = ParsedBody(body, body.request(), body.prompts)
    request = replace(read.request, request_id="r", model="m", **fields)
    return kind(read, [OutputStream(request, None, time.monotonic)], model)


async def whole_of(answers, outputs):
    """The whole answer as its caller reads it."""
    return json.loads(encoded(await answers.answer(outputs)))


async def each(outputs):
    """Whole outputs as the events of a stream."""
    for output in outputs:
        yield output


def ended(reason=FinishReason.STOP, **fields):
    """The end of an output, with these figures."""
    known = {"prompt_tokens": 1, "completion_tokens": 1, "seed": 7, "speculation": None, "stats": DraftStats()}
    return FinishedOutput(reason=reason, **known | fields)


def text_of(engine, count, index=0):
    return CODEC.decode(engine.expected(count, index))


@dataclass(frozen=True, slots=True)
class Interface:
    """One of them.

    Args:
        body: the least that it takes.
        limit: the name of the field for the most tokens.
        text: the text of a whole answer.
        piece: the text of an event.
        error: the error in the last event of a stream.
    """

    path: str
    body: Json
    limit: str
    text: Callable[[Json], str]
    piece: Callable[[Json], str]
    error: Callable[[Json], Json] = lambda event: event["error"]

    def asking(self, tokens: int = 3000, **fields: Any) -> dict[str, Any]:
        """A body that asks for so many tokens."""
        return {**self.body, self.limit: tokens, **fields}


def _choice(event: Json) -> Json:
    [choice] = event.get("choices") or [{"text": "", "delta": {}}]
    return choice


INTERFACES = {
    "generate": Interface(
        "/generate",
        {"prompt": "ab"},
        "max_new_tokens",
        lambda answer: answer["generated_text"],
        lambda e: e.get("text", ""),
    ),
    "completions": Interface(
        "/v1/completions",
        {"prompt": "ab"},
        "max_tokens",
        lambda answer: answer["choices"][0]["text"],
        lambda e: _choice(e)["text"],
    ),
    "chat": Interface(
        "/v1/chat/completions",
        CHAT,
        "max_tokens",
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: _choice(event)["delta"].get("content", ""),
    ),
    "responses": Interface(
        "/v1/responses",
        {"input": "u"},
        "max_output_tokens",
        lambda answer: "".join(part["text"] for item in answer["output"] for part in item["content"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event["response"]["error"],
    ),
    "messages": Interface(
        "/v1/messages",
        CHAT,
        "max_tokens",
        lambda answer: "".join(block["text"] for block in answer["content"]),
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
    ),
}


def events_in(raw: str) -> list[dict[str, Any]]:
    """The events of a stream; where they have names, these are their types."""
    found = []
    for event in raw.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
            assert not name or name == [f"event: {found[-1]['type']}"]
    return found
