"""Mistakes in the bodies of OpenAI's routes: each is a 400 that names field and value."""

from __future__ import annotations

import pytest

from tests.server.http.interfaces import CHAT, on_the_shared_server

pytestmark = on_the_shared_server

GENERATION = "add_generation_prompt"
NAMED = {"type": "function", "function": {"name": "f"}}
BADLY_NAMED = {"type": "function", "function": {"name": "a b"}}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]}
LEGACY = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("chat/completions", {"temperature": -1}, "temperature", "-1.0"),
        ("chat/completions", {"top_p": 1.5}, "top_p", "1.5"),
        ("chat/completions", {"n": 0}, "n", "0"),
        ("chat/completions", {"n": -1}, "n", "-1"),
        ("chat/completions", {"max_tokens": 10**6}, "max_tokens", "1000000"),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "body", "max_completion_tokens 2"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "2"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ("chat/completions", {"logit_bias": {"5": 200}}, "logit_bias[5]", "200"),
        ("chat/completions", {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'custom'"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions", "not served: use tools"),
        ("chat/completions", {"function_call": "auto"}, "function_call", "not served: use tool_choice"),
        ("chat/completions", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ("chat/completions", {"tool_choice": "often"}, "tool_choice", "'often'"),
        ("chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice", "function goes with"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ("chat/completions", {"tool_choice": NAMED}, "tool_choice.function.name", "'f'"),
        ("chat/completions", {"tools": [BADLY_NAMED]}, "tools[0].function.name", "'a b'"),
        ("chat/completions", {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "'tools'"),
        ("chat/completions", {"thinking_budget": 3}, "thinking_budget", "3"),
        ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, GENERATION, "true"),
        ("chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
        ("chat/completions", {"thinking_budget": 1, "thinking_token_budget": 2}, "body", "thinking_token_budget, its"),
        ("chat/completions", {"prediction": {"type": "x", "content": "a"}}, "prediction.type", "'x'"),
        ("chat/completions", {"messages": [PICTURE]}, "messages[0].content", "'image_url'"),
        ("chat/completions", {"messages": [LEGACY]}, "messages[0].function_call", "use tool_calls"),
        ("chat/completions", {"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
        ("chat/completions", {"temprature": 1}, "temprature", "not served"),
        ("chat/completions", {"messages": []}, "messages", "0 messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ("chat/completions", {"guided_regex": "a", "guided_choice": ["b"]}, "body", "guided_regex and guided_choice"),
        ("chat/completions", {"guided_regex": "a"}, "guided.regex", "'a'"),
        ("chat/completions", {"speculation": {"mode": "often"}}, "speculation.mode", "'often'"),
        ("chat/completions", {"speculation": {"proposer": "oracle"}}, None, "oracle"),
        ("completions", {"prompt": ["a"] * 129}, "prompt", "129 entries; the limit is 128"),
        ("completions", {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ("completions", {"prompt": ["a", [5, 10**6]]}, "prompt[1][1]", "1000000"),
        ("completions", {"prompt": ["a", 5]}, "prompt[1]", "5"),
        ("completions", {"prompt": ["a", "b"], "n": 0}, "n", "0"),
        ("completions", {"prompt": ["a", "b"], "event_ids": True, "stream": True}, "event_ids", "several prompts"),
        ("completions", {"prompt": "a", "event_ids": True, "echo": True}, "event_ids", "echo"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "0"),
        ("completions", {"prompt": ""}, "prompt", "empty"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "'b'; text after the prompt is not served"),
        ("completions", {"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, "body", "outputs.regex"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of", "not served"),
        ("completions", {"prompt": "a", "logprobs": 21}, "top_logprobs", "21"),
        ("completions", {"prompt": [10**6]}, "token_ids[0]", "1000000"),
        ("completions", {}, "prompt", "missing"),
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
