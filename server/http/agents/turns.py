"""Conversations of agents in the form that chat templates expect. Knows no route.

Agents say more kinds of things in more places than a template has roles. So instructions before the model's first turn
are one system message, at the beginning, whatever stands before them; later ones are part of a user's turn, between
marks. Neighbouring turns of the user are one, because many templates want user and assistant to alternate.
"""

from __future__ import annotations

from engine.errors import InvalidRequest, shown
from pilotfish.v1 import generation_pb2 as pb

SEPARATOR = "\n\n"  # between texts that become one
_REMINDER = "<system-reminder>\n{text}\n</system-reminder>"


class Turns:
    """Builds the messages of a conversation, in the order in which its parts are given."""

    def __init__(self) -> None:
        self._turns: list[pb.ChatMessage] = []
        self._instructions: list[str] = []
        self._functions: dict[str, str] = {}  # by the ids of calls
        self._has_answered = False

    def messages(self) -> list[pb.ChatMessage]:
        """Return the messages."""
        if not self._instructions:
            return self._turns
        return [pb.ChatMessage(role="system", content=SEPARATOR.join(self._instructions)), *self._turns]

    def instruct(self, text: str) -> None:
        """Add what the developer says."""
        if self._has_answered:
            self.ask(_REMINDER.format(text=text))
        elif text:
            self._instructions.append(text)

    def ask(self, text: str) -> None:
        """Add what the user says."""
        if self._turns and self._turns[-1].role == "user":
            self._turns[-1].content += SEPARATOR + text
        else:
            self._turns.append(pb.ChatMessage(role="user", content=text))

    def reason(self, text: str) -> None:
        """Add reasoning of the assistant, which begins a turn."""
        newest = self._open()
        if newest is None or newest.content or newest.tool_calls:
            newest = self._begin()
        newest.reasoning = f"{newest.reasoning}{SEPARATOR}{text}" if newest.HasField("reasoning") else text

    def answer(self, text: str) -> None:
        """Add what the assistant says. In a turn it comes before the calls."""
        newest = self._open()
        if newest is None or newest.tool_calls:
            newest = self._begin()
        newest.content = f"{newest.content}{SEPARATOR}{text}" if newest.content else text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the assistant."""
        newest = self._open() or self._begin()
        newest.tool_calls.append(pb.ToolCall(id=call_id, name=name, arguments=arguments))
        self._functions[call_id] = name

    def result(self, field: str, call_id: str, text: str) -> None:
        """Add the result of a call; `field` is where the caller named the call."""
        name = self._functions.get(call_id)
        if name is None:
            raise InvalidRequest.of(field, f"is {shown(call_id)}; no call before it has this id")
        self._turns.append(pb.ChatMessage(role="tool", content=text, name=name, tool_call_id=call_id))

    def _open(self) -> pb.ChatMessage | None:
        return self._turns[-1] if self._turns and self._turns[-1].role == "assistant" else None

    def _begin(self) -> pb.ChatMessage:
        self._turns.append(pb.ChatMessage(role="assistant"))
        self._has_answered = True
        return self._turns[-1]
