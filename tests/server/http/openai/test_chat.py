"""What is peculiar to chat answers: chunks, reasons to stop, and OpenAI's own client; `test_agents` has the rest."""

from __future__ import annotations

import pytest

from pilotfish.engine.params import Guided, SamplingParams
from pilotfish.engine.types import Logprob, TokenEvent
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.json_calls import HermesFormat
from pilotfish.server.http.openai.answers import ChatAnswers
from pilotfish.server.http.openai.bodies import ChatBody
from tests.server.http import agents
from tests.server.http.interfaces import CHAT, answering, each, ended, events_in, on_the_shared_server, whole_of

ABOUT = agents.DIALECTS["chat"]
HERMES = HermesFormat({}, ReasoningMarks())
F = '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'


def answers(choice="auto"):
    """Answers with calls of the function f, with this choice of tools."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = ChatBody.model_validate({"messages": [], "tools": tools, "tool_choice": choice})
    fields = {"sampling": SamplingParams(guided=Guided(grammar="start: calls"))} if choice == "required" else {}
    return answering(ChatAnswers, body, model_format=HERMES, **fields)


@pytest.mark.parametrize(("has_logprobs", "chunks"), [(True, [2, 1, 1, 2]), (False, [1, 0, 0, 2])])
async def test_an_event_of_which_nothing_is_certain_gives_no_chunk_but_its_logprobs(has_logprobs, chunks):
    async def events():
        for text in ("<tool_", "call", ">"):
            found = (Logprob(0.0),) * has_logprobs
            yield TokenEvent(request_id="r", token_ids=(1,), texts=(text,), logprobs=found)
        yield TokenEvent(request_id="r", finished=ended())

    assert [len(made) async for made in answers().events(events())] == chunks


@on_the_shared_server
async def test_a_stream_has_every_token_if_asked_also_where_its_text_is_held_back(saying):
    agents.say(saying, agents.PLAN)
    body = CHAT | {"stream": True, "max_tokens": 300, "tools": [ABOUT.tool], "stop_token_ids": [agents.END_ID]}
    for has_tokens in (True, False):
        answer = await saying.http.post("/v1/chat/completions", json=body | {"return_tokens": has_tokens})
        events = events_in(answer.text)
        tokens = [t for event in events for choice in event["choices"] for t in choice.get("tokens", ())]
        assert [token["id"] for token in tokens] == list(saying.engine.script) * has_tokens
        assert "".join(token["text"] for token in tokens) == agents.PLAN * has_tokens
        assert [token["from_draft"] for token in tokens[:6]] == [True, True, False] * 2 * has_tokens


@pytest.mark.parametrize(("is_forced", "reason"), [(True, "stop"), (False, "tool_calls")])
async def test_a_call_that_was_forced_is_no_reason_to_stop(is_forced, reason):
    output = TokenEvent(request_id="r", token_ids=(1,), texts=(F,), finished=ended())
    choice = {"type": "function", "function": {"name": "f"}} if is_forced else "auto"
    whole = await whole_of(answers(choice), [output])
    *_, last = [made async for some in answers(choice).events(each([output])) for made in some]
    assert [made["choices"][0]["finish_reason"] for made in (whole, last)] == [reason] * 2


async def test_a_required_call_that_a_stop_string_cuts_is_no_call_to_run():
    text = F[: F.index('a"}')]
    output = TokenEvent(request_id="r", token_ids=(1,), texts=(text,), finished=ended(stop_string="a"))
    [choice] = (await whole_of(answers("required"), [output]))["choices"]
    assert (choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]) == ('{"x": "', "stop")


# ------------------------------------------------------------------------------------------------------ over a port


@on_the_shared_server
async def test_openais_client_puts_a_stream_together_as_the_whole(saying):
    agents.say(saying, f"{agents.PLAN}\n{agents.CALL}")
    asked = CHAT | {"max_tokens": 300, "tools": [ABOUT.tool], "extra_body": {"stop_token_ids": [agents.END_ID]}}
    whole = await saying.client.chat.completions.create(**asked)
    async with saying.client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    for made in (whole.model_dump(), final.model_dump()):
        assert ABOUT.parts(made) == [*agents.PARTS, agents.PARTS[2]]
        assert ABOUT.why(made) == "tool_calls"
    assert final.usage == whole.usage
    assert whole.usage.completion_tokens_details.reasoning_tokens > 2


@pytest.mark.parametrize("given", [{}, {"max_tokens": 7}, {"max_completion_tokens": 7}])
def test_an_answer_without_a_limit_may_fill_the_context(given):
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hello"}]} | given)
    sampling = body.request().sampling
    assert (sampling.max_tokens, sampling.fit_context) == ((7, False) if given else (None, True))


async def test_a_stream_that_is_read_has_no_ids():
    for chat_format, fields, is_refused in (
        (HERMES, {"tools": []}, True),
        (HermesFormat(), {}, True),
        (HermesFormat(), {"tools": []}, False),
        (HermesFormat(), {"tool_choice": "none"}, False),
    ):
        async with agents.talking(model_format=chat_format) as server:
            body = CHAT | {"max_tokens": 3, "tools": [ABOUT.tool], "stream": True, "event_ids": True} | fields
            answer = await server.http.post("/v1/chat/completions", json=body)
            assert (answer.status_code == 400) == is_refused
            assert not is_refused or answer.json()["error"]["param"] == "event_ids"
            header = {"Last-Event-ID": "fa4e-7-0-1:0000000000000000"}
            answer = await server.http.post("/v1/chat/completions", json=body | {"event_ids": False}, headers=header)
            assert (answer.status_code == 400) == is_refused
