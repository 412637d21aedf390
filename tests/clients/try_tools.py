"""SmolLM2, whose chat template renders no tools, with two tools: through SDKs and agents. `make test-clients` runs it.

The model decides which function it calls, and under `auto` whether it calls one. Arguments have to be valid, and agents
pass them to Python functions.
"""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from loadtest.process import ServerProcess
from pilotfish.models import published
from tests.clients.conftest import Served
from tests.clients.environments import answers

pytestmark = pytest.mark.timeout(600)

PROMPT = "What is the weather in Paris?"
SCHEMAS = {
    name: {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }
    for name, properties in {"add": {"a": "integer", "b": "integer"}, "weather": {"city": "string"}}.items()
}
WAYS = ("whole", "streamed")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    published.fetch([item for item in published.ITEMS if item.name == "smollm2"])
    log = tmp_path_factory.mktemp("smollm2") / "log"
    with ServerProcess(str(published.model("smollm2")), log=log) as process:
        yield Served(process)


@pytest.fixture(scope="module")
def found(smollm2):
    model = smollm2.get("/v1/models")["data"][0]["id"]
    return answers("two_tools", url=smollm2.url, model=model, prompt=PROMPT)


def check_calls(calls, names=tuple(SCHEMAS)):
    for name, arguments in calls:
        assert name in names
        validate(json.loads(arguments), SCHEMAS[name])


def test_functions_are_in_the_prompt(found):
    tokens = {choice: found["openai"][f"{choice} whole"]["prompt_tokens"] for choice in ("auto", "required", "none")}
    assert tokens["auto"] == tokens["required"] > tokens["none"] + 100


@pytest.mark.parametrize("library", ["openai", "responses", "anthropic"])
def test_choices(found, library):
    ways = [f" {way}" for way in WAYS] if library != "responses" else [""]
    of = {choice: [found[library][choice + way] for way in ways] for choice in ("auto", "none", "required", "named")}
    for answer in of["auto"]:
        check_calls(answer["calls"])
        assert answer["calls"] or answer["content"]
        assert "<tool_call>" not in (answer["content"] or "")
    for answer in of["none"]:
        assert not answer["calls"]
    for choice, names in (("required", tuple(SCHEMAS)), ("named", ("add",))):
        for answer in of[choice]:
            assert len(answer["calls"]) == 1
            assert not answer["content"]
            check_calls(answer["calls"], names)
    for first, *others in of.values():  # streamed as whole
        assert all(other[part] == first[part] for other in others for part in ("calls", "finish"))
        assert all((other["content"] or "") == (first["content"] or "") for other in others)


@pytest.mark.parametrize("library", ["openai", "responses", "anthropic"])
def test_parallel_calls_of_which_the_last_may_be_cut(found, library):
    for way in [f" {way}" for way in WAYS] if library != "responses" else [""]:
        answer = found[library][f"parallel{way}"]
        assert not answer["content"]
        is_cut = answer["finish"] in ("length", "max_tokens", "incomplete")
        check_calls(answer["calls"][:-1] if is_cut else answer["calls"])
        assert answer["calls"]


@pytest.mark.parametrize("library", ["langchain", "pydantic-ai"])
def test_agents_run_functions_and_end(found, library):
    ends = {"langchain": "ai", "pydantic-ai": "response"}[library]
    for choice in ("auto", "required"):
        assert found[library][choice]["roles"][-1] == ends
        check_calls(found[library][choice]["calls"])
    assert found[library]["required"]["calls"], "the first answer had to be a call"
