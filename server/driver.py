"""The asyncio loop that moves requests from queue to engine, and events from engine to streams.

The engine runs in its own process (`worker.remote`). Only `run` sends it new requests and ends, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from dataclasses import dataclass

from pilotfish.engine.errors import DuplicateRequest, PilotfishError, shown
from pilotfish.engine.stats import Clock, StepOutput
from pilotfish.engine.text.stops import NO_ASIDES, Asides
from pilotfish.engine.types import FinishReason, Request, TokenEvent
from pilotfish.server.errors import (
    Aborted,
    AdapterExists,
    DeadlinePassed,
    EngineCrashed,
    EngineHung,
    NotFound,
    RequestFailed,
    ResumeRefused,
    Unavailable,
)
from pilotfish.server.model import ServedModel
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.recovery import Recovery
from pilotfish.server.streams.stream import OutputStream
from pilotfish.server.telemetry.kv_events import ZmqKvEvents
from pilotfish.server.turns import CallerTurns, Estimates, max_len_of
from pilotfish.server.worker.supervisor import Supervisor

logger = logging.getLogger(__name__)

# A request is due this long after its arrival, or when it has to start to keep its deadline, if that is sooner. Each
# step of priority makes it due earlier. So a request's place is known at its arrival and can only move forward.
PATIENCE_SECONDS = 10.0
_UNFED = Aborted("the request was ended while the engine restarted")


@dataclass(slots=True)
class _Ending:
    """How to end a running request: its reader gets `error` if there is one, else the engine's terminal events."""

    reason: FinishReason
    error: PilotfishError | None
    is_sent: bool = False  # to the engine that has the request

    @property
    def is_read(self) -> bool:
        """Whether a reader needs the terminal events."""
        return self.error is None and self.reason is FinishReason.ABORTED


