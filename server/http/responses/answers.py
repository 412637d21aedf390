"""Answers of OpenAI's Responses API: a list of items (reasoning, messages, calls)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from engine.types import FinishedOutput, FinishReason
from server.formats.json_text import object_in
from server.http.agents import AgentAnswer, AnswerPart
from server.http.calls import Events, Json
from server.http.errors import HttpError
from server.http.requests import ParsedBody
from server.http.responses.bodies import ResponsesBody, custom_input, functions, sealed
from server.model import ServedModel
from server.streams.stream import OutputStream

_ERROR_CODES = {429: "rate_limit_exceeded"}  # by status; all others: "server_error"
_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
_LOGPROBS: dict[str, Json] = {"text": {"logprobs": []}, "reasoning": {}}


class ResponsesAnswer(AgentAnswer):
    """An answer of `/v1/responses`."""

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: ResponsesBody = read.body
        self._functions = functions(body)  # by their names in the prompt
        self._is_sealed = "reasoning.encrypted_content" in body.include
        self._fields: Json = {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model,
            "error": None,
            "incomplete_details": None,
            **body.echo(),
            "status": "in_progress",
            "usage": None,
        }
        self._num_events = 0

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        async for made in super().events(events):
            yield self._numbered(made)

    def _begin(self) -> list[Json]:
        return [self._event("response.created"), self._event("response.in_progress")]

    def _opened(self, part: AnswerPart) -> list[Json]:
        added = {"type": "response.output_item.added", "output_index": part.index, "item": self._item(part)}
        if part.kind == "call":
            return [added]
        opening = {"type": "response.content_part.added", "content_index": 0, "part": _content(part)}
        return [added, *self._placed(part, opening)]

    def _grown(self, part: AnswerPart, text: str) -> list[Json]:
        if part.kind != "call":
            delta = {"type": f"{_EVENTS[part.kind]}.delta", "content_index": 0, "delta": text, **_LOGPROBS[part.kind]}
            return self._placed(part, delta)
        if self._functions[part.name].is_custom:  # its text is known when the JSON around it is complete
            return []
        return self._placed(part, {"type": "response.function_call_arguments.delta", "delta": text})

    def _closed(self, part: AnswerPart) -> list[Json]:
        """End an item. A call is complete if its arguments are, whatever ended the answer."""
        text = part.text
        if part.kind == "call" and object_in(text) is not None:
            part.status = "completed"
        if part.kind != "call":
            name, more = _EVENTS[part.kind], _LOGPROBS[part.kind]
            closing = [
                {"type": f"{name}.done", "content_index": 0, "text": text, **more},
                {"type": "response.content_part.done", "content_index": 0, "part": _content(part)},
            ]
        elif self._functions[part.name].is_custom:
            closing = [
                {"type": "response.custom_tool_call_input.delta", "delta": custom_input(text)},
                {"type": "response.custom_tool_call_input.done", "input": custom_input(text)},
            ]
        else:
            name = self._functions[part.name].name
            closing = [{"type": "response.function_call_arguments.done", "name": name, "arguments": text}]
        done = {"type": "response.output_item.done", "output_index": part.index, "item": self._item(part)}
        return [*self._placed(part, *closing), done]

    def _end(self, finished: FinishedOutput, reasoning_tokens: int) -> list[Json]:
        is_cut = finished.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        if is_cut:
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
        self._fields |= {"status": status, "usage": _usage(finished, reasoning_tokens)}
        return [*events, self._event(f"response.{status}")]

    def failure(self, error: HttpError) -> list[Json]:
        code = _ERROR_CODES.get(error.status, "server_error")
        self._fields |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._numbered([*self._close("incomplete"), self._event("response.failed")])

    def _whole(self) -> Json:
        return self._fields | {"output": [*map(self._item, self._parts)]}

    def _event(self, name: str) -> Json:
        return {"type": name, "response": self._whole()}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def _placed(self, part: AnswerPart, *events: Json) -> list[Json]:
        return [event | {"item_id": self._id(part), "output_index": part.index} for event in events]

    def _id(self, part: AnswerPart) -> str:
        prefix = {"text": "msg", "reasoning": "rs"}.get(part.kind)
        if prefix is None:
            prefix = "ctc" if self._functions[part.name].is_custom else "fc"
        return f"{prefix}_{self._request_id}_{part.index}"

    def _item(self, part: AnswerPart) -> Json:
        """Return an item as it is now. Reasoning may be there in the form in which callers send it back, too."""
        item: Callable[..., Json] = partial(dict, id=self._id(part), status=part.status)
        content = [] if part.is_open else [_content(part)]
        if part.kind == "text":
            return item(type="message", role="assistant", content=content)
        if part.kind == "reasoning":
            hidden = sealed(part.text) if self._is_sealed and not part.is_open else None
            return item(type="reasoning", summary=[], content=content, encrypted_content=hidden)
        function = self._functions[part.name]
        named = {"call_id": part.call_id, "name": function.name}
        if function.namespace is not None:
            named["namespace"] = function.namespace
        if function.is_custom:
            return item(type="custom_tool_call", **named, input=custom_input(part.text) if part.texts else "")
        return item(type="function_call", **named, arguments=part.text)


def _content(part: AnswerPart) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(end: FinishedOutput, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_prompt_tokens},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
