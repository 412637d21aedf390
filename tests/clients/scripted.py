"""A whole server around an engine that follows a script, for agents: `python -m tests.clients.scripted OPTIONS`.

Tokenizer, chat template, HTTP and all between are those of the embedded pair. Only the tokens are planned: if a
conversation offers a tool that runs commands, the first answer calls it, and the answer to its result tells that.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import FinishReason, Request
from pilotfish.models import embedded_target
from pilotfish.server.app import App
from pilotfish.server.config import ServerConfig
from pilotfish.server.model import ServedModel, read_text
from tests.server.fake_engine import EOS, FakeEngine, Live
from tests.server.worker import in_process

COMMAND = "echo $((6 * 7))-pilotfish | tee proof.txt"
PRINTED = "42-pilotfish"  # not part of the command: only who ran it can know it
NO_TOOL = "No tool was offered."
_COMMANDS = ("command", "cmd")  # how tools name a parameter that is a command
_LONGEST = 131_072  # tokens of a conversation: an agent's first request has about 20 000


def planned(prompt: str) -> str:
    """The answer to a conversation that the chat template has rendered."""
    last_turn = prompt.rpartition("<|im_start|>assistant\n")[0].rpartition("<|im_start|>assistant\n")[2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last_turn, re.DOTALL)
    if results:
        return f"The command printed {results[-1].strip().splitlines()[-1]}"
    for tool in _tools(prompt):
        properties = tool.get("parameters", {}).get("properties", {})
        for name in _COMMANDS:
            if name in properties:
                call = {"name": tool["name"], "arguments": {name: COMMAND}}
                return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return NO_TOOL


def _tools(prompt: str) -> list[dict]:
    listed = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    found = [json.loads(line) for line in listed[1].splitlines()] if listed else []
    return [tool.get("function", tool) for tool in found]


class ScriptedEngine(FakeEngine):
    """Answers each request with the tokens of its planned text."""

    def __init__(self, config: EngineConfig, codec: Codec) -> None:
        super().__init__(batch=config.max_batch_size)
        self.config = config
        self.vocab_size, self.max_model_len = codec.tokenizer.get_vocab_size(), _LONGEST
        self._codec = codec
        self._plans: dict[str, tuple[int, ...]] = {}

    def add(self, request: Request):
        self._plans[request.request_id] = (*self._codec.encode(planned(self._codec.decode(request.token_ids))), EOS)
        return super().add(request)

    def _fresh(self, output: Live) -> tuple[list[int], FinishReason | None, int | None]:
        fresh: list[int] = []
        done = len(output.tokens)
        for token in self._plans[output.request.request_id][done : done + self._burst]:
            assert output.grammar is None or token == EOS or output.grammar.advance([token]) == 1, "not as planned"
            fresh.append(token)
            if token == EOS:
                return fresh, FinishReason.STOP, EOS
            reason, stop = self._reason(output, done + len(fresh), token)
            if reason is not None:
                return fresh, reason, stop
        return fresh, None, None


def load(config: EngineConfig, _progress) -> ServedModel:
    codec = Codec.load(embedded_target())
    assert codec is not None
    return in_process.around(ScriptedEngine(config, codec), config, *read_text(config))


if __name__ == "__main__":
    settings = ServerConfig.load(sys.argv[1:])
    raise SystemExit(asyncio.run(App(settings, in_process.InProcess(load, settings)).run()))
