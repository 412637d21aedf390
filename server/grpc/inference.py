"""InferenceService: calls in, streams out. What a message means is `convert`'s business, when it runs the driver's.

A call frees its request from the call's done-callback: whatever ends the call, in whatever phase, the engine
gives the pages back before its next step.
"""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from engine.types import FinishReason
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc
from server.admission.admission import Admission, Call, Origin
from server.admission.security import Callers
from server.admission.stalls import stall_limit
from server.errors import Aborted
from server.telemetry.metrics import Metrics

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # both methods share what they do with it


class InferenceService(generation_pb2_grpc.InferenceServiceServicer):
    """Generate and GenerateStream over one admission path."""

    def __init__(self, admission: Admission, callers: Callers, metrics: Metrics, stall_seconds: float) -> None:
        self._admission, self._callers = admission, callers
        self._metrics, self._stall_seconds = metrics, stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:  # noqa: N802
        """Answer when all of it is there."""
        return await (await self._admit(request, context)).response()

    # The stubs know generators only; a generator's cleanup may never run, so this one writes.
    async def GenerateStream(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Write messages as they come."""
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
        """Nothing is sent before this returns, metadata neither: so a refused call can be retried."""
        metadata = context.invocation_metadata() or ()
        caller, headers = self._callers.of_metadata(metadata), {k: v for k, v in metadata if isinstance(v, str)}
        call = await self._admission.admit(message, Origin(caller, lambda: _remaining(context), headers))
        # The type stubs want a subclass of theirs; any callable will do.
        context.add_done_callback(lambda _: call.release(late=_remaining(context) <= 0))  # type: ignore[arg-type]
        return call


def _remaining(context: Context) -> float:
    """Seconds until the caller's deadline."""
    remaining: Any = context.time_remaining()  # the type stubs forget that it is None without a deadline
    return math.inf if remaining is None else float(remaining)
