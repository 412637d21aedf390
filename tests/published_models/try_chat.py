"""`pilotfish chat` with a published chat model: three turns on a terminal, one of them stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pilotfish.models import published
from tests.client.pseudo_terminal import on_a_terminal
from tests.server.worker.in_process import load_models
from tests.serving import grpc_client, serving, until

pytestmark = pytest.mark.timeout(300)


def talk(address: str, file: Path) -> str:
    """Ask three questions, stop the second answer, save, and leave; return the screen."""
    with on_a_terminal("chat", "--stats", "--address", address) as terminal:
        terminal.read(until="> ")
        terminal.type("What is the capital of France?\n")
        terminal.read(until="cached")
        terminal.read(until="> ")
        terminal.type("Tell me a very long story about a dog.\n")
        terminal.read(until="dog.")  # the question
        terminal.read(until=" dog")  # the story
        terminal.type("\x03")
        terminal.read(until="Stopped.")
        terminal.read(until="> ")
        terminal.type("What is the capital of Italy?\n")
        terminal.read(until="cached")
        terminal.read(until="> ")
        terminal.type(f"/save {file}\n")
        terminal.read(until="Saved")
        terminal.read(until="> ")
        terminal.type("\x04")
        screen = terminal.read_all()
        assert terminal.process.wait(20) == 0
        return screen


async def test_a_conversation_on_a_terminal_whose_second_answer_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    settings = {"target": str(published.model("smollm2")), "threads": 1, "warm_up_seconds": 0.0}
    async with serving(load=load_models, **settings) as server, grpc_client(server) as client:
        await asyncio.to_thread(talk, f"127.0.0.1:{server.app.grpc_port}", file)
        await until(lambda: not server.app.driver.model.engine.load.num_running)
        assert (await client.load()).running_requests == 0
    turns = json.loads(file.read_text("utf-8"))
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 3
    answers = [turn["content"] for turn in turns[1::2]]
    assert "Paris" in answers[0]
    assert "Rome" in answers[2]
    assert 0 < len(answers[1]) < 2000  # what was generated until Ctrl-C
