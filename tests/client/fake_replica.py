"""A replica with a scripted stream, which fails as it is told and continues streams as the protocol promises."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.rpc import status_pb2

from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc
from tests.client import fake_server

FINGERPRINT, SEED, MAX_TOKENS = "f1", 17, 9
SPECULATION = fake_server.FINISHED.speculation


def delta(index: int, *tokens: int, tail: str = "") -> pb.GenerateStreamResponse:
    """A message whose text has two characters for each token."""
    text, lengths = "".join(f"{token:02}" for token in tokens), [2] * len(tokens)
    message = pb.TokenDelta(index=index, token_ids=tokens, text=text + tail, text_lengths=lengths)
    message.from_draft.extend(token % 2 == 0 for token in tokens)
    return pb.GenerateStreamResponse(delta=message)


def end(index: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(finished=pb.Finished(index=index, finish_reason=pb.FINISH_REASON_STOP))


# Output 1 ends long before output 0, whose last text belongs to no token.
SCRIPT = (
    delta(0, 10, 11),
    delta(1, 20),
    delta(0, 12),
    delta(1, 21, 22),
    end(1),
    delta(0, 13),
    delta(0, tail="!"),
    end(0),
)


def info(fingerprint: str = FINGERPRINT) -> pb.ResumeInfo:
    return pb.ResumeInfo(fingerprint=fingerprint, seed=SEED, max_tokens=MAX_TOKENS, speculation=SPECULATION)


@dataclass(frozen=True)
class Fate:
    """What becomes of one call: this many messages, then a status; None lets the call wait for its end.

    `is_old`: the server knows neither `resume` nor `resume_info`.
    """

    messages: int
    status: status_pb2.Status | None = field(default_factory=fake_server.unavailable)
    is_old: bool = False


@dataclass
class FakeReplica(generation_pb2_grpc.InferenceServiceServicer):
    """Sends the script. Each call takes the next fate; calls without one end well."""

    fates: list[Fate] = field(default_factory=list)
    always: Fate | None = None  # of calls for which no fate is left
    fingerprint: str = FINGERPRINT
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    ended: list[threading.Event] = field(default_factory=list)  # one per call
    address: str = ""

    def Generate(self, request, context):
        fate = self._fate(request, context)
        if fate is not None:
            self._end(fate, context)
        return fake_server.ANSWER

    def GenerateStream(self, request, context):
        fate = self._fate(request, context)
        is_old = fate is not None and fate.is_old
        messages = self._rest(request, context) if request.HasField("resume") and not is_old else list(SCRIPT)
        for number, message in enumerate(messages):
            if fate is not None and number == fate.messages:
                self._end(fate, context)
            if number == 0 and not is_old:
                message = copy.deepcopy(message)
                message.resume_info.CopyFrom(info(self.fingerprint))
            yield message
        if fate is not None:
            self._end(fate, context)

    def _fate(self, request, context):
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.ended.append(threading.Event())
        context.add_callback(self.ended[-1].set)
        return self.fates.pop(0) if self.fates else self.always

    def _end(self, fate, context):
        if fate.status is None:
            self.ended[-1].wait(30)
            context.abort(grpc.StatusCode.CANCELLED, "the caller is gone, or the server")
        context.abort_with_status(fake_server.hinted(fate.status))

    def _rest(self, request, context):
        """What is left of the script; what the caller says that it received has to be a part of it."""
        resume, rest = request.resume, []
        if resume.fingerprint != self.fingerprint:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another model")
        settings = (request.sampling.seed, request.stopping.max_tokens, request.speculation)
        if settings != (SEED, MAX_TOKENS, SPECULATION):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not the settings of the first call")
        received = {output.index: output for output in resume.outputs}
        known = {output.index: list(output.token_ids) for output in resume.outputs}
        for message in SCRIPT:
            part = message.finished if message.HasField("finished") else message.delta
            output = received.get(part.index, pb.ReceivedOutput())
            if output.finished:
                continue
            if message.HasField("finished"):
                rest.append(continued(message, resume.interruptions + 1))
            elif part.token_ids and known.get(part.index, [])[: len(part.token_ids)] == part.token_ids:
                del known[part.index][: len(part.token_ids)]
            elif part.token_ids or not output.tail:
                rest.append(message)
        if any(tokens for index, tokens in known.items() if not received[index].finished):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not the tokens of the script")
        return rest


def continued(message: pb.GenerateStreamResponse, interruptions: int) -> pb.GenerateStreamResponse:
    """The same end, of an output that was interrupted so often."""
    message = copy.deepcopy(message)
    message.finished.interruptions = interruptions
    return message


@contextmanager
def replica(port: int = 0, **settings) -> Iterator[FakeReplica]:
    fake = FakeReplica(**settings)
    service = generation_pb2_grpc.add_InferenceServiceServicer_to_server, fake
    with fake_server.listening(fake, port, service):
        yield fake
