"""Sampling parameters that a checkpoint recommends: which requests they are the defaults of, and bad ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import pytest

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.params import SamplingParams
from pilotfish.models import embedded_target
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.sampling_defaults import SamplingDefaults
from tests.server.fake_engine import FakeEngine, served
from tests.server.http.interfaces import INTERFACES, TEMPLATE, talking
from tests.serving import grpc_client, http_client, serving_embedded

VALUES = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 7,
}  # fmt: skip
AS_PARAMETERS = {name: value for name, value in VALUES.items() if name != "max_new_tokens"} | {"max_tokens": 7}


def defaults_of(target: Path) -> SamplingDefaults:
    return SamplingDefaults.load(EngineConfig(target=str(target), max_output_tokens=100))


def in_folder(folder: Path, text: str) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(text)
    return defaults_of(folder)


def test_a_folder_has_them_in_its_generation_config(tmp_path: Path) -> None:
    assert defaults_of(tmp_path) == SamplingDefaults()
    found = in_folder(tmp_path, json.dumps(VALUES | {"eos_token_id": 2, "do_sample": True, "top_a": None}))
    assert found == SamplingDefaults(AS_PARAMETERS, "generation_config.json")
    assert in_folder(tmp_path, '{"top_k": -1, "top_p": 1, "temperature": null}').values == {"top_k": 0, "top_p": 1}
    assert in_folder(tmp_path, '{"max_new_tokens": 4096}').values == {"max_tokens": 4096}, "more than max_output_tokens"


def test_a_gguf_file_has_them_in_its_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", float("nan"))
    writer.add_string("general.sampling.min_p", "a lot")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = defaults_of(tmp_path / "a.gguf")
    assert (found.values, found.source) == ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "a.gguf")
    assert found.problems == (
        "general.sampling.min_p is 'a lot'; expected a number",
        "general.sampling.penalty_repeat is nan; expected 0.01 to 10",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"temperature": "hot"}', "temperature is 'hot'; expected a number"),
        ('{"temperature": NaN}', "temperature is nan; expected 0 to 100"),
        ('{"temperature": -1}', "temperature is -1; expected 0 to 100"),
        ('{"top_p": 1.5}', "top_p is 1.5; expected 0 to 1"),
        ('{"top_k": true}', "top_k is True; expected an integer"),
        ('{"top_k": 2.5}', "top_k is 2.5; expected an integer"),
        ('{"top_k": -2}', "top_k is -2; expected 0 or more"),
        ('{"min_p": [0.1]}', "min_p is [0.1]; expected a number"),
        ('{"repetition_penalty": 0}', "repetition_penalty is 0; expected 0.01 to 10"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0; expected 1 or more"),
        ("[]", "is not a JSON object"),
        ("{", "cannot be read: "),
    ],
)
def test_a_bad_entry_is_named_and_the_others_are_used(tmp_path: Path, text: str, problem: str) -> None:
    found = in_folder(tmp_path, text if len(text) < 3 else text.replace("{", '{"seed": 5, "min_p": 0.2, ', 1))
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem)
    if text.startswith('{"') and "min_p" not in text:
        assert found.values == {"min_p": 0.2}


def with_defaults(**values):
    engine = FakeEngine()
    model = served(
        engine, chat=ChatTemplate(TEMPLATE, {}), defaults=SamplingDefaults(values or AS_PARAMETERS, "its file")
    )
    return lambda *_: model, engine


async def sampling_of(server, name: str, **fields) -> SamplingParams:
    about = INTERFACES[name]
    body = about.body | fields
    if name == "messages":  # which requires it
        body |= {"max_tokens": 5}
    answer = await server.http.post(about.path, json=body)
    assert answer.status_code == 200, answer.text
    return server.own.requests[-1].sampling


def parameters(sampling: SamplingParams) -> dict:
    return {name: getattr(sampling, name) for name in AS_PARAMETERS}


async def test_they_are_the_defaults_of_openais_and_anthropics_routes(caplog):
    load, own = with_defaults()
    caplog.set_level(logging.INFO)
    async with talking(load=load) as server:
        server.own = own
        [logged] = [r.message for r in caplog.records if r.message.startswith("default sampling parameters")]
        assert logged == "default sampling parameters (its file): " + ", ".join(
            f"{name} {value:g}" for name, value in AS_PARAMETERS.items()
        )
        [listed] = (await server.http.get("/v1/models")).json()["data"]
        assert listed["default_sampling_params"] == AS_PARAMETERS
        for name in ("completions", "chat", "responses", "messages"):
            found = await sampling_of(server, name)
            assert parameters(found) == AS_PARAMETERS | ({"max_tokens": 5} if name == "messages" else {})
            given = await sampling_of(server, name, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
            assert (given.temperature, given.top_p, given.top_k, given.min_p) == (1.0, 1.0, 0, 0.0)
            assert given.repetition_penalty == 1.05
        assert (await sampling_of(server, "completions", max_tokens=3)).max_tokens == 3
        assert (await sampling_of(server, "responses", max_output_tokens=3)).max_tokens == 3
        assert (await sampling_of(server, "completions", min_tokens=9)).max_tokens == 9
        native = await sampling_of(server, "generate")
        assert parameters(native) == parameters(SamplingParams())
        async with grpc_client(server) as client:
            await client.generate("ab")
        assert parameters(own.requests[-1].sampling) == parameters(SamplingParams())


async def test_a_default_of_more_tokens_than_fit_is_cut_to_the_context():
    load, own = with_defaults(max_tokens=1 << 40)
    own.max_model_len = 100
    async with talking(load=load) as server:
        answer = (await server.http.post("/v1/completions", json={"prompt": "ab"})).json()
        assert answer["usage"]["total_tokens"] == 100


async def test_none_keeps_the_defaults_of_the_api(caplog):
    load, own = with_defaults()
    async with talking(load=load, generation_config="none") as server:
        server.own = own
        found = await sampling_of(server, "completions")
        assert parameters(found) == parameters(SamplingParams(temperature=1.0))
        assert (await server.http.get("/v1/models")).json()["data"][0]["default_sampling_params"] == {}
    assert not [record for record in caplog.records if "sampling" in record.message]


async def test_a_checkpoint_is_served_with_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in embedded_target().iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "generation_config.json"
    path.unlink()
    path.write_text(json.dumps({"eos_token_id": 0, "top_k": 1, "max_new_tokens": 12, "min_p": "x"}))
    asked = {"prompt": "def ", "ignore_eos": True}

    async def texts(**options):
        async with serving_embedded(target=str(tmp_path), draft=(), **options) as server, http_client(server) as http:
            answers = [(await http.post("/v1/completions", json=asked | {"seed": seed})).json() for seed in range(6)]
        return {answer["choices"][0]["text"] for answer in answers}, answers[0]["usage"]["completion_tokens"]

    greedy, length = await texts()
    assert (len(greedy), length) == (1, 12)
    assert "generation_config.json: min_p is 'x'; expected a number; it is not used" in caplog.messages
    sampled, _ = await texts(generation_config="none")
    assert len(sampled) > 1
