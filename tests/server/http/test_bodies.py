"""What is wrong with a body is told at once: types, values, and fields that do not go together."""

from __future__ import annotations

import random

import pytest

from tests.server.http.interfaces import CHAT, on_the_shared_server, talking
from tests.server.test_life import metric

pytestmark = on_the_shared_server

# Each wrong by itself, with the field that the answer has to name; types, then values, then what is not supported.
WRONG = {
    "temperature": ({"temperature": "hot"}, "temperature is 'hot'"),
    "top_k": ({"top_k": -1}, "top_k is -1"),
    "seed": ({"seed": 1.5}, "seed is 1.5"),
    "stop": ({"stop": ["x", 5]}, "stop[1] is 5"),
    "speculation": ({"speculation": {"mode": "often"}}, "speculation.mode is 'often'"),
    "timeout": ({"timeout": 0}, "timeout is 0"),
    "stream": ({"stream": "yes"}, "stream is 'yes'"),
    "temprature": ({"temprature": 1}, "temprature is 1; this field is not supported"),
    "prompt": ({"prompt": {"text": "a"}}, "prompt is {'text': 'a'}"),
    "top_p": ({"top_p": 7.0}, "top_p is 7.0"),
    "min_p": ({"min_p": -0.5}, "min_p is -0.5"),
    "logit_bias": ({"logit_bias": {"5": 200}}, "logit_bias[5] is 200"),
    "banned": ({"banned_token_ids": [10**6]}, "banned_token_ids[0] is 1000000"),
    "priority": ({"priority": 101}, "priority is 101"),
    "structures": ({"guided_regex": "a", "guided_choice": ["b"]}, "body has guided_regex and guided_choice"),
}


