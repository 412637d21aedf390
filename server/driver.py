"""The asyncio clock: queue to engine, engine to streams. Knows no protocol and no tensors.

The engine steps on a thread or in a process of its own (`host`); what is asked meanwhile (an end, a new request) is
ordered in `run` alone, and holds before the engine's next step. So there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from engine.errors import DuplicateRequest, PilotfishError
from engine.stats import Clock
from engine.types import FinishReason, Request, TokenEvent
from server.errors import Aborted, DeadlinePassed, EngineHung, RequestFailed, Unavailable
from server.estimates import Estimates
from server.lifecycle import Lifecycle
from server.model import ServedModel
from server.queue import AdmissionQueue, Outlook
from server.streams.stream import OutputStream
from server.telemetry.metrics import Metrics
from server.worker.host import Host, TurnOutput
from server.worker.supervisor import Supervisor

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
        host: Host,
        queue: AdmissionQueue,
        metrics: Metrics,
        lifecycle: Lifecycle,
        supervisor: Supervisor,
        clock: Clock = time.monotonic,
        ageing_seconds: float = 1.0,
    ) -> None:
        self.model, self.queue, self.host = model, queue, host
        self.estimates, self._ageing_seconds = Estimates(), ageing_seconds
        self._engine, self._metrics, self._lifecycle = host.engine, metrics, lifecycle
        self._supervisor, self._clock = supervisor, clock
        self._live: dict[str, OutputStream] = {}
        self._endings: dict[str, _Ending] = {}
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._left: list[float] | None = None  # tokens that running outputs are likely to bring, as long as it is known
        self._stopping = asyncio.Event()

    # ------------------------------------------------------------------------------------------------- the clock

    async def run(self) -> None:
        """Repeat end, admit, step and emit until `stop`, or until the engine has failed for good."""
        while not self._stopping.is_set():
            try:
                self._apply_endings()
                self._admit()
                if (output := await self._step()) is not None:
                    self._emit(output)
            except Exception as error:  # noqa: BLE001  # whatever it is, every stream must hear of it; logged
                if not await self._recover(error):
                    return

    def _apply_endings(self) -> None:
        endings, self._endings = self._endings, {}
        for request_id, ending in endings.items():
            if ending.error is None:
                self.host.finish(request_id, ending.reason)
            else:
                self.host.drop(request_id, ending.reason)
                stream = self._live[request_id]
                stream.fail(ending.error)
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
                self.host.add(stream.request)
            except Exception as error:  # noqa: BLE001  # checked before it was queued: not the caller's mistake; logged
                self.host.drop(stream.request_id, FinishReason.ERROR)
                self._fail(stream, "the engine refused the request", error)

    async def _step(self) -> TurnOutput | None:
        """The engine's next output; None if there was no work and something else woke the loop."""
        if not self.host.has_work:
            self._report_load()
        return await self.host.turn(self._wake)

    def _emit(self, output: TurnOutput) -> None:
        for event in output.events:
            stream = self._live.get(event.request_id)
            if stream is not None:  # else another output's fault has just ended it
                self._deliver(stream, event)
        if output.stats is not None:
            self._metrics.steps.observe(output.stats)
            self.estimates.observe(output.stats)
        self._left = None
        self._report_load()

    async def _recover(self, error: Exception) -> bool:
        """End every live request after a failure of the engine; whether the engine runs again."""
        logger.error("the engine failed; %d live requests end with it", len(self._live), exc_info=error)
        await self._supervisor.lost()
        self._end_all(error)
        return await self._supervisor.revive(self._stopping)

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
        now, work = self._clock(), self.estimates.work(request, self._most_tokens(request))
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
        self._stopping.set()
        self._wake.set()

    # -------------------------------------------------------------------------------------------- one request's end

    def _deliver(self, stream: OutputStream, event: TokenEvent) -> None:
        """Hand over what one step output one output. A fault in doing so is this request's alone."""
        timeline = stream.outputs[event.index].timeline
        previous = timeline.last_token
        try:
            self._push(stream, event)
        except Exception as error:  # noqa: BLE001  # `_fail` logs it
            self.host.drop(stream.request_id, FinishReason.ERROR)
            self._fail(stream, "the output could not be turned into text", error)
            return
        if timeline.last_token != previous:
            self._metrics.requests.deliver(timeline, previous)

    def _push(self, stream: OutputStream, event: TokenEvent) -> None:
        output = stream.outputs[event.index]
        end = event.finished
        if end is not None and end.reason is FinishReason.ERROR and not output.is_stopped:
            self._end_for_fault(stream, end.error)
            return
        if stream.push(event):
            self.host.finish(stream.request_id, FinishReason.STOP, event.index, output.num_tokens)
        if stream.ended:
            assert output.end is not None, "the last output to end"
            self._forget(stream, output.end.finished.reason)

    def _end_for_fault(self, stream: OutputStream, problem: str | None) -> None:
        """One output cannot go on: its call ends with one error, so the other outputs have no reader any more."""
        self.host.drop(stream.request_id, FinishReason.CANCELLED)
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

    def _end_all(self, error: Exception) -> None:
        """The engine has lost what it was at: tell everyone."""
        reason = "ENGINE_HUNG" if isinstance(error, EngineHung) else "ENGINE_DEAD"
        for stream in self.live():
            self.queue.remove(stream.request_id)
            stream.fail(Unavailable(reason, "the engine failed; the request may be sent again"))
            self._forget(stream, FinishReason.ERROR)
        self._metrics.requests.set_load(0, 0, 0.0)

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
