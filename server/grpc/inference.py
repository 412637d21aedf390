"""InferenceService: receives calls and writes streams. `convert` interprets messages, the driver schedules requests.

The done-callback of a call releases its request. So the engine frees the pages before its next step, whatever ended the
call and in whatever phase.
"""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from engine.errors import InvalidRequest
from engine.types import FinishReason
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc
from server.admission.admission import Admission, Call, Origin
from server.admission.security import Callers
from server.admission.stalls import stall_limit
from server.errors import Aborted
from server.grpc.boundary import host_of
from server.telemetry.metrics import Metrics

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # requests and responses differ between the two methods


class InferenceService(generation_pb2_grpc.InferenceServiceServicer):
    """Generate and GenerateStream; both use the same admission."""

    def __init__(self, admission: Admission, callers: Callers, metrics: Metrics, stall_seconds: float) -> None:
        self._admission, self._callers = admission, callers
        self._metrics, self._stall_seconds = metrics, stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:  # noqa: N802
        """Return the response when all outputs are complete."""
        if request.HasField("resume"):
            raise InvalidRequest.of("resume", "continues a stream; send it to GenerateStream")
        return await (await self._admit(request, context)).response()

    # The type stubs expect a generator, but a generator's cleanup may never run. So this method writes the messages.
    async def GenerateStream(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Write messages as the stream produces them."""
        call = await self._admit(request, context)
        try:
            async with aclosing(call.messages()) as messages, stall_limit(self._stall_seconds) as writes:
                async for message in messages:
                    with writes:
                        await context.write(message)
        except TimeoutError:
            self._metrics.requests.stalls.inc()
            error = Aborted(f"the reader took no message for {self._stall_seconds:g} seconds")
            call.driver.end(call.stream, FinishReason.ABORTED, error)
            raise error from None

    async def _admit(self, message: pb.GenerateRequest, context: Context) -> Call:
        """Admit the request. Before this returns, nothing is sent, not even metadata: a refused call can be retried."""
        metadata = context.invocation_metadata() or ()
        caller = self._callers.of_metadata(metadata, host_of(context.peer()))
        headers = {k: v for k, v in metadata if isinstance(v, str)}
        call = await self._admission.admit(message, Origin(caller, lambda: _remaining(context), headers))
        # The type stubs expect their own class; any callable works.
        context.add_done_callback(lambda _: call.release(late=_remaining(context) <= 0))  # type: ignore[arg-type]
        return call


def _remaining(context: Context) -> float:
    """Return the seconds until the caller's deadline; infinite without one."""
    remaining: Any = context.time_remaining()  # None without a deadline, which the type stubs omit
    return math.inf if remaining is None else float(remaining)
