"""The turns of a conversation: asked, answered, undone, saved and loaded. Independent of server and terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotfish.client.options import ChatMessage


@dataclass(slots=True)
class Conversation:
    """Turns, oldest first, and the system prompt before them; "" is none."""

    system: str = ""
    turns: list[ChatMessage] = field(default_factory=list)

    @property
    def messages(self) -> list[ChatMessage]:
        """Return all messages, as a request has them."""
        system: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, reasoning: str = "") -> None:
        turn: ChatMessage = {"role": "assistant", "content": text}
        if reasoning:
            turn["reasoning"] = reasoning
        self.turns.append(turn)

    def undo(self) -> str | None:
        """Remove the last question and everything after it; return the question, None if there is none."""
        at = self._last_question
        if at is None:
            return None
        question = self.turns[at]["content"]
        del self.turns[at:]
        return question

    def take_answer(self) -> list[ChatMessage] | None:
        """Remove and return what follows the last question; None if there is no question."""
        at = self._last_question
        if at is None:
            return None
        answer = self.turns[at + 1 :]
        del self.turns[at + 1 :]
        return answer

    @property
    def _last_question(self) -> int | None:
        numbers = range(len(self.turns) - 1, -1, -1)
        return next((number for number in numbers if self.turns[number]["role"] == "user"), None)

    def save(self, path: Path) -> None:
        """Write all messages as a JSON list."""
        path.write_text(f"{json.dumps(self.messages, ensure_ascii=False, indent=1)}\n", "utf-8")

    def load(self, path: Path) -> None:
        """Replace all messages by those of a file: a JSON list, or an object with the list `messages`.

        Raises OSError, or ValueError if the file has another content; then the conversation is unchanged.
        """
        found = json.loads(path.read_text("utf-8"))
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list):
            raise ValueError("expected a JSON list of messages")  # noqa: TRY004 - callers expect one error
        turns = [_message(number, message) for number, message in enumerate(messages)]
        first = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
        self.system, self.turns = first, turns


def _message(number: int, found: Any) -> ChatMessage:
    """Check one message of a file. Raises ValueError."""
    if not isinstance(found, dict):
        raise ValueError(f"message {number} is no JSON object")  # noqa: TRY004 - callers expect one error
    texts = {name: found.get(name, "") for name in ("role", "content", "reasoning")}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise ValueError(f"message {number} has a {wrong[0]} that is no text")
    if unknown := sorted(found.keys() - texts.keys()):
        raise ValueError(f"message {number} has {unknown[0]!r}; expected role, content and reasoning")
    if not texts["role"]:
        raise ValueError(f"message {number} has no role")
    message: ChatMessage = {"role": texts["role"], "content": texts["content"]}
    if texts["reasoning"]:
        message["reasoning"] = texts["reasoning"]
    return message
