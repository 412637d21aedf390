"""Answers of `/v1/responses`: a list of items (reasoning, messages, calls), and the events that tell how it grows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

from pilotfish.v1 import generation_pb2 as pb
from server.formats.base import CallArguments, CallStart, Content, Piece, Reasoning
from server.formats.json_text import is_object
from server.http.agents.answers import AgentAnswer
from server.http.agents.fields import Json
from server.http.errors import HttpError
from server.http.pieces import call_id
from server.http.responses.requests import OfferedFunction, custom_input, sealed

_ERROR_CODES = {429: "rate_limit_exceeded"}  # by status; all others: "server_error"


class OutputItem(ABC):
    """Base of the items. Its events are without the fields that name it, which the answer adds.

    Args:
        item_id: the id of the item.
    """

    prefix: ClassVar[str]  # of ids

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._texts: list[str] = []
        self._status = "in_progress"

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def close(self, status: str) -> None:
        """End the item."""
        self._status = status

    @abstractmethod
    def item(self) -> Json:
        """Return the item as it is now."""

    @abstractmethod
    def opening(self) -> list[Json]:
        """Return the events after the one that adds the item."""

    def add(self, text: str) -> list[Json]:
        """Add text; return its events."""
        self._texts.append(text)
        return [self._delta(text)]

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def closing(self) -> list[Json]:
        """Return the events before the one that ends the item."""


class TextOutput(OutputItem):
    """Base of items with one part, which is a text."""

    event: ClassVar[str]  # what the names of its events begin with
    more: ClassVar[Json]  # fields of its events, besides

    def opening(self) -> list[Json]:
        part = self._part() | {"text": ""}
        return [{"type": "response.content_part.added", "content_index": 0, "part": part}]

    def closing(self) -> list[Json]:
        return [
            {"type": f"{self.event}.done", "content_index": 0, "text": self.text, **self.more},
            {"type": "response.content_part.done", "content_index": 0, "part": self._part()},
        ]

    def _delta(self, text: str) -> Json:
        return {"type": f"{self.event}.delta", "content_index": 0, "delta": text, **self.more}

    @property
    def is_over(self) -> bool:
        """Whether the item has ended."""
        return self._status != "in_progress"

    @abstractmethod
    def _part(self) -> Json: ...


class MessageOutput(TextOutput):
    """A message of the assistant."""

    prefix, event = "msg", "response.output_text"
    more: ClassVar[Json] = {"logprobs": []}

    def item(self) -> Json:
        content = [self._part()] if self.is_over else []
        return {"id": self.id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ReasoningOutput(TextOutput):
    """Reasoning. With `is_sealed` also in the form in which callers send it back that do not show it."""

    prefix, event = "rs", "response.reasoning_text"
    more: ClassVar[Json] = {}

    def __init__(self, item_id: str, *, is_sealed: bool) -> None:
        super().__init__(item_id)
        self._is_sealed = is_sealed

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self._status,
            "summary": [],
            "content": [self._part()] if self.is_over else [],
            "encrypted_content": sealed(self.text) if self._is_sealed and self.is_over else None,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class CallOutput(OutputItem):
    """A call of a function, with the JSON text of its arguments."""

    prefix = "fc"

    def __init__(self, item_id: str, call_id: str, function: OfferedFunction) -> None:
        super().__init__(item_id)
        self._call_id, self._function = call_id, function

    def close(self, status: str) -> None:
        """End the item. It is complete if its arguments are, whatever ended the answer."""
        super().close("completed" if is_object(self.text) else status)

    def item(self) -> Json:
        return self._named("function_call") | {"arguments": self.text}

    def opening(self) -> list[Json]:
        return []

    def closing(self) -> list[Json]:
        done = {"type": "response.function_call_arguments.done", "name": self._function.name, "arguments": self.text}
        return [done]

    def _delta(self, text: str) -> Json:
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def _named(self, kind: str) -> Json:
        item = {
            "id": self.id,
            "type": kind,
            "status": self._status,
            "call_id": self._call_id,
            "name": self._function.name,
        }
        return item if self._function.namespace is None else item | {"namespace": self._function.namespace}


class CustomCallOutput(CallOutput):
    """A call of a custom tool. Its text is known when the JSON around it is complete, so it comes in one piece."""

    prefix = "ctc"

    def item(self) -> Json:
        return self._named("custom_tool_call") | {"input": custom_input(self.text) if self._texts else ""}

    def add(self, text: str) -> list[Json]:
        self._texts.append(text)
        return []

    def closing(self) -> list[Json]:
        text = custom_input(self.text)
        return [
            {"type": "response.custom_tool_call_input.delta", "delta": text},
            {"type": "response.custom_tool_call_input.done", "input": text},
        ]


class ResponsesAnswer(AgentAnswer):
    """An answer.

    Args:
        request_id: what ids of the answer and its items are made of.
        model: the name of the model.
        functions: what the model was told of, by the names that it was told.
        echo: fields of the request that the answer repeats.
        is_sealed: send reasoning also in the form in which it is sent back.
    """

    def __init__(
        self, request_id: str, model: str, functions: dict[str, OfferedFunction], echo: Json, *, is_sealed: bool
    ) -> None:
        self._request_id, self._functions, self._is_sealed = request_id, functions, is_sealed
        self._fields: Json = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            **echo,
        }
        self._status = "in_progress"
        self._usage: Json | None = None
        self._items: list[OutputItem] = []
        self._is_open = False  # the newest item
        self._num_events = 0

    def begin(self) -> list[Json]:
        return self._numbered([self._event("response.created"), self._event("response.in_progress")])

    def add(self, piece: Piece) -> list[Json]:
        match piece:
            case Reasoning(text):
                item_id = self._next_id(ReasoningOutput.prefix)
                begun = self._into(ReasoningOutput(item_id, is_sealed=self._is_sealed))
                return self._numbered([*begun, *self._added(text)])
            case Content(text):
                begun = self._into(MessageOutput(self._next_id(MessageOutput.prefix)))
                return self._numbered([*begun, *self._added(text)])
            case CallStart(index, name):
                return self._numbered(self._begin_call(index, self._functions[name]))
            case CallArguments(text=text):
                return self._numbered(self._added(text))

    def end(self, finished: pb.Finished, reasoning_tokens: int) -> list[Json]:
        is_cut = finished.finish_reason == pb.FINISH_REASON_LENGTH
        self._status = "incomplete" if is_cut else "completed"
        events = self._close(self._status)
        if is_cut:
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
        self._usage = _usage(finished.usage, reasoning_tokens)
        return self._numbered([*events, self._event(f"response.{self._status}")])

    def fail(self, error: HttpError) -> list[Json]:
        self._status = "failed"
        code = _ERROR_CODES.get(error.status, "server_error")
        self._fields["error"] = {"code": code, "message": error.message}
        return self._numbered([*self._close("incomplete"), self._event("response.failed")])

    def whole(self) -> Json:
        output = [item.item() for item in self._items]
        return self._fields | {"status": self._status, "output": output, "usage": self._usage}

    def _event(self, name: str) -> Json:
        return {"type": name, "response": self.whole()}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def _into(self, item: OutputItem) -> list[Json]:
        """Begin an item, unless the newest is of its kind."""
        return [] if self._is_open and type(self._items[-1]) is type(item) else self._begin(item)

    def _begin_call(self, index: int, function: OfferedFunction) -> list[Json]:
        kind = CustomCallOutput if function.is_custom else CallOutput
        return self._begin(kind(self._next_id(kind.prefix), call_id(self._request_id, 0, index), function))

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self._items)}"

    def _begin(self, item: OutputItem) -> list[Json]:
        """End the newest item, and begin this one."""
        events = self._close("completed")
        self._items.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": item.item()}
        return [*events, added, *self._placed(item.opening())]

    def _added(self, text: str) -> list[Json]:
        return self._placed(self._items[-1].add(text))

    def _close(self, status: str) -> list[Json]:
        """End the newest item, if it has not ended."""
        if not self._is_open:
            return []
        self._is_open = False
        newest = self._items[-1]
        newest.close(status)
        done = {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": newest.item()}
        return [*self._placed(newest.closing()), done]

    def _placed(self, events: list[Json]) -> list[Json]:
        """Add the fields that name the newest item."""
        number = len(self._items) - 1
        return [event | {"item_id": self._items[-1].id, "output_index": number} for event in events]


def _usage(usage: pb.Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