async def test_all_violations_are_reported_together():
    async with talking() as server:
        rng = random.Random(5)
        subsets = [set(WRONG), {"prompt"}, *({*rng.sample(sorted(WRONG), rng.randint(1, 6))} for _ in range(40))]
        for names in subsets:
            body = {"prompt": "ab"}
            for name in names:
                body |= WRONG[name][0]
            answer = await server.http.post("/generate", json=body)
            error = answer.json()["error"]
            told = {name for name, (_, said) in WRONG.items() if said in error["message"]}
            assert (answer.status_code, told) == (400, names), error
            assert error["message"].count("; ") >= len(names) - 1
        assert not server.engine.requests
        assert metric(server, "admission_rejected_total", reason="invalid") == len(subsets)


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/generate", {}, {"prompt is missing"}),
        ("/v1/completions", {"prompt": None, "n": 0}, {"prompt is missing", "n is 0"}),
        ("/v1/completions", {"prompt": ["a", 5], "n": 0}, {"prompt[1] is 5", "n is 0"}),
        ("/v1/completions", {"prompt": "", "n": "2"}, {"prompt is empty", "n is '2'"}),
        ("/v1/completions", {"prompt": "a", "stream": 1, "logprobs": 21}, {"stream is 1", "logprobs is 21"}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "top_p": 7}, {"messages[0].content", "top_p is 7"}),
        ("/v1/chat/completions", {"messages": [], "n": "2"}, {"messages", "n is '2'"}),
        (
            "/v1/chat/completions",
            {"messages": 5, "max_tokens": 1, "max_completion_tokens": 2, "top_logprobs": 3},
            {"messages is 5", "max_completion_tokens 2", "top_logprobs is 3"},
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
async def test_without_an_input_the_rest_is_read(server, path, fields, told):
    answer = await server.http.post(path, json=fields)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert {said for said in told if said in message} == told, message
    assert "input is missing" not in message


# Names that the rendering of a conversation has for itself: the template's own variables, functions, what calls it.
TAKEN = ["messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "range"]
TAKEN += ["namespace", "dict", "cycler", "joiner", "lipsum", "raise_exception", "strftime_now"]
FREE = ["self", "loop", "context", "environment", "args", "kwargs", "caller", "super", "class", "None", "a b", "", "é"]
FREE += ["missing", "resolve", "l_0_messages", "__class__", "documents", "template", "vars", "locals", "shared", "cls"]


async def test_variables_of_a_template_have_any_name_that_nothing_else_has(server):
    for name in TAKEN:
        answer = await server.http.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {name: 1}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs"), name
        assert error["message"].startswith(f"chat_template_kwargs has {name!r}, ")
    asked = CHAT | {"chat_template_kwargs": dict.fromkeys(FREE, 1), "max_tokens": 2}
    assert (await server.http.post("/v1/chat/completions", json=asked)).status_code == 200


async def test_what_is_no_object_has_nothing_else_to_tell(server):
    for raw in (b"[]", b"7", b"{", b'"a"', b"null", b""):
        answer = await server.http.post("/generate", content=raw, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), raw


async def test_another_model_goes_first_as_over_grpc(server):
    answer = await server.http.post("/generate", json={"model": "other", "temperature": "hot", "prompt": 5})
    assert answer.status_code == 404


NAMED = {"type": "function", "function": {"name": "f"}}
BADLY_NAMED = {"type": "function", "function": {"name": "a b"}}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]}
NAMELESS = {"type": "json_schema", "json_schema": {"name": "n", "schema": None}}
NOT_SERVED = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
LEGACY = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("chat/completions", {"temperature": -1}, "temperature", "-1.0"),
        ("chat/completions", {"n": 0}, "n", "0"),
        ("chat/completions", {"max_tokens": 10**6}, "max_tokens", "1000000"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ("chat/completions", {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'custom'"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions", "not supported: use tools"),
        ("chat/completions", {"function_call": "auto"}, "function_call", "not supported: use tool_choice"),
        ("chat/completions", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ("chat/completions", {"tool_choice": "often"}, "tool_choice", "'often'"),
        ("chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice", "function goes with"),
        ("chat/completions", {"tool_choice": NAMED}, "tool_choice.function.name", "'f'"),
        ("chat/completions", {"tools": [BADLY_NAMED]}, "tools[0].function.name", "'a b'"),
        ("chat/completions", {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "'tools'"),
        ("chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
        ("chat/completions", {"thinking_budget": 1, "thinking_token_budget": 2}, "body", "token_budget 2; expected"),
        ("chat/completions", {"prediction": {"type": "x", "content": "a"}}, "prediction.type", "'x'"),
        ("chat/completions", {"messages": [PICTURE]}, "messages[0].content[1]", "'image_url'"),
        ("chat/completions", {"messages": [LEGACY]}, "messages[0].function_call", "use tool_calls"),
        ("chat/completions", {"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
        ("chat/completions", {"messages": []}, "messages", "0 messages"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ("chat/completions", {"response_format": NAMELESS}, "response_format.json_schema.schema", "missing"),
        ("chat/completions", {"response_format": NOT_SERVED}, "response_format.json_schema.schema", '{"not": {}}'),
        ("chat/completions", {"guided_regex": "a"}, "guided_regex", "'a'"),
        ("chat/completions", {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "'a'"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", "0; expected 1"),
        ("chat/completions", {"prompt": "a"}, "prompt", "'a'; this field is not supported"),
        ("chat/completions", {"speculation": {"proposer": "oracle"}}, None, "oracle"),
        ("completions", {"prompt": ["a"] * 129}, "prompt", "129 entries; the limit is 128"),
        ("completions", {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ("completions", {"prompt": ["a", [5, 10**6]]}, "prompt[1][1]", "1000000"),
        ("completions", {"prompt": ["a", "b"], "event_ids": True, "stream": True}, "event_ids", "several prompts"),
        ("completions", {"prompt": "a", "event_ids": True, "echo": True}, "event_ids", "echo"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "0"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported: text is generated only after"),
        ("completions", {"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, "body", "outputs.regex"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ("completions", {"prompt": [10**6]}, "prompt[0]", "1000000"),
    ],
    ids=str,
)
async def test_mistakes_are_400_and_name_field_and_value(server, path, fields, param, said):
    base = CHAT if path.startswith("chat") else {"model": "fake"}
    answer = await server.http.post(f"/v1/{path}", json=base | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]
