"""The asyncio clock: queue to engine, engine to streams. Knows no protocol and no tensors.

The engine steps on one worker thread; everything that changes it happens between two steps, in `run`. So there
are no locks, and what is asked meanwhile (an end, a new request) is applied before the next step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import DuplicateRequest, PilotfishError
from engine.stats import Clock
from engine.types import FinishReason, Request, TokenEvent
from server.errors import Aborted, DeadlinePassed, EngineHung, RequestFailed, Unavailable
from server.estimates import Estimates
from server.lifecycle import Lifecycle, State
from server.metrics import Metrics
from server.model import ServedModel
from server.queue import AdmissionQueue, Outlook
from server.streams import OutputStream

if TYPE_CHECKING:
    from engine.engine import StepOutput

logger = logging.getLogger(__name__)

# A request without a deadline is due this long after it came; one with a deadline when it has to start to keep it, if
# that is sooner. A step of priority makes it due earlier. So the order is known when it comes, and each goes up in it.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a running request is to be ended; the reader gets `error` if there is one, else the engine's `Finished`."""

    reason: FinishReason
    error: PilotfishError | None


class Driver:
    """Owns every live request from submission to its one end."""

    def __init__(
        self,
        model: ServedModel,
        queue: AdmissionQueue,
        metrics: Metrics,
        lifecycle: Lifecycle,
        compute: Executor,  # one thread, and nothing else runs on it
        clock: Clock = time.monotonic,
        ageing_seconds: float = 1.0,
        hang_seconds: float | None = None,
    ) -> None:
        self.model, self.queue = model, queue
        self.estimates, self._ageing_seconds, self._hang_seconds = Estimates(), ageing_seconds, hang_seconds
        self.is_hung = False  # a step never ended: its thread is lost
        self._engine, self._metrics, self._lifecycle = model.engine, metrics, lifecycle
        self._compute, self._clock = compute, clock
        self._live: dict[str, OutputStream] = {}
        self._endings: dict[str, _Ending] = {}
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._left: list[float] | None = None  # tokens that running outputs are likely to bring, as long as it is known
        self._stopping = False

    # ------------------------------------------------------------------------------------------------- the clock

    async def run(self) -> None:
        """Turn until `stop`, or until a step raises or hangs: then every live request ends with an error."""
        try:
            while not self._stopping:
                self._apply_endings()
                self._admit()
                if self._engine.has_work:
                    self._emit(await self._step())
                else:
                    await self._sleep()
        except Exception:
            logger.exception("the engine failed; %d live requests end with it", len(self._live))
            await self._die()

    def _apply_endings(self) -> None:
        endings, self._endings = self._endings, {}
        for request_id, ending in endings.items():
            stream = self._live[request_id]
            events = self._engine.finish(request_id, ending.reason)
            if ending.error is not None:
                stream.fail(ending.error)
            else:
                for event in events:
                    stream.close(event)
            self._forget(stream, ending.reason)

    def _admit(self) -> None:
        while self.queue and self._engine.has_room:
            stream = self._live[self.queue.pop().request_id]
            if stream.deadline <= self._clock():
                stream.fail(DeadlinePassed("the deadline passed before the request could start"))
                self._forget(stream, FinishReason.DEADLINE)
                continue
            stream.start()
            self._left = None
            self._metrics.requests.start(stream.timeline)
            try:
                self._engine.add(stream.request)
            except PilotfishError as error:  # it was checked before it was queued: not the caller's mistake
                self._fail(stream, "the engine refused the request", error)

    async def _step(self) -> StepOutput:
        step = asyncio.get_running_loop().run_in_executor(self._compute, self._engine.step)
        await asyncio.wait((step,), timeout=self._hang_seconds)
        if not step.done():
            self.is_hung = True
            step.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody asks any more
            raise EngineHung(f"a step has taken more than {self._hang_seconds:g} seconds")
        return step.result()

    def _emit(self, output: StepOutput) -> None:
        for event in output.events:
            stream = self._live.get(event.request_id)
            if stream is not None:  # else another output's fault has just ended it
                self._deliver(stream, event)
        self._metrics.steps.observe(output.stats)
        self.estimates.observe(output.stats)
        self._left = None
        self._report_load()

    async def _sleep(self) -> None:
        assert not self.queue, "an idle engine has room"
        self._report_load()
        self._wake.clear()
        await self._wake.wait()

    # ------------------------------------------------------------------------------------ what others ask meanwhile

    def require_open(self) -> None:
        """Raise Unavailable or QueueFull where nobody can be taken: before any work is done for a request."""
        self._lifecycle.require_ready()
        self.queue.require_room(outlook=self._outlook())

    def submit(
        self, request: Request, *, interval: int = 1, priority: int = 0, remaining: float = math.inf
    ) -> OutputStream:
        """Queue a checked request, whose caller waits for `remaining` seconds; its output arrives in the stream.

        Raises:
            Unavailable: the server starts, drains or failed.
            DuplicateRequest: a live request has this id.
            QueueFull: the queue's bound in requests, tokens or seconds is reached.
            DeadlinePassed: its caller's time is up, or will be before it can be served.
        """
        self.require_open()
        if request.request_id in self._live:
            own = request.request_id.rpartition("/")[2]  # without its caller's name
            raise DuplicateRequest(f"request_id {own!r} is live")
        now, work = self._clock(), self.estimates.work(request)
        due = min(now + PATIENCE_SECONDS - priority * self._ageing_seconds, now + remaining - work)
        self._require_time(remaining, due, work)
        stream = OutputStream(request, self.model.codec, self._clock, interval, now + remaining)
        self.queue.push(request, request.sampling.n * self._most_tokens(request), due, self._outlook())
        self._live[request.request_id] = stream
        self._idle.clear()
        self._wake.set()
        self._report_load()
        return stream

    def find(self, request_id: str) -> OutputStream | None:
        """The live request of this id."""
        return self._live.get(request_id)

    def live(self) -> tuple[OutputStream, ...]:
        """Every live request, oldest first."""
        return tuple(self._live.values())

    def end(self, stream: OutputStream, reason: FinishReason, error: PilotfishError | None = None) -> None:
        """End a request: at once if it is queued, before the next step if it runs, not at all if it is over.

        The stream and not its id says which: an id may live again by the time its first caller is gone.
        """
        if stream.ended:
            return
        if self.queue.remove(stream.request_id):
            stream.fail(error or Aborted("the request was ended before it could start"))
            self._forget(stream, reason)
            self._report_load()
        else:
            self._endings.setdefault(stream.request_id, _Ending(reason, error))
            self._wake.set()

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def stop(self) -> None:
        """Let `run` return after the current step."""
        self._stopping = True
        self._wake.set()

    # -------------------------------------------------------------------------------------------- one request's end

    def _deliver(self, stream: OutputStream, event: TokenEvent) -> None:
        """Hand over what one step brought one output. A fault in doing so is this request's alone."""
        timeline = stream.outputs[event.index].timeline
        previous = timeline.last_token
        try:
            self._push(stream, event)
        except Exception as error:  # noqa: BLE001  # `_fail` logs it
            self._engine.finish(stream.request_id, FinishReason.ERROR)
            self._fail(stream, "the output could not be turned into text", error)
            return
        if timeline.last_token != previous:
            self._metrics.requests.deliver(timeline, previous)

    def _push(self, stream: OutputStream, event: TokenEvent) -> None:
        if event.finished is not None and event.finished.reason is FinishReason.ERROR:
            self._end_for_fault(stream, event.finished.error)
            return
        output = stream.outputs[event.index]
        if stream.push(event):
            kept = output.num_tokens
            (ended,) = self._engine.finish(stream.request_id, FinishReason.STOP, index=event.index, keep=kept)
            stream.close(ended)
        if stream.ended:
            assert output.end is not None, "the last output to end"
            self._forget(stream, output.end.finished.reason)

    def _end_for_fault(self, stream: OutputStream, problem: str | None) -> None:
        """One output cannot go on: its call ends with one error, so the other outputs have no reader any more."""
        self._engine.finish(stream.request_id, FinishReason.CANCELLED)
        stream.fail(RequestFailed(problem or "the request failed"))
        self._forget(stream, FinishReason.ERROR)

    def _fail(self, stream: OutputStream, problem: str, error: Exception) -> None:
        """End one request for a fault that is its own: its caller hears `problem`, the log hears the rest."""
        logger.error("request %s: %s", stream.request_id, problem, exc_info=error)
        stream.fail(RequestFailed(problem))
        self._forget(stream, FinishReason.ERROR)

    def _forget(self, stream: OutputStream, reason: FinishReason) -> None:
        del self._live[stream.request_id]
        self._endings.pop(stream.request_id, None)
        self._metrics.requests.end(reason, stream.timeline)
        self.estimates.end(stream.timeline)
        for output in stream.outputs:
            self._metrics.requests.end_output(output.timeline, output.num_tokens)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.estimates.end_output(output.num_tokens, self._most_output(stream.request))
        if not self._live:
            self._idle.set()

    async def _die(self) -> None:
        """The engine cannot be trusted any more: take nothing new, and tell everyone."""
        self._metrics.engine_up.set(0)
        await self._lifecycle.move(State.FAILED)
        for stream in self.live():
            self.queue.remove(stream.request_id)
            stream.fail(
                Unavailable(
                    "ENGINE_HUNG" if self.is_hung else "ENGINE_DEAD",
                    "the engine failed; the request may be sent again elsewhere",
                )
            )
            self._forget(stream, FinishReason.ERROR)

    def _require_time(self, remaining: float, due: float, work: float) -> None:
        """Raise DeadlinePassed where less is left than a request of this size will take by all that is known."""
        if remaining == math.inf:
            return
        running = self._engine.num_running
        wait = 0.0 if self._engine.has_room and not self.queue else self.estimates.wait(self.queue.ahead(due), running)
        if wait + work > max(remaining, 0.0) or remaining <= 0:
            problem = f"the deadline is in {max(remaining, 0.0):.3g} seconds"
            raise DeadlinePassed(f"{problem}; by now's estimate it takes {wait:.3g} to start and {work:.3g} to end")

    def _outlook(self) -> Outlook:
        if self._left is None:
            running = (stream for stream in self._live.values() if stream.timeline.started is not None)
            outputs = (
                (o.num_tokens, self._most_output(s.request)) for s in running for o in s.outputs if o.end is None
            )
            self._left = sorted(self.estimates.left(*output) for output in outputs)
        free = self._engine.config.max_batch_size - self._engine.num_running if self._engine.has_room else 0
        return self.estimates.outlook(len(self.queue) - free, self._left)  # who has a place waits for a step at most

    def _most_output(self, request: Request) -> int:
        return self._most_tokens(request) - len(request.token_ids)

    def _most_tokens(self, request: Request) -> int:
        return request.max_len(self._engine.max_model_len, self._engine.config.max_output_tokens)

    def _report_load(self) -> None:
        engine = self._engine
        waiting = len(self.queue) + engine.num_waiting
        self._metrics.requests.set_load(engine.num_running, waiting, 1 - engine.free_pages / engine.total_pages)
