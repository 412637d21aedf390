"""Libraries that programs call a server with: OpenAI's, Anthropic's, LiteLLM and LangChain.

What they return is what our own gRPC client gets for the same prompt, streamed or not. `make test-clients` runs it.
"""

from __future__ import annotations

import pytest

from pilotfish.models.corpus import held_out_prompts
from tests.clients.environments import MODEL, answers
from tests.clients.scripted import COMMAND, PRINTED

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt[-200:] for prompt in held_out_prompts(3)]
PROMPT = PROMPTS[0]
TOKENS = 24  # as many as the programs ask for
ENOUGH = 600  # tokens for a short object between which a small model may write much white space


@pytest.fixture(scope="module")
def completed(server):
    """What our own client gets for each prompt, decoded plainly and greedily."""
    with server.grpc() as client:
        return [client.generate(prompt, max_tokens=TOKENS, temperature=0.0, speculation="off") for prompt in PROMPTS]


@pytest.fixture(scope="module")
def chatted(server):
    """The answer to the first prompt as a message, without any library: its text and usage."""
    messages = [{"role": "user", "content": PROMPT}]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=TOKENS, temperature=0.0)
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return {"whole": text, "streamed": text, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}


@pytest.fixture(scope="module")
def by_openai(server):
    return answers("openai_calls", url=server.url, model=MODEL, prompts=PROMPTS, most=ENOUGH)


@pytest.fixture(scope="module")
def by_framework(server):
    return answers("framework_calls", url=server.url, model=MODEL, prompts=PROMPTS, most=ENOUGH)


@pytest.fixture(scope="module")
def calls(scripted):
    return answers("tool_calls", url=scripted.url, model=MODEL, result=f"this and that\n{PRINTED}")


def is_verdict(parsed):
    return parsed.keys() == {"answer", "certain"} and parsed["answer"] in ("yes", "no")


def test_openai_lists_the_model(by_openai):
    assert by_openai["models"] == {"listed": [MODEL], "retrieved": MODEL}


def test_openai_completes_prompts(by_openai, server, completed):
    found = by_openai["completions"]
    assert found["whole"] == found["streamed"] == completed[0].text
    assert found["many"] == [completion.text for completion in completed]
    for usage in (found["usage"], found["streamed_usage"]):
        assert usage["prompt_tokens"] == completed[0].outputs[0].finished.usage.prompt_tokens
        assert usage["completion_tokens"] == len(completed[0].token_ids)
    with server.grpc() as client:
        wanted = client.generate(PROMPT, max_tokens=1, temperature=0.0, prompt_logprobs=True).prompt_logprobs
    assert found["echoed"].startswith(PROMPT)
    first, *others = found["echoed_logprobs"][:-1]  # the last one is of the new token
    assert first is None
    assert others == pytest.approx([logprob.logprob for logprob in wanted[1:]], abs=1e-3)


@pytest.mark.parametrize("part", ["chat", "responses"])
def test_openai_converses(by_openai, chatted, part):
    assert by_openai[part] == chatted


@pytest.mark.parametrize("part", ["chat_parsed", "responses_parsed"])
def test_openai_parses_an_answer_into_a_class(by_openai, part):
    assert is_verdict(by_openai[part])


def test_anthropic_gets_messages(server, chatted):
    found = answers("anthropic_calls", url=server.url, model=MODEL, prompt=PROMPT)
    assert found["counted"] == chatted["usage"][0]
    assert found["stop_reason"] == "max_tokens"
    assert {name: found[name] for name in chatted} == chatted
    assert found["streamed_usage"] == found["usage"]


@pytest.mark.parametrize("library", ["litellm", "langchain"])
def test_frameworks_complete_and_converse(by_framework, completed, chatted, library):
    found = by_framework[library]
    assert {"whole": found["chat"], "streamed": found["chat_streamed"], "usage": found["usage"]} == chatted
    assert found["many"] == [completion.text for completion in completed]
    assert library != "langchain" or list(map(is_verdict, found["structured"])) == [True, True]


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("openai", "tool_calls"),
        ("openai streamed", "tool_calls"),
        ("responses", "completed"),
        ("responses streamed", "completed"),
        ("anthropic", "tool_use"),
        ("anthropic streamed", "tool_use"),
        ("litellm", "tool_calls"),
        ("langchain", "tool_calls"),
    ],
)
def test_a_tool_call_and_the_answer_to_its_result(calls, library, reason):
    assert calls[library] == ["run", {"command": COMMAND}, reason, f"The command printed {PRINTED}"]
