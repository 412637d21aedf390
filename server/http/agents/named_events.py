"""A stream of named events: `event: TYPE` and `data: {...}`, as OpenAI's Responses and Anthropic's Messages have it."""

from __future__ import annotations

import json
from functools import partial

from starlette.types import Send

from server.admission.admission import Origin
from server.admission.resume import EventIds
from server.admission.stalls import Writes
from server.http.agents.answers import AgentAnswer, events_of
from server.http.agents.fields import Json
from server.http.calls import Calls, EventStream, write_text
from server.http.errors import HttpError
from server.http.pieces import CallReader


class NamedEventStream(EventStream):
    """Server-sent events with names and without ids. Nothing follows the answer's own last event."""

    last = ""

    def __init__(
        self, calls: Calls, answer: AgentAnswer, reader: CallReader, origin: Origin, stall_seconds: float
    ) -> None:
        render = partial(events_of, answer, reader)
        super().__init__(calls, render, origin, stall_seconds, EventIds(), has_ids=False)
        self._answer = answer

    async def _write_events(self, send: Send, events: list[Json], writes: Writes) -> None:
        with writes:
            await write_text(send, _text(events))

    def _failure(self, error: HttpError) -> str:
        return _text(self._answer.fail(error))


def _text(events: list[Json]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
