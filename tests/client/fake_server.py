"""A real gRPC server on loopback with scripted answers, so that the client is tested over a real wire."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pilotfish.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

FINISHED = generation_pb2.Finished(
    finish_reason=generation_pb2.FINISH_REASON_STOP,
    stop_string="\n\n",
    usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=4),
    speculation_stats=generation_pb2.SpeculationStats(
        rounds=2, drafted=8, accepted=2, accepted_per_position=[2, 0, 0, 0], acceptance_length=2.0, gain_ratio=1.5
    ),
    timing=generation_pb2.Timing(queue_seconds=0.5, time_to_first_token_seconds=0.75, total_seconds=2.5),
    seed=2**64 - 1,
    speculation=generation_pb2.SpeculationOptions(
        mode=generation_pb2.SPECULATION_MODE_AUTO,
        num_draft_tokens=4,
        proposer="model",
        verification=generation_pb2.VERIFICATION_COUPLED,
    ),
)
EVENTS = tuple(
    generation_pb2.GenerateStreamResponse(delta=delta)
    for delta in (
        generation_pb2.TokenDelta(token_ids=[5, 6], text=" retürn", from_draft=[True, False], text_lengths=[4, 3]),
        generation_pb2.TokenDelta(token_ids=[7, 8], text=" a+b", from_draft=[True, False], text_lengths=[2, 1]),
    )
)
OUTPUT = generation_pb2.Output(
    text=" retürn a+b", token_ids=[5, 6, 7, 8], from_draft=[True, False] * 2, finished=FINISHED
)
ANSWER = generation_pb2.GenerateResponse(request_id="r1", model="tiny", outputs=[OUTPUT])


MARKS = control_pb2.ReasoningMarks(begin="<think>", end="</think>")


def said(*texts: str) -> list[generation_pb2.GenerateStreamResponse]:
    """A stream of these texts, one token each."""
    deltas = (
        generation_pb2.TokenDelta(token_ids=[9], text=text, from_draft=[False], text_lengths=[len(text)])
        for text in texts
    )
    return [generation_pb2.GenerateStreamResponse(delta=delta) for delta in deltas]


def refusal(code: grpc.StatusCode, message: str = "", *details) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message or code.name)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def invalid(**problems: str) -> status_pb2.Status:
    """INVALID_ARGUMENT with one violation per problem."""
    violation = error_details_pb2.BadRequest.FieldViolation
    violations = [violation(field=name, description=text) for name, text in problems.items()]
    details = error_details_pb2.BadRequest(field_violations=violations)
    return refusal(grpc.StatusCode.INVALID_ARGUMENT, "2 problems", details)


def full(seconds: float) -> status_pb2.Status:
    """RESOURCE_EXHAUSTED, to come again after this long."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(round(1000 * seconds))
    return refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry)


def unavailable(reason: str = "") -> status_pb2.Status:
    """UNAVAILABLE: from a server of ours with this reason, or as a broken connection has it."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="pilotfish")] if reason else []
    return refusal(grpc.StatusCode.UNAVAILABLE, "gone", *details)


CLOSING = refusal(grpc.StatusCode.CANCELLED)  # what gRPC itself says of a call that reaches a server while it stops


class Health(health.HealthServicer):
    """Serves, unless told otherwise; remembers how long its callers would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float] = []
        self.serves(True)

    def serves(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self.set("", status)

    def Check(self, request, context):
        self.deadlines.append(context.time_remaining())
        return super().Check(request, context)


@dataclass
class FakeServer(generation_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer):
    """Answers with what it holds and remembers what it was asked."""

    status: status_pb2.Status | None = None  # answer with this instead
    admits: int = 0  # calls before `status` counts
    hold: bool = False  # stream one delta, then wait for the call's end
    answer: generation_pb2.GenerateResponse = field(default_factory=lambda: ANSWER)
    events: list[generation_pb2.GenerateStreamResponse] = field(default_factory=lambda: list(EVENTS))
    finished: generation_pb2.Finished = field(default_factory=lambda: copy.deepcopy(FINISHED))
    requests: list[object] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    refusals: list[status_pb2.Status] = field(default_factory=list)  # answer with these first, one each
    call_ended: threading.Event = field(default_factory=threading.Event)
    health: Health = field(default_factory=Health)
    has_chat_template: bool = False
    marks: control_pb2.ReasoningMarks | None = None
    address: str = ""

    def Generate(self, request, context):
        return self._answer(request, context, self.answer)

    def GenerateStream(self, request, context):
        self._admit(request, context)
        context.add_callback(self.call_ended.set)
        for event in self.events:
            yield event
            if self.hold:
                self.call_ended.wait(30)
                return
        yield generation_pb2.GenerateStreamResponse(finished=self.finished)

    def GetServerInfo(self, request, context):
        return self._answer(request, context, control_pb2.GetServerInfoResponse(state=control_pb2.SERVER_STATE_READY))

    def GetModelInfo(self, request, context):
        info = control_pb2.GetModelInfoResponse(model="tiny", proposers=["model", "ngram"], eos_token_ids=[0])
        info.speculation.CopyFrom(FINISHED.speculation)
        info.has_chat_template, info.max_model_len = self.has_chat_template, 64
        if self.marks is not None:
            info.reasoning_marks.CopyFrom(self.marks)
        return self._answer(request, context, info)

    def GetLoad(self, request, context):
        load = control_pb2.GetLoadResponse(running_requests=1, waiting_requests=2, total_pages=64, free_pages=63)
        return self._answer(request, context, load)

    def Abort(self, request, context):
        return self._answer(request, context, control_pb2.AbortResponse(aborted_requests=7 if request.all else 1))

    def Tokenize(self, request, context):
        return self._answer(request, context, control_pb2.TokenizeResponse(token_ids=map(ord, request.text)))

    def Detokenize(self, request, context):
        text = "".join(map(chr, request.token_ids))
        return self._answer(request, context, control_pb2.DetokenizeResponse(text=text))

    def _answer(self, request, context, answer):
        self._admit(request, context)
        return answer

    def _admit(self, request, context):
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusals:
            context.abort_with_status(hinted(self.refusals.pop(0)))
        if self.status is not None and len(self.requests) > self.admits:
            context.abort_with_status(rpc_status.to_status(self.status))


def hinted(status: status_pb2.Status) -> grpc.Status:
    """With the hint in the form that gRPC's own retries obey, as a server of ours sends it, too."""
    plain, retry = rpc_status.to_status(status), error_details_pb2.RetryInfo()
    pauses = [
        ("grpc-retry-pushback-ms", str(retry.retry_delay.ToMilliseconds())) for d in status.details if d.Unpack(retry)
    ]
    return plain._replace(trailing_metadata=(*plain.trailing_metadata, *pauses))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def listening(fake, port: int, *services) -> Iterator:
    """A server with these services for the length of the block; port 0 is a free one."""
    server = grpc.server(ThreadPoolExecutor(4))
    for add, servicer in services:
        add(servicer, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()


@contextmanager
def running(port: int = 0) -> Iterator[FakeServer]:
    fake = FakeServer()
    generation = generation_pb2_grpc.add_InferenceServiceServicer_to_server
    control = control_pb2_grpc.add_ControlServiceServicer_to_server
    services = (generation, fake), (control, fake), (health_pb2_grpc.add_HealthServicer_to_server, fake.health)
    with listening(fake, port, *services):
        try:
            yield fake
        finally:
            fake.call_ended.set()
