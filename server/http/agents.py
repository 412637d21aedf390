"""Shared by the agent protocols (Responses, Messages): bodies, conversations for chat templates, and answers in parts.

The protocols have more kinds of content than chat templates have roles. Instructions before the model's first turn are
joined to one system message at the beginning; later ones become part of a user's turn, between markers. Adjacent user
turns are joined, because many templates require user and assistant to alternate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pilotfish.engine.errors import InvalidRequest, shown
from pilotfish.engine.types import FinishedOutput, FinishReason, Request, TokenEvent
from pilotfish.server.chat import ChatMessage, ToolCall
from pilotfish.server.errors import Aborted, DeadlinePassed
from pilotfish.server.formats.base import CallStart, Content, Piece, Reasoning
from pilotfish.server.http.bodies import OPENAI_TEMPERATURE, GenerationFields, ParsedBody
from pilotfish.server.http.calls import Answers, Events, Json
from pilotfish.server.http.pieces import CallReader, call_id
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream

ENDED = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # without the group of gRPC
SEPARATOR = "\n\n"  # between joined texts
_REMINDER = "<system-reminder>\n{text}\n</system-reminder>"


class AgentBody(GenerationFields):
    """Base of the bodies of these routes, with the fields of `GenerationFields`."""

    no_input = None
    usual_temperature = OPENAI_TEMPERATURE

    def limited(self, max_tokens: int | None) -> Request:
        """Return a request without the conversation.

        Without max_tokens, or if it exceeds the context, an answer may fill the rest of the context, as agents expect.
        """
        request = super().limited(max_tokens)
        return replace(
            request,
            sampling=replace(request.sampling, fit_context=True),
            output=replace(request.output, stop_in_answer=True),
        )


class Turns:
    """Builds the messages of a conversation from its parts, in order."""

    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._instructions: list[str] = []
        self._functions: dict[str, str] = {}  # by the ids of calls

    def messages(self) -> tuple[ChatMessage, ...]:
        if not self._instructions:
            return tuple(self._turns)
        return (ChatMessage(role="system", content=SEPARATOR.join(self._instructions)), *self._turns)

    def instruct(self, text: str) -> None:
        """Add developer instructions."""
        if any(turn.role == "assistant" for turn in self._turns):
            self.ask(_REMINDER.format(text=text))
        elif text:
            self._instructions.append(text)

    def ask(self, text: str) -> None:
        if self._turns and self._turns[-1].role == "user":
            self._turns[-1] = replace(self._turns[-1], content=self._turns[-1].content + SEPARATOR + text)
        else:
            self._turns.append(ChatMessage(role="user", content=text))

    def reason(self, text: str) -> None:
        """Add the assistant's reasoning, which begins a turn."""
        newest = self._assistants(lambda turn: not turn.content and not turn.tool_calls)
        so_far = newest.reasoning
        self._turns[-1] = replace(newest, reasoning=text if so_far is None else f"{so_far}{SEPARATOR}{text}")

    def answer(self, text: str) -> None:
        """Add the assistant's text, which precedes the calls of the turn."""
        newest = self._assistants(lambda turn: not turn.tool_calls)
        self._turns[-1] = replace(newest, content=f"{newest.content}{SEPARATOR}{text}" if newest.content else text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        newest = self._assistants(lambda _: True)
        calls = (*newest.tool_calls, ToolCall(call_id, name, arguments))
        self._turns[-1] = replace(newest, tool_calls=calls)
        self._functions[call_id] = name

    def result(self, field: str, call_id: str, text: str) -> None:
        """Add the result of a call; `field` is where the caller named the call."""
        name = self._functions.get(call_id)
        if name is None:
            raise InvalidRequest.of(field, f"is {shown(call_id)}; no call before it has this id")
        self._turns.append(ChatMessage(role="tool", content=text, name=name, tool_call_id=call_id))

    def _assistants(self, has_room: Callable[[ChatMessage], bool]) -> ChatMessage:
        """Return the last turn if it is an assistant turn that can be extended, else a new one."""
        if not self._turns or self._turns[-1].role != "assistant" or not has_room(self._turns[-1]):
            self._turns.append(ChatMessage(role="assistant"))
        return self._turns[-1]


@dataclass
class AnswerPart:
    """A growing part of an answer. `kind` is reasoning, text or call; a call has an id and a name."""

    index: int
    kind: str
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def text(self) -> str:
        """The text so far; for a call, the JSON text of its arguments."""
        return "".join(self.texts)

    @property
    def is_open(self) -> bool:
        return self.status == "in_progress"


class AgentAnswer(Answers):
    """Base of the answers. Its events describe how an answer grows."""

    last = b""
    are_named = True

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        self._reader = CallReader(read.conversation, streams[0], model.format)
        self._parts: list[AnswerPart] = []

    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        """Return the whole answer: the state after the events of a stream."""
        for output in outputs:
            await self._read(output)
        return self._whole()

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        yield self._begin()
        async for event in events:
            made = await self._read(event)
            if made:
                yield made

    async def _read(self, event: TokenEvent) -> list[Json]:
        made = [json for piece in await self._reader.read(event) for json in self._add(piece)]
        if event.finished is None:
            return made
        if event.finished.reason is FinishReason.DEADLINE:  # these protocols have no such finish reason
            raise DeadlinePassed("the deadline passed before the answer was complete")
        if event.finished.reason not in ENDED:
            raise Aborted("the request was aborted")
        return made + self._end(event.finished, self._reader.reasoning_tokens[0])

    def _add(self, piece: Piece) -> list[Json]:
        """Add a piece to the last part, or to a new one if the last is of another kind."""
        number = len(self._parts)
        if isinstance(piece, CallStart):
            return self._open(AnswerPart(number, "call", call_id(self._request_id, 0, piece.index), piece.name))
        kind = "reasoning" if isinstance(piece, Reasoning) else "text" if isinstance(piece, Content) else "call"
        is_of_newest = self._parts and self._parts[-1].is_open and self._parts[-1].kind == kind
        begun = [] if is_of_newest else self._open(AnswerPart(number, kind))
        self._parts[-1].texts.append(piece.text)
        return [*begun, *self._grown(self._parts[-1], piece.text)]

    def _open(self, part: AnswerPart) -> list[Json]:
        """End the last part, and begin a new one."""
        events = self._close("completed")
        self._parts.append(part)
        return [*events, *self._opened(part)]

    def _close(self, status: str) -> list[Json]:
        """End the last part, if it is open."""
        if not self._parts or not self._parts[-1].is_open:
            return []
        self._parts[-1].status = status
        return self._closed(self._parts[-1])

    # Each returns events: before the first token, at the start of a part, for more of its text, at its end, and at the
    # end of the answer. `_whole` returns the current answer.

    @abstractmethod
    def _begin(self) -> list[Json]: ...
    @abstractmethod
    def _opened(self, part: AnswerPart) -> list[Json]: ...
    @abstractmethod
    def _grown(self, part: AnswerPart, text: str) -> list[Json]: ...
    @abstractmethod
    def _closed(self, part: AnswerPart) -> list[Json]: ...
    @abstractmethod
    def _end(self, finished: FinishedOutput, reasoning_tokens: int) -> list[Json]: ...
    @abstractmethod
    def _whole(self) -> Json: ...
