"""`pilotfish chat` and `pilotfish generate` with a real server: the embedded pair, whose template only joins turns."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

import pytest

from pilotfish.client.terminal import chat, generate
from tests.e2e.test_openai import load
from tests.server.worker.in_process import load_models
from tests.serving import grpc_client, serving_embedded

QUESTIONS = ("def mean(values):\n    ", "\n\ndef median(values):\n    ")


@pytest.fixture
def piped(monkeypatch, capsys):
    """Runs the command with these lines in a pipe; returns its exit code, output and notes."""

    async def run(server, *lines, flags=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["--address", f"127.0.0.1:{server.app.grpc_port}", *flags]
        code = await asyncio.to_thread(chat.main, arguments)
        return code, *capsys.readouterr()

    return run


async def test_the_model_answers_the_whole_history_and_reads_it_from_the_cache(piped):
    async with serving_embedded(load=load, max_model_len=1024) as server, grpc_client(server) as client:
        entries = [f'"""\n{question}"""' for question in QUESTIONS]
        code, out, notes = await piped(server, *entries, flags=["--max-tokens", "200", "--stats"])
        history = [{"role": "user", "content": QUESTIONS[0]}]
        first = (await client.generate(history, max_tokens=200)).text
        history += [{"role": "assistant", "content": first}, {"role": "user", "content": QUESTIONS[1]}]
        second = (await client.generate(history, max_tokens=200)).text
        assert (code, out) == (0, f"{first}\n{second}\n")
        assert (await client.model_info()).has_chat_template
    cached = [int(line.split("; ")[-1].split()[0]) for line in notes.splitlines() if "cached" in line]
    assert cached[0] == 0 < cached[1]


async def test_a_full_context_and_a_timeout_are_sentences_and_drop_nothing(piped):
    async with serving_embedded(load=load, max_model_len=64) as server:
        code, _, notes = await piped(server, QUESTIONS[0].strip(), "more", "/undo", "x = 1", flags=["--stats"])
        assert code == 1
        assert notes.count("The answer ends here because the context of 64 tokens is full.") == 2
        assert "The conversation does not fit into the context of 64 tokens" in notes
        assert len(notes.split("tokens/s")) == 3  # two answers
        code, _, notes = await piped(server, "x", flags=["--timeout", "0.000001"])
        assert code == 1
        assert "exceeds the timeout of 1e-06 s" in notes


def load_without_template(config, progress):
    return replace(load_models(config, progress), chat=None)


async def test_a_model_without_a_template_is_refused_and_generate_continues_a_prompt(piped, capsys):
    async with serving_embedded(load=load_without_template) as server, grpc_client(server) as client:
        code, _, notes = await piped(server, "x")
        text = (await client.generate(QUESTIONS[0], max_tokens=8)).text
        assert not (await client.model_info()).answers_questions
        address = f"127.0.0.1:{server.app.grpc_port}"
        arguments = [QUESTIONS[0], "--max-tokens", "8", "--address", address]
        assert await asyncio.to_thread(generate.main, arguments) == 0
    assert code == 1
    assert "pilotfish-embedded has no chat template; `pilotfish generate PROMPT`" in notes
    assert capsys.readouterr().out == f"{text}\n"


async def test_the_embedded_model_completes_code_in_spite_of_its_template(capsys):
    async with serving_embedded() as server, grpc_client(server) as client:
        assert (await client.model_info()).has_chat_template
        text = (await client.generate(QUESTIONS[0], max_tokens=8)).text
        arguments = [QUESTIONS[0], "--max-tokens", "8", "--address", f"127.0.0.1:{server.app.grpc_port}"]
        assert await asyncio.to_thread(generate.main, arguments) == 0
    assert capsys.readouterr().out == f"{text}\n"
