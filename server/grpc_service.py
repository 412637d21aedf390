"""InferenceService: calls in, streams out. What a message means is `convert`'s business, when it runs the driver's.

A call frees its request from the call's done-callback: whatever ends the call, in whatever phase, the engine
gives the pages back before its next step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from engine.errors import PilotfishError
from engine.types import FinishReason
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc
from server import convert
from server.driver import Driver
from server.errors import Aborted, DeadlinePassed
from server.metrics import Metrics
from server.model import ServedModel
from server.status import refusal
from server.streams import OutputStream

# A longer prompt is encoded on another thread, so that other streams need not wait for it.
MAX_TEXT_ON_LOOP = 2000  # characters

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # both methods share what they do with it


@dataclass(frozen=True, slots=True)
class _Call:
    """An admitted request."""

    driver: Driver
    wanted: convert.Wanted
    stream: OutputStream


class InferenceService(generation_pb2_grpc.InferenceServiceServicer):
    """Generate and GenerateStream over one admission path."""

    def __init__(self, driver: Callable[[], Driver], metrics: Metrics, stall_seconds: float) -> None:
        self._driver, self._metrics, self._stall_seconds = driver, metrics, stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:  # noqa: N802
        """Answer when all of it is there."""
        call = await self._admit(request, context)
        return convert.response(await call.stream.read_all(), call.wanted, call.driver.model)

    # The stubs know generators only; a generator's cleanup may never run, so this one writes.
    async def GenerateStream(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        """Write every round's tokens as they come, or what has gathered while the reader was busy."""
        call = await self._admit(request, context)
        first, unfinished = True, len(call.stream.outputs)
        while unfinished:
            for chunk in await call.stream.read():
                unfinished -= chunk.end is not None
                for message in convert.stream_responses(chunk, call.wanted, first=first):
                    await self._write(message, call, context)
                    first = False

    async def _write(self, message: pb.GenerateStreamResponse, call: _Call, context: Context) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(message)
        except TimeoutError:
            self._metrics.requests.stalls.inc()
            error = Aborted(f"the reader took no message for {self._stall_seconds:g} seconds")
            call.driver.end(call.stream, FinishReason.ABORTED, error)
            raise error from None

    async def _admit(self, message: convert.AnyGenerateRequest, context: Context) -> _Call:
        """Nothing is sent before this returns, metadata neither: so a refused call can be retried."""
        try:
            driver = self._driver()
            wanted = await _wanted(message, driver.model)
            if _remaining(context) <= 0:
                raise DeadlinePassed("the deadline passed before the request could start")
            stream = driver.submit(wanted.request, interval=wanted.interval)
        except PilotfishError as error:
            self._metrics.requests.reject(refusal(error).metric)
            raise
        # The type stubs want a subclass of theirs; any callable will do.
        context.add_done_callback(lambda _: self._release(driver, stream, context))  # type: ignore[arg-type]
        return _Call(driver, wanted, stream)

    def _release(self, driver: Driver, stream: OutputStream, context: Context) -> None:
        if stream.ended:
            return
        late = _remaining(context) <= 0
        if not late:
            self._metrics.requests.disconnects.inc()
        driver.end(stream, FinishReason.DEADLINE if late else FinishReason.CANCELLED)


async def _wanted(message: convert.AnyGenerateRequest, model: ServedModel) -> convert.Wanted:
    if len(message.prompt) > MAX_TEXT_ON_LOOP:
        return await asyncio.to_thread(convert.wanted, message, model)
    return convert.wanted(message, model)


def _remaining(context: Context) -> float:
    """Seconds until the caller's deadline."""
    remaining: Any = context.time_remaining()  # the type stubs forget that it is None without a deadline
    return math.inf if remaining is None else float(remaining)
