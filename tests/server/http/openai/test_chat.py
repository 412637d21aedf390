"""What is peculiar to chat answers: chunks, reasons to stop, and OpenAI's own client; `test_agents` has the rest."""

from __future__ import annotations

import pytest

from pilotfish.v1 import generation_pb2 as pb
from server.formats.base import ReasoningMarks
from server.formats.hermes import HermesFormat
from server.http.openai.bodies import ChatBody
from server.http.openai.chat import ChatAnswers
from tests.server.http import agents
from tests.server.http.interfaces import CHAT, call, on_the_shared_server

ABOUT = agents.DIALECTS["chat"]
HERMES = HermesFormat({}, ReasoningMarks())
BODY = ChatBody.model_validate({"messages": []})
F = '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'


def answers(**choice):
    """Answers with calls of the function f, with this choice of tools."""
    asked = pb.ChatMessages(tools=[pb.Tool(name="f")], tool_choice=pb.ToolChoice(**choice))
    return ChatAnswers(BODY, pb.GenerateRequest(messages=asked), call(model_format=HERMES))


@pytest.mark.parametrize(("has_logprobs", "chunks"), [(True, [2, 1, 1, 2]), (False, [1, 0, 0, 2])])
async def test_a_message_of_which_nothing_is_certain_gives_no_chunk_but_its_logprobs(has_logprobs, chunks):
    async def messages():
        for text in ("<tool_", "call", ">"):
            found = [pb.TokenLogprob()] * has_logprobs
            delta = pb.TokenDelta(token_ids=[1], text=text, text_lengths=[len(text)], logprobs=found)
            yield pb.GenerateStreamResponse(request_id="r", delta=delta)
        yield pb.GenerateStreamResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP))

    assert [len(events) async for events in answers().events(messages())] == chunks


@pytest.mark.parametrize(("is_forced", "reason"), [(True, "stop"), (False, "tool_calls")])
async def test_a_call_that_was_forced_is_no_reason_to_stop(is_forced, reason):
    part, finished = {"text": F, "text_lengths": [len(F)]}, pb.Finished(finish_reason=pb.FINISH_REASON_STOP)

    async def messages():
        yield pb.GenerateStreamResponse(request_id="r", delta=pb.TokenDelta(**part))
        yield pb.GenerateStreamResponse(finished=finished)

    choice = {"name": "f"} if is_forced else {}
    whole = await answers(**choice).answer([pb.GenerateResponse(outputs=[pb.Output(finished=finished, **part)])])
    *_, last = [event async for some in answers(**choice).events(messages()) for event in some]
    assert [made["choices"][0]["finish_reason"] for made in (whole, last)] == [reason] * 2


async def test_a_required_call_that_a_stop_string_cuts_is_no_call_to_run():
    text, finished = F[: F.index('a"}')], pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_string="a")
    output = pb.Output(text=text, text_lengths=[len(text)], finished=finished)
    made = await answers(mode=pb.TOOL_CHOICE_MODE_REQUIRED).answer([pb.GenerateResponse(outputs=[output])])
    [choice] = made["choices"]
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
