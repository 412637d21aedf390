"""Answers that are made of the pieces of one output: the same for a whole answer and for a stream of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from engine.errors import PilotfishError
from pilotfish.v1 import generation_pb2 as pb
from server.errors import Aborted, DeadlinePassed
from server.formats.base import Piece
from server.http.agents.fields import Json
from server.http.errors import HttpError
from server.http.pieces import CallReader

ENDED = frozenset({pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH})  # by itself, as these protocols have it


class AgentAnswer(ABC):
    """Base of the answers. One instance per call: its events tell how it grows, and at the end it is whole."""

    @abstractmethod
    def begin(self) -> list[Json]:
        """Return the events before the first token."""

    @abstractmethod
    def add(self, piece: Piece) -> list[Json]:
        """Add a piece; return its events."""

    @abstractmethod
    def end(self, finished: pb.Finished, reasoning_tokens: int) -> list[Json]:
        """End the answer; return the last events."""

    @abstractmethod
    def fail(self, error: HttpError) -> list[Json]:
        """Return the last events of a stream that ends with an error."""

    @abstractmethod
    def whole(self) -> Json:
        """Return the answer."""


async def events_of(
    answer: AgentAnswer, reader: CallReader, messages: AsyncIterator[pb.GenerateStreamResponse]
) -> AsyncIterator[list[Json]]:
    """Yield the events of each message of a stream."""
    yield answer.begin()
    async for message in messages:
        events = [event for piece in await reader.read(message) for event in answer.add(piece)]
        if message.HasField("finished"):
            if message.finished.finish_reason not in ENDED:
                raise _interrupted(message.finished.finish_reason)
            events += answer.end(message.finished, reader.reasoning_tokens(0))
        if events:
            yield events


async def whole_of(answer: AgentAnswer, reader: CallReader, response: pb.GenerateResponse) -> Json:
    """Return the whole answer: what the events of a stream would have told."""
    async for _ in events_of(answer, reader, _as_stream(response)):
        pass
    return answer.whole()


async def _as_stream(response: pb.GenerateResponse) -> AsyncIterator[pb.GenerateStreamResponse]:
    [output] = response.outputs
    delta = pb.TokenDelta(text=output.text, text_lengths=output.text_lengths)
    yield pb.GenerateStreamResponse(delta=delta, starts_in_reasoning=response.starts_in_reasoning)
    yield pb.GenerateStreamResponse(finished=output.finished)


def _interrupted(reason: pb.FinishReason.ValueType) -> PilotfishError:
    """Return the error in whose place these protocols have no reason to end."""
    if reason == pb.FINISH_REASON_DEADLINE:
        return DeadlinePassed("the time of the request passed before the end")
    return Aborted("the request was ended before its end")
