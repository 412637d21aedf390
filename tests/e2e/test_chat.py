"""`pilotfish chat` and a real server: the embedded pair, with a template that it does not have."""

from __future__ import annotations

import asyncio
import io

import pytest

from pilotfish.client import chat
from tests.e2e.test_openai import load
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
    async with serving_embedded(load=load, max_model_len=512) as server, grpc_client(server) as client:
        entries = [f'"""{question}"""' for question in QUESTIONS]
        code, out, notes = await piped(server, *entries, flags=["--max-tokens", "24", "--stats"])
        history = [{"role": "user", "content": QUESTIONS[0]}]
        first = (await client.generate(history, max_tokens=24)).text
        history += [{"role": "assistant", "content": first}, {"role": "user", "content": QUESTIONS[1]}]
        second = (await client.generate(history, max_tokens=24)).text
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


async def test_a_model_without_a_template_is_refused(piped):
    async with serving_embedded() as server:
        code, _, notes = await piped(server, "x")
    assert code == 1
    assert "pilotfish-embedded has no chat template; `pilotfish generate PROMPT`" in notes