class Driver:
    """Owns every live request from its submission to its end."""

    def __init__(
        self,
        model: ServedModel,
        queue: AdmissionQueue,
        supervisor: Supervisor,
        clock: Clock = time.monotonic,
        ageing_seconds: float = 1.0,
        kv_events: ZmqKvEvents | None = None,  # default: none are published
    ) -> None:
        self.model, self.queue, self.host = model, queue, supervisor.host
        self.estimates, self._ageing_seconds = Estimates(clock), ageing_seconds
        self._engine, self._metrics, self._lifecycle = model.engine, supervisor.metrics, supervisor.lifecycle
        self._supervisor, self._clock = supervisor, clock
        self._live: dict[str, OutputStream] = {}
        self._turns = CallerTurns(queue, model.engine, self._live)
        self._endings: dict[str, _Ending] = {}
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._kv_events = kv_events
        self._recovery = Recovery()
        self._stopping = asyncio.Event()
        self._retiring: set[str] = set()  # adapters to unload when their last request has ended
        self._loading: set[str] = set()

    # ------------------------------------------------------------------------------------------------- the clock

    async def run(self) -> None:
        """Repeat end, admit, step and emit until `stop`, or until the engine has failed for good."""
        while not self._stopping.is_set():
            try:
                self._apply_endings()
                self._admit()
                if not self.host.has_work:
                    self._report_load()
                if (output := await self.host.turn(self._wake)) is not None:
                    self._emit(output)
            except Exception as error:  # noqa: BLE001  # every stream must end or continue; logged
                if not await self._recover(error):
                    return

    def _apply_endings(self) -> None:
        for request_id, ending in list(self._endings.items()):
            stream = self._live[request_id]
            if ending.is_sent:
                continue  # its terminal events are on their way, or lost with the engine
            if ending.error is None:
                if self._recovery.take(stream):
                    self._feed(stream)  # for its terminal events: it is finished before a step
                ending.is_sent = True
                self.host.finish(request_id, ending.reason)
            else:
                self.host.drop(request_id, ending.reason)
                self._fail(stream, ending.error, ending.reason)

    def _admit(self) -> None:
        acquitted, fed = self._recovery.next()  # requests of the failed engine
        if acquitted is not None:
            self.host.drop(acquitted.request_id, FinishReason.CANCELLED)
            self._end_unfed(acquitted)
        for stream in fed:
            self._feed(stream)
        while not self._recovery.is_trying and (caller := self._turns.next()) is not None:
            stream = self._live[self.queue.pop(caller).request_id]
            if stream.deadline <= self._clock():
                error = DeadlinePassed("the deadline passed before the request could start")
                self._fail(stream, error, FinishReason.DEADLINE)
                continue
            stream.start()
            self._turns.renew()
            self._metrics.requests.start(stream.timeline)
            self._feed(stream)

    def _feed(self, stream: OutputStream) -> None:
        """Add a request to the engine, with the tokens that it has emitted, if it is resubmitted."""
        try:
            self.host.add(stream.continued())
        except Exception as error:  # noqa: BLE001  # the request was checked before it was queued, so the fault is ours; logged
            self._fault(stream, "the engine refused the request", error)
            return
        for output in stream.outputs:
            if output.is_stopped and not output.has_ended:  # an earlier engine received this order, this one did not
                self.host.finish(stream.request_id, FinishReason.STOP, output.index, output.num_tokens)

    def _emit(self, output: StepOutput) -> None:
        if self._kv_events is not None:
            self._kv_events.publish(output.cache_changes)
        for event in output.events:
            stream = self._live.get(event.request_id)
            if stream is not None:  # else an error of another output has just ended it
                self._deliver(stream, event)
        if output.stats is not None:
            self._metrics.steps.observe(output.stats)
            self.estimates.observe(output.stats)
            self._supervisor.record_step()
        self._turns.renew()
        self._report_load()

    async def _recover(self, error: Exception) -> bool:
        """Restart the engine after a failure and return whether it runs. Its requests are then resubmitted."""
        running = [s for s in self.live() if s.timeline.started is not None and s not in self._recovery]
        logger.error("the engine failed with %d requests", len(running), exc_info=error)
        if self._kv_events is not None:
            self._kv_events.clear()
        await self._supervisor.lost()
        was_killed = isinstance(error, EngineCrashed) and error.status == -signal.SIGKILL  # not sent by this server
        guilty = self._recovery.crashed(running, was_killed=was_killed)
        for request_id in list(self._endings):
            self._end_unfed(self._live[request_id])
        for stream in running:
            stream.interrupt()
        self._metrics.requests.interruptions.inc(len(running))
        if guilty is not None:
            self._convict(guilty)
        if await self._supervisor.revive(self._stopping):
            return True
        self._end_all(error)
        return False

    def _end_unfed(self, stream: OutputStream) -> None:
        """End a request that no engine has, if its end was ordered; only an end with a reader needs an engine."""
        ending = self._endings.get(stream.request_id)
        if ending is None:
            return
        ending.is_sent = False
        if not ending.is_read and self._recovery.take(stream):
            self._fail(stream, ending.error or _UNFED, ending.reason)

    def _convict(self, stream: OutputStream) -> None:
        """End a request that repeatedly crashed the engine while it ran alone, and log its parameters."""
        request, crashes = stream.request, self._recovery.num_crashes(stream)
        emitted = [output.num_tokens for output in stream.outputs]
        about = f"{len(request.token_ids)} prompt tokens, {emitted} emitted, {shown(request.sampling, 1000)}"
        problem = "request %s crashed the engine %d times, the last times without other requests; it is ended: %s, %s"
        logger.error(problem, stream.request_id, crashes, about, request.speculation)
        self._supervisor.discount(crashes)
        self._fail(stream, RequestFailed("the engine failed each time it ran this request"))

    # ------------------------------------------------------------------------------------ calls of the front ends

    def require_open(self, caller: str = "") -> None:
        """Raise Unavailable or QueueFull if no request of the caller can be accepted now; cheap, so checked first."""
        self._lifecycle.require_ready()
        self.queue.require_room(caller, outlook=self._turns.outlook(caller, self.estimates))

    def open(
        self, request: Request, remaining: float = math.inf, *, asides: Asides = NO_ASIDES,
        starts_in_reasoning: bool = False,
    ) -> OutputStream:  # fmt: skip
        """Return the stream of a validated request, to be submitted; its deadline is in `remaining` seconds."""
        sampling, model_ends = request.sampling, self._engine.facts.limits.eos_token_ids
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model_ends)}
        return OutputStream(
            request, self.model.codec, self._clock, asides=asides, deadline=self._clock() + remaining,
            end_token_ids=ends, starts_in_reasoning=starts_in_reasoning,
        )  # fmt: skip

    def submit(self, stream: OutputStream) -> None:
        """Queue the request of this stream, which receives its outputs.

        Raises:
            Unavailable: the server is starting, draining or failed.
            DuplicateRequest: a live request has this id.
            QueueFull: the queue's limit on requests, tokens or seconds is reached.
            DeadlinePassed: its deadline has passed, or will pass before it can be served.
            NotFound: its adapter was unloaded after the check.
        """
        request = stream.request
        self.require_open(request.caller)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise NotFound(f"adapter is {shown(request.adapter)}, which was unloaded")
        if request.request_id in self._live:
            raise DuplicateRequest(f"request_id {stream.own_id!r} is live")
        now, max_len = self._clock(), max_len_of(request, self._engine)
        work = self.estimates.work(request, max_len, self._engine.load.num_running)
        due = min(now + PATIENCE_SECONDS - request.priority * self._ageing_seconds, stream.deadline - work)
        self._require_time(request.caller, stream.deadline - now, due, work)
        outlook = self._turns.outlook(request.caller, self.estimates)
        self.queue.push(request, request.sampling.n * max_len, due, outlook)
        self._live[request.request_id] = stream
        self._turns.renew()
        self._idle.clear()
        self._wake.set()
        self._report_load()

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that new requests may use, in alphabetical order."""
        return sorted(self._engine.adapters.keys() - self._retiring)

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter; return its fingerprint. Raises AdapterExists, ModelError, or Unavailable in a restart."""
        self._lifecycle.require_ready()
        if name in self._engine.adapters or name in self._loading:
            in_use = " and is being unloaded: requests still use it" if name in self._retiring else ""
            raise AdapterExists(f"adapter {shown(name)} is loaded{in_use}")
        self._loading.add(name)
        try:
            return await self.host.load_adapter(name, folder)
        finally:
            self._loading.remove(name)

    def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests, and unload it when its last request has ended. Raises NotFound."""
        if name not in self.adapters:
            raise NotFound(f"adapter is {shown(name)}, which is not loaded")
        self._retiring.add(name)
        self._retire()

    def _retire(self) -> None:
        """Unload retired adapters that no live request uses."""
        for name in self._retiring - {stream.request.adapter for stream in self._live.values()}:
            self._retiring.remove(name)
            if name in self._engine.adapters:  # else an engine lost it
                self.host.unload_adapter(name)

    def find(self, request_id: str) -> OutputStream | None:
        return self._live.get(request_id)

    def live(self) -> tuple[OutputStream, ...]:
        return tuple(self._live.values())

    def end(self, stream: OutputStream, reason: FinishReason, error: PilotfishError | None = None) -> None:
        """End a request: immediately if no engine has it, before the next step if it runs; do nothing if it has ended.

        The stream identifies the request, not its id, which may have been reused after its end.
        """
        if stream.ended:
            return
        ending = _Ending(reason, error)
        if self.queue.remove(stream.request_id) or (not ending.is_read and self._recovery.take(stream)):
            self._fail(stream, error or _UNFED, reason)
            self._report_load()
        else:
            self._endings.setdefault(stream.request_id, ending)
            self._wake.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def stop(self) -> None:
        """Let `run` return after the current step."""
        self._stopping.set()
        self._wake.set()

    # -------------------------------------------------------------------------------------------- one request's end

    def _deliver(self, stream: OutputStream, event: TokenEvent) -> None:
        """Pass one event to its output. An ERROR event, or an exception here, ends only this request."""
        output, end = stream.outputs[event.index], event.finished
        if end is not None and end.reason is FinishReason.ERROR and not output.is_stopped:
            self.host.drop(stream.request_id, FinishReason.CANCELLED)  # its other outputs end with it
            self._fail(stream, RequestFailed(end.error or "the request failed"))
            return
        previous = output.timeline.last_token
        try:
            is_stopped = stream.push(event)
        except ResumeRefused as error:
            self.host.drop(stream.request_id, FinishReason.CANCELLED)
            self._fail(stream, error)
            return
        except Exception as error:  # noqa: BLE001  # `_fault` logs it
            self._fault(stream, "the output could not be detokenized", error)
            return
        if is_stopped:
            self.host.finish(stream.request_id, FinishReason.STOP, event.index, output.num_tokens)
        if stream.ended:
            assert output.finished is not None, "the last output to end"
            self._forget(stream, output.finished.reason)
        if output.timeline.last_token != previous:
            self._metrics.requests.deliver(output.timeline, previous)

    def _fault(self, stream: OutputStream, problem: str, error: Exception) -> None:
        """End one request after an internal error: its caller receives `problem`, the exception is logged."""
        self.host.drop(stream.request_id, FinishReason.ERROR)
        logger.error("request %s: %s", stream.request_id, problem, exc_info=error)
        self._fail(stream, RequestFailed(problem))

    def _fail(self, stream: OutputStream, error: PilotfishError, reason: FinishReason = FinishReason.ERROR) -> None:
        stream.fail(error)
        self._forget(stream, reason)

    def _forget(self, stream: OutputStream, reason: FinishReason) -> None:
        del self._live[stream.request_id]
        self._turns.renew()
        self._endings.pop(stream.request_id, None)
        self._recovery.forget(stream)
        self._metrics.requests.end(reason, stream.timeline)
        self.estimates.end(stream.timeline)
        most = max_len_of(stream.request, self._engine) - len(stream.request.token_ids)
        for output in stream.outputs:
            self._metrics.requests.end_output(output.timeline, output.num_tokens)
            if stream.timeline.started is not None and reason is not FinishReason.ERROR:
                self.estimates.end_output(output.num_tokens, most)
        if self._retiring:
            self._retire()
        if not self._live:
            self._idle.set()

    def _end_all(self, error: Exception) -> None:
        """End every live request after the engine has failed for good."""
        reason = "ENGINE_HUNG" if isinstance(error, EngineHung) else "ENGINE_DEAD"
        for stream in self.live():
            self.queue.remove(stream.request_id)
            self._fail(stream, Unavailable(reason, "the engine failed; the request may be sent again"))
        self._metrics.requests.set_load(0, 0, 0.0)

    def _require_time(self, caller: str, remaining: float, due: float, work: float) -> None:
        """Raise DeadlinePassed if the remaining time is shorter than the minimum of wait and service."""
        if remaining == math.inf:
            return
        wait = self._turns.least_wait(caller, due, self.estimates)
        if wait + work > max(remaining, 0.0) or remaining <= 0:
            problem = f"the deadline is in {max(remaining, 0.0):.3g} seconds"
            raise DeadlinePassed(f"{problem}; estimated wait {wait:.3g}, service {work:.3g}")

    def _report_load(self) -> None:
        engine = self._engine
        waiting = len(self.queue) + engine.load.num_waiting
        self._metrics.requests.set_load(
            engine.load.num_running, waiting, 1 - engine.load.free_pages / engine.facts.total_pages
        )
