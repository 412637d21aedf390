"""Admission for gRPC and HTTP: a request becomes a live stream, or an error is raised before any answer is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from pilotfish.engine.errors import InvalidRequest, PilotfishError, Unsupported, Violation
from pilotfish.engine.params import Guided
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.text.stops import NO_ASIDES
from pilotfish.engine.types import FinishReason, Request
from pilotfish.server.admission import check
from pilotfish.server.admission.check import Prompt, with_structure
from pilotfish.server.admission.security import Caller, Quotas, Refusals
from pilotfish.server.admission.slow_work import RETRY_SECONDS, SlowWork, release_turn
from pilotfish.server.admission.status import refusal
from pilotfish.server.chat import Conversation
from pilotfish.server.driver import Driver
from pilotfish.server.errors import Aborted, QueueFull
from pilotfish.server.formats.structure import Answer, structure_of
from pilotfish.server.model import ServedModel
from pilotfish.server.queue import FairBound
from pilotfish.server.streams.stream import OutputStream
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.server.telemetry.tracing import Trace, Tracing

# Returns a request, and its prompt and prediction where they are text; adds violations that it finds to the list.
Reader: TypeAlias = Callable[[ServedModel, list[Violation]], tuple[Request, Prompt, str | None]]
Remaining: TypeAlias = Callable[[], float]  # seconds until the caller's deadline: infinite without one


class Admission:
    """Checks requests, encodes prompts, compiles structures, and queues the requests."""

    def __init__(
        self,
        driver: Callable[[], Driver],
        metrics: Metrics,
        slow: SlowWork,
        quotas: Quotas,
        tracing: Tracing,
    ) -> None:
        self.driver, self._metrics, self.slow = driver, metrics, slow
        self._quotas, self._tracing = quotas, tracing
        self._refusals = Refusals()
        self._arriving: FairBound | None = None

    async def admit(
        self, read: Reader, caller: Caller, remaining: Remaining, headers: Mapping[str, str], n: int = 1
    ) -> OutputStream:
        """Admit the request of `n` outputs that `read` returns, or count the refusal and raise the error.

        `read` is called once there is room. `headers` may name a trace. Errors are delayed for a caller that is refused
        again and again (`Refusals`).
        """
        trace = self._tracing.begin(headers)
        try:
            driver = self.driver()
            counted = n if 1 <= n <= driver.model.engine.config.max_n else 1
            with ExitStack() as refused:
                leave = refused.callback(self._quotas.enter(caller, counted))
                driver.require_open(caller.share)  # before any work is done for the request
                with self._arrival(driver, caller):
                    stream = await self._opened(read, driver, caller, remaining)
                driver.submit(stream)
                stream.trace(trace.trace_id)
                refused.pop_all()
            stream.released = partial(self._released, driver, leave, trace)
            return stream
        except BaseException as error:
            trace.refuse(error)
            if isinstance(error, PilotfishError):
                self._metrics.requests.reject(refusal(error).metric)
            if isinstance(error, QueueFull):
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(self._refusals.delay(caller.share, error, remaining(), now))
            raise

    def _released(
        self, driver: Driver, leave: Callable[[], None], trace: Trace, stream: OutputStream, late: bool
    ) -> None:
        """End the call after its reader has gone: end the request if it is live, so that its pages are freed."""
        leave()  # it no longer counts against its caller's quota
        trace.end(stream)
        if not stream.ended:
            if not late:
                self._metrics.requests.disconnects.inc()
            driver.end(stream, FinishReason.DEADLINE if late else FinishReason.CANCELLED)

    def stalled(self, streams: Sequence[OutputStream], problem: str) -> Aborted:
        """End streams whose reader has stalled; return the error that they end with."""
        self._metrics.requests.stalls.inc()
        error = Aborted(problem)
        self.abort(streams, error)
        return error

    def abort(self, streams: Sequence[OutputStream], error: PilotfishError) -> None:
        """End streams with an error, except those that have ended."""
        for stream in streams:
            self.driver().end(stream, FinishReason.ABORTED, error)

    @contextmanager
    def conversion(self, caller: Caller) -> Iterator[None]:
        """Count a call that generates nothing as an arriving request, and count its refusal (QueueFull), too."""
        with ExitStack() as counted:
            try:
                counted.callback(self._quotas.enter(caller))
                counted.enter_context(self._arrival(self.driver(), caller))
            except QueueFull as error:
                self._metrics.requests.reject(refusal(error).metric)
                raise
            yield

    @contextmanager
    def _arrival(self, driver: Driver, caller: Caller) -> Iterator[None]:
        """Count a request while it is checked and encoded. The number is bounded by the same limit as the queue."""
        if self._arriving is None:
            self._arriving = FairBound(driver.queue.max_requests)
        arriving = self._arriving
        if not arriving.has_room(caller.share):
            problem = f"{arriving.total} requests are being encoded; the limit is {arriving.limit}"
            raise QueueFull(problem, bound="arrivals", retry_seconds=RETRY_SECONDS)
        arriving.add(caller.share, 1)
        try:
            yield
        finally:
            arriving.add(caller.share, -1)

    async def _in_parts(self, parts: Iterator[None]) -> None:
        """Process the tokens that the caller has received. They can be many, so other tasks run between the parts."""
        is_over = object()
        while await self.slow.run(next, parts, is_over, is_slow=True) is not is_over:
            pass

    async def _opened(self, read: Reader, driver: Driver, caller: Caller, remaining: Remaining) -> OutputStream:
        model = driver.model
        request, answer = await self.checked(read, model)
        request = await self._compiled(request, answer, model, remaining)
        request = replace(  # whose id and salt are distinct from those of other callers
            request, request_id=caller.key(request.request_id), cache_salt=caller.salt(request.cache_salt),
            caller=caller.share,
        )  # fmt: skip
        asides, starts_in_reasoning = NO_ASIDES, answer is not None and answer.starts_in_reasoning
        if answer is not None and request.output.stop_in_answer:
            asides = model.format.asides(answer.tools, starts_in_reasoning=starts_in_reasoning)
        stream = driver.open(request, remaining(), asides=asides, starts_in_reasoning=starts_in_reasoning)
        if request.resume is not None:
            await self._in_parts(stream.replay())
            self._metrics.requests.resumes.inc()
        return stream

    async def _compiled(
        self, request: Request, answer: Answer | None, model: ServedModel, remaining: Remaining
    ) -> Request:
        guided = request.sampling.guided
        if guided is None:
            return request
        if model.compile_grammar is None:  # a structure that was asked for is refused before this
            raise Unsupported("parsing calls or reasoning needs guided decoding, which is not available for this model")
        compiler = model.compile_grammar

        async def require(guided: Guided, received: Sequence[tuple[int, ...]] = ()) -> None:
            await self.slow.compile(partial(compiler, guided, received), remaining())

        try:
            await require(guided)
        except InvalidRequest:
            if answer is None or guided == answer.content:
                raise
            answer = await self._with_sound_parts(answer, require)
            guided = structure_of(answer, model.format)
            assert guided is not None, "the parts and their compilations have equal length"
            try:
                await require(guided)
            except InvalidRequest as invalid:  # the problem concerns all parts together: no field
                whole = "messages.tools" if answer.tools else "guided"
                raise InvalidRequest([replace(v, field=whole) for v in invalid.violations]) from None
        received = [output.token_ids for output in request.received]
        if any(received):
            await require(guided, received)
        return with_structure(request, guided)

    async def _with_sound_parts(self, answer: Answer, require: Callable[[Guided], Awaitable[None]]) -> Answer:
        """Find the invalid part: relax a tool that is not strict to any object; for another part raise the error."""
        for i, part in answer.parts:
            try:
                await require(part)
            except InvalidRequest as invalid:
                if i is None:
                    raise
                if answer.tools[i].strict:
                    field = answer.field_of(i)
                    raise InvalidRequest([replace(v, field=field) for v in invalid.violations]) from None
                answer = answer.relaxed(i, invalid.violations[0].problem)
        return answer

    async def checked(self, read: Reader, model: ServedModel) -> tuple[Request, Answer | None]:
        """Encode the text of a request and check it, without blocking other requests. Compiles no structure."""
        found = list[Violation]()
        try:
            request, prompt, prediction = await self.slow.run(read, model, found)
            text = await self.text_of(prompt, request, model, found)
            predicted = check.prediction_of(prediction, model, found)
            if model.codec is not None:
                release_turn()
                if text is not None:
                    bare = isinstance(prompt, Conversation)
                    request = replace(request, token_ids=await self.encoded(text, model.codec, bare=bare))
                if predicted is not None:
                    request = replace(request, prediction=await self.encoded(predicted, model.codec, bare=True))
            return await self.slow.run(check.checked, request, prompt, text, model, found)
        finally:
            release_turn()

    async def text_of(self, prompt: Prompt, request: Request, model: ServedModel, found: list[Violation]) -> str | None:
        """Return the text of the prompt. A template may be slow even for a short conversation."""
        is_chat = isinstance(prompt, Conversation)
        return await self.slow.run(check.text_of, prompt, request, model, found, is_slow=is_chat)

    async def encoded(self, text: str, codec: Codec, *, bare: bool) -> tuple[int, ...]:
        """Return the tokens of a text. `bare`: add no special tokens; a chat template has written them."""
        return await self.slow.encode(text, partial(codec.encode, bare=bare))
