"""A server for the tests of the agents' routes: a fake engine whose text is planned, and a template that tells all."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx
import openai

from server.chat import ChatTemplate
from server.formats.base import ReasoningMarks
from server.formats.hermes import HermesFormat
from tests.engine.text.test_codec import CODEC, END
from tests.server.fake_engine import FakeEngine, served
from tests.serving import serving

TEMPLATE = """{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}
{%- for name in ('enable_thinking', 'reasoning_effort', 'verbosity') %}
{%- if name == 'enable_thinking' and enable_thinking is defined %}[enable_thinking {{ enable_thinking }}]{% endif %}
{%- if name == 'reasoning_effort' and reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}
{%- if name == 'verbosity' and verbosity is defined %}[verbosity {{ verbosity }}]{% endif %}
{%- endfor %}
{%- for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }} {{ m.name }}{% endif %}>
{%- if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<go>{% endif %}"""

REASONING, SAID, ASKED = "Let me see: ü?", "I look.", {"city": "Oslo", "days": [1, 2]}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ASKED})}\n</tool_call>"
PLAN = f"<think>\n{REASONING}\n</think>\n\n{SAID}\n{CALL}"
[END_ID] = CODEC.encode(END)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def planned(text, *, burst=3):
    """An engine that says this text and ends, where a request has END_ID among its stop tokens."""
    engine = FakeEngine(burst=burst)
    engine.script = (*CODEC.encode(text), END_ID)
    return engine


@asynccontextmanager
async def talking(engine=None, *, chat=TEMPLATE, model_format=None, compile_grammar=None, **options):
    """A server, OpenAI's official client and a plain one. Every request stops at END_ID."""
    engine = engine or planned(SAID)
    template = ChatTemplate(chat, {})
    fields = {"chat": template, "format": model_format or HermesFormat(reasoning=ReasoningMarks())}
    model = served(engine, CODEC, compile_grammar=compile_grammar, **fields)
    async with serving(engine, load=lambda _config, _progress: model, **options) as server:
        url = f"http://127.0.0.1:{server.app.http_port}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            server.client, server.http = client, http
            yield server


def prompt_of(server, number=-1):
    """The text of the prompt of one request."""
    return CODEC.decode(server.engine.requests[number].token_ids)
