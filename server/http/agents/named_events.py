"""A stream of named events: `event: TYPE` and `data: {...}`, as OpenAI's Responses and Anthropic's Messages have it."""

from __future__ import annotations

import json
from contextlib import aclosing
from functools import partial

from starlette.types import Send

from server.admission.admission import Call, Origin
from server.admission.resume import EventIds
from server.admission.stalls import stall_limit
from server.http.agents.answers import AgentAnswer, events_of
from server.http.agents.fields import Json
from server.http.calls import EventStream, in_time, told
from server.http.pieces import CallReader


class NamedEventStream(EventStream):
    """Server-sent events with names and without ids. Nothing follows the answer's own last event."""

    def __init__(
        self, call: Call, answer: AgentAnswer, reader: CallReader, origin: Origin, stall_seconds: float
    ) -> None:
        super().__init__(call, partial(events_of, answer, reader), origin, stall_seconds, EventIds(None), has_ids=False)
        self._answer = answer

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._call.messages()) as messages, stall_limit(self._stall_seconds) as writes:
            try:
                async with in_time(self._origin):
                    async for events in self._render(messages):
                        with writes:
                            await _send(send, events)
            except Exception as error:  # noqa: BLE001  # the status is sent already, so an event must report the error
                with writes:
                    await _send(send, self._answer.fail(told(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, events: list[Json]) -> None:
    body = "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    await send({"type": "http.response.body", "body": body.encode(), "more_body": True})
