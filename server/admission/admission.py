"""Admission for gRPC and HTTP: a message becomes a live request, or an error is raised before any answer is sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from engine.errors import InvalidRequest, PilotfishError, Unsupported, Violation
from engine.params import Guided
from engine.text.codec import Codec
from engine.types import FinishReason, Grammar
from pilotfish.v1 import generation_pb2 as pb
from server.admission import answers, convert
from server.admission.convert import with_structure
from server.admission.resume import require_fit, resume_info
from server.admission.security import ANYBODY, Caller, Quotas, Refusals
from server.admission.slow_work import RETRY_SECONDS, SlowWork, release_turn
from server.admission.status import refusal
from server.driver import Driver
from server.errors import QueueFull
from server.formats.structure import Answer, structure_of
from server.model import ServedModel
from server.queue import FairBound
from server.streams.stream import OutputStream
from server.telemetry.metrics import Metrics
from server.telemetry.tracing import Trace, Tracing


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a request: its caller, the seconds left, and headers that may name a trace."""

    caller: Caller = ANYBODY
    remaining: Callable[[], float] = lambda: math.inf  # none left: its deadline has passed
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """An admitted request. The front end that admitted it calls `release` when its reader is gone, for any reason."""

    driver: Driver
    wanted: convert.Wanted
    stream: OutputStream
    metrics: Metrics
    leave: Callable[[], None]  # stops counting the request against its caller's quota
    trace: Trace

    async def response(self) -> pb.GenerateResponse:
        return await answers.response(await self.stream.read_all(), self.wanted)

    async def messages(self) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield messages with the tokens of each round; rounds are merged while the reader is busy."""
        first, unfinished = True, self.stream.num_ends
        while unfinished:
            for chunk in await self.stream.read():
                unfinished -= chunk.end is not None
                for message in answers.stream_responses(chunk, self.wanted, first=first):
                    if first:
                        message.resume_info.CopyFrom(
                            resume_info(self.wanted.request, self.driver.model, self.wanted.fingerprint)
                        )
                        answers.add_prompt(message, self.wanted)
                    yield message
                    first = False

    def release(self, *, late: bool = False) -> None:
        """End the call after its reader has gone: end the request if it is live, so that its pages are freed.

        `late`: the reader has gone because its deadline passed.
        """
        self.leave()
        self.trace.end(self.stream)
        if self.stream.ended:
            return
        if not late:
            self.metrics.requests.disconnects.inc()
        self.driver.end(self.stream, FinishReason.DEADLINE if late else FinishReason.CANCELLED)


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
        self._driver, self._metrics, self._slow = driver, metrics, slow
        self._quotas, self._tracing = quotas, tracing
        self._refusals = Refusals()
        self._arriving: FairBound | None = None

    async def admit(self, message: pb.GenerateRequest, origin: Origin, known: Sequence[Violation] = ()) -> Call:
        """Admit a request, or count the refusal and raise the error, which also lists the `known` violations.

        Of a caller that is refused again and again the errors come later (`Refusals`).
        """
        trace = self._tracing.begin(origin.headers)
        try:
            driver = self._driver()
            n = message.sampling.n if 1 <= message.sampling.n <= driver.model.engine.config.max_n else 1
            with ExitStack() as refused:
                leave = refused.callback(self._quotas.enter(origin.caller, n))
                driver.require_open(origin.caller.share)  # before any work is done for the request
                wanted, stream = await self._opened(message, known, driver, origin)
                driver.submit(stream, wanted.priority)
                stream.trace(trace.trace_id)
                refused.pop_all()
            return Call(driver, wanted, stream, self._metrics, leave, trace)
        except BaseException as error:
            trace.refuse(error)
            if isinstance(error, PilotfishError):
                self._metrics.requests.reject(refusal(error).metric)
            if isinstance(error, QueueFull):
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(self._refusals.delay(origin.caller.share, error, origin.remaining(), now))
            raise

    @contextmanager
    def conversion(self, caller: Caller) -> Iterator[None]:
        """Within it a call that generates nothing counts as a request that arrives; so does its refusal, QueueFull."""
        with ExitStack() as counted:
            try:
                counted.callback(self._quotas.enter(caller))
                counted.enter_context(self._arrival(self._driver(), caller))
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
        """Do work on what the caller has received. It can be long, so others have their turns between its parts."""
        is_over = object()
        while await self._slow.run(next, parts, is_over, is_slow=True) is not is_over:
            pass

    async def _opened(
        self, message: pb.GenerateRequest, known: Sequence[Violation], driver: Driver, origin: Origin
    ) -> tuple[convert.Wanted, OutputStream]:
        with self._arrival(driver, origin.caller):
            found = await self.wanted(message, known, driver.model)
            wanted, caller = await self._compiled(found, driver.model, origin.remaining), origin.caller
            request = replace(  # whose id and salt are distinct from those of other callers
                wanted.request, request_id=caller.key(wanted.request.request_id),
                cache_salt=caller.salt(wanted.request.cache_salt), caller=caller.share,
            )  # fmt: skip
            wanted = replace(wanted, request=request)
            stream = driver.open(wanted.request, wanted.sending, origin.remaining())
            if wanted.sending.received:
                await self._in_parts(stream.replay())
                self._metrics.requests.resumes.inc()
            return wanted, stream

    async def _compiled(
        self, wanted: convert.Wanted, model: ServedModel, remaining: Callable[[], float]
    ) -> convert.Wanted:
        guided = wanted.request.sampling.guided
        if guided is None:
            return wanted
        if model.compile_grammar is None:  # a structure that was asked for is refused before this
            raise Unsupported(
                "the format of the calls or of the reasoning is a structure; this model is served without"
            )
        compiled = partial(self._slow.compile, model.compile_grammar)
        try:
            grammar = await compiled(guided, remaining())
        except InvalidRequest:
            if wanted.answer is None or guided == wanted.answer.content:
                raise
            answer = await self._with_sound_parts(wanted.answer, compiled, remaining)
            guided = structure_of(answer, model.format)
            assert guided is not None, "the same parts have a structure"
            try:
                grammar = await compiled(guided, remaining())
            except InvalidRequest as invalid:  # what is wrong is of all parts together, which no field has
                whole = "messages.tools" if answer.tools else "guided"
                raise InvalidRequest([replace(v, field=whole) for v in invalid.violations]) from None
        await self._in_parts(require_fit(wanted.sending.received, grammar))
        return replace(wanted, request=replace(with_structure(wanted.request, guided), grammar=grammar))

    async def _with_sound_parts(
        self, answer: Answer, compiled: Callable[[Guided, float], Awaitable[Grammar]], remaining: Callable[[], float]
    ) -> Answer:
        """Find which part is wrong: a tool that is not strict may have any object, then; another is an error."""
        for name, part in answer.parts:
            try:
                await compiled(part, remaining())
            except InvalidRequest as invalid:
                i = answer.tool_of(name)
                if i is not None and not answer.tools[i].strict:
                    answer = answer.relaxed(i, invalid.violations[0].problem)
                elif i is not None:
                    raise InvalidRequest([replace(v, field=name) for v in invalid.violations]) from None
                else:
                    raise
        return answer

    async def wanted(
        self, message: pb.GenerateRequest, known: Sequence[Violation], model: ServedModel
    ) -> convert.Wanted:
        """Check and convert the message, and encode its text. Nobody's turn waits for that. Compiles no structure."""
        found, prompt, prediction = list(known), None, None
        try:
            text = await self.text_of(message, model, found)
            predicted = convert.prediction_of(message, model, found)
            if model.codec is not None:
                release_turn()
                prompt = None if text is None else await self.encoded(text, model.codec, message)
                bare = partial(model.codec.encode, bare=True)
                prediction = None if predicted is None else await self._slow.encode(predicted, bare)
            return await self._slow.run(convert.wanted, message, model, text, prompt, prediction, found)
        finally:
            release_turn()

    async def text_of(self, message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> str | None:
        """Return the text of the message's input; a template may be slow for a small conversation, too."""
        is_chat = message.HasField("messages")
        return await self._slow.run(convert.text_of, message, model, found, is_slow=is_chat)

    async def encoded(self, text: str, codec: Codec, message: pb.GenerateRequest) -> tuple[int, ...]:
        """Return the tokens of this text; that of a template already contains the special tokens."""
        return await self._slow.encode(text, partial(codec.encode, bare=message.HasField("messages")))
