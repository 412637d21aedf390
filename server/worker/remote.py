"""The front-end process's view of an engine in another process. Orders are sent immediately.

The engine's process is a child of the fork server, connected to this one by a pair of sockets that no other process can
open. It is killed if it sends nothing for too long, or an invalid message. It ends when this process ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from pilotfish.engine.errors import ModelError
from pilotfish.engine.params import Guided
from pilotfish.engine.request.intake import Intake
from pilotfish.engine.stats import EngineLoad, StepOutput
from pilotfish.engine.text.codec import CALIBRATION_TEXT
from pilotfish.engine.types import Adapter, FinishReason, Request, TokenEvent
from pilotfish.server.config import ServerConfig
from pilotfish.server.errors import EngineCrashed, EngineHung, RequestFailed, Unavailable
from pilotfish.server.model import Progress, ServedModel, read_text
from pilotfish.server.worker import wire
from pilotfish.server.worker.fork_server import Forked, ForkServer, ForkServerGone
from pilotfish.server.worker.worker import Standby, Worker

logger = logging.getLogger(__name__)

# Maximum seconds between two messages of an engine, and the number of missed ones after which it is killed.
_HEARTBEAT_SECONDS, _HEARTBEATS_PER_HANG = 1.0, 4
_LOADS = 4  # factor by which a later engine may take longer to load than the first: others may run beside it
_FULL = EngineLoad(num_running=0, num_waiting=0, free_pages=0, spare_pages=0)


@dataclass(slots=True)
class _RemoteRequest:
    """A request that was sent to the engine and has not ended."""

    order: int  # number of its order, because a caller may reuse the id of an earlier request
    num_sequences: int  # outputs that have not ended
    num_pages: int  # of its prompt


class RemoteEngine:
    """An engine in another process, to which the driver sends orders, and its last reported state.

    With the option `standby` a second engine is loaded, and takes over when the first is lost. If K/V events are
    published, outputs contain the changes of the prefix cache.
    """

    def __init__(
        self, config: ServerConfig, forks: ForkServer | None = None, start_forks: Callable[[], ForkServer] = ForkServer
    ) -> None:
        """`forks` is a running fork server; without it, or if it ends, `start_forks` starts one."""
        self.config = config.engine()
        self._forks, self._start_forks, self._has_standby = forks, start_forks, config.standby
        self._hang_seconds, self._log_format = config.hang_seconds, config.log_format
        self._watches_cache = config.kv_events_endpoint is not None
        self._worker: Worker | None = None
        self._standby: Standby | None = None
        self._text: wire.CalibrationText | None = None  # None: the first engine is being loaded
        self._load_seconds = 0.0  # for loading another engine, besides `hang_seconds`
        self._numbers = count()  # numbers of messages that have answers
        self._live: dict[str, _RemoteRequest] = {}
        self.adapters: dict[str, Adapter] = {}  # fingerprints that every engine must have, from the first one
        self._folders = dict(self.config.adapter)  # of each of them

    # ---------------------------------------------------------------------------------- start and end of the process

    async def start(self, progress: Progress) -> ServedModel:
        """Start the process, load the tokenizer and template in this one, and wait until both are ready.

        Raises ModelError if the models cannot be served. Can be cancelled.
        """
        started = time.monotonic()
        reading = asyncio.ensure_future(asyncio.to_thread(read_text, self.config))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # a failed load is raised first
        worker = await self._loaded(progress, is_successor=False)
        self.adapters |= {name: Adapter(name, 0, fingerprint) for name, fingerprint in worker.adapters.items()}
        self._use(worker)
        self._load_seconds = _LOADS * (time.monotonic() - started)
        codec, chat = await reading
        tokens = () if codec is None else await asyncio.to_thread(codec.encode, CALIBRATION_TEXT)
        self._text = wire.CalibrationText(tuple(token for token in tokens if token < self.facts.limits.vocab_size))
        worker.send(self._text)
        return await asyncio.to_thread(ServedModel.around, self, self.compile, self.config, codec, chat)

    async def restart(self) -> None:
        """Replace the lost process: by the standby if it is loaded, else by a new one."""
        started = time.monotonic()
        if self._worker is not None:
            await self._worker.close()
            self._worker = None
        standby = None if self._standby is None else await self._standby.take()
        self._use(standby or await self._loaded(_log, is_successor=True))
        logger.info("another engine is ready after %.2f s", time.monotonic() - started)

    async def close(self) -> None:
        if self._standby is not None:
            await self._standby.close()
        if self._worker is not None:
            await self._worker.close()
        if self._forks is not None:
            await asyncio.to_thread(self._forks.close)
        self._worker = self._standby = self._forks = None

    def _use(self, worker: Worker) -> None:
        """Send requests to this worker from now on; it has none."""
        self._live = {}
        self._worker, self.facts = worker, worker.facts
        intake = Intake(self.config, self.facts.limits, self.facts.proposer_names, self.adapters)
        self.check, self.speculation_of = intake.check, intake.speculation_of  # in this process, equal to the engine's
        self._align_adapters(worker)
        if self._text is not None:
            worker.send(self._text)
        if self._has_standby:
            self._standby = Standby(partial(self._loaded, _log, is_successor=True))

    def _align_adapters(self, worker: Worker) -> None:
        """Give an engine the same adapters as its predecessor, including those loaded or unloaded at runtime."""
        its_own = worker.adapters
        for name, fingerprint in its_own.items():
            if name not in self.adapters or self.adapters[name].fingerprint != fingerprint:
                worker.send(wire.UnloadAdapter(name))
        for name, adapter in self.adapters.items():
            if its_own.get(name) != adapter.fingerprint:
                order = wire.LoadAdapter(next(self._numbers), name, self._folders[name], adapter.fingerprint)
                worker.ask(order).add_done_callback(partial(self._require_aligned, adapter))

    def _require_aligned(self, adapter: Adapter, loading: asyncio.Future[str]) -> None:
        """Drop an adapter whose files are missing or have changed: its requests fail one by one."""
        error = None if loading.cancelled() else loading.exception()
        if isinstance(error, (ModelError, RequestFailed)):
            logger.error("an adapter is lost: %s", error)
            if self.adapters.get(adapter.name) is adapter:
                del self.adapters[adapter.name], self._folders[adapter.name]

    async def _loaded(self, progress: Progress, *, is_successor: bool) -> Worker:
        worker = Worker(await self._forked(), wire.most_bytes(self.config), progress)
        try:
            config = self.config.model_dump_json()
            heartbeat_seconds = min(_HEARTBEAT_SECONDS, self._hang_seconds / _HEARTBEATS_PER_HANG)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=worker.process.socket)
            start = wire.Start(config, self._log_format, heartbeat_seconds, is_successor, self._watches_cache)
            worker.send(start)
            await worker.ready(self._hang_seconds, self._hang_seconds + self._load_seconds if is_successor else None)
            return worker
        except BaseException:
            await asyncio.shield(worker.close())
            if worker.loss is not None:
                await worker.cause()  # which sets its exit status
            raise

    async def _forked(self) -> Forked:
        """Fork a process; if the fork server has ended, start another one."""
        for _ in range(2):
            if self._forks is None:
                self._forks = self._start_forks()
            forking = asyncio.ensure_future(asyncio.to_thread(self._forks.fork))
            try:
                return await asyncio.shield(forking)
            except asyncio.CancelledError:
                forking.add_done_callback(_drop)
                raise
            except ForkServerGone:
                logger.warning("the fork server has ended; starting another one")
                await asyncio.to_thread(self._forks.close)
                self._forks = None
        raise EngineCrashed("the fork server ends immediately after its start")

    # -------------------------------------------------------------------------------------------- messages from it

    async def turn(self, wake: asyncio.Event) -> StepOutput | None:
        """Return the oldest unread output; None if only `wake` was set, so that the driver can send orders.

        Raises why the engine was lost, if it was: then call `restart`.
        """
        worker = self._current
        worker.wake = wake.set
        if not worker.outputs and worker.loss is None:
            await wake.wait()
            wake.clear()
        if worker.outputs:
            worker.send(wire.Taken())
            output = worker.outputs.popleft()
            events = tuple(event for event in output.events if self._has_reader(event, output.num_orders))
            return output._replace(events=events)
        if worker.loss is not None:
            raise await worker.cause()
        return None

    @property
    def _current(self) -> Worker:
        assert self._worker is not None, "not started, or between two engines"
        return self._worker

    def _has_reader(self, event: TokenEvent, num_orders: int) -> bool:
        """Whether the event belongs to a live request, not to an earlier one with the same id."""
        live = self._live.get(event.request_id)
        if live is None or num_orders < live.order:
            return False
        if event.finished is not None:
            live.num_sequences -= 1
            if not live.num_sequences:
                del self._live[event.request_id]
        return True

    # -------------------------------------------------------------------------------------------------- orders to it

    def add(self, request: Request) -> None:
        """Add a validated request before the next step. Raises wire.EncodeError if it does not fit into a message."""
        worker = self._current
        worker.send(request)
        pages = -(-request.num_tokens // self.facts.page_size)
        self._live[request.request_id] = _RemoteRequest(worker.num_orders, len(request.unfinished), pages)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None, keep: int | None = None) -> None:
        """End a request, or one output of it, as `Engine.finish` does; a later turn returns the terminal events."""
        if request_id in self._live:
            self._current.send(wire.Finish(request_id, reason, index, keep))

    def drop(self, request_id: str, reason: FinishReason) -> None:
        """End a request whose reader is gone; no later turn returns an event of it."""
        if self._live.pop(request_id, None) is not None:
            self._current.send(wire.Finish(request_id, reason, is_dropped=True))

    async def compile(self, guided: Guided, received: Sequence[tuple[int, ...]] = ()) -> None:
        """Let the engine's process compile a structure and check that it allows the tokens `received` of each output.

        Does not delay steps. Raises InvalidRequest, Unsupported, or Unavailable if the engine is lost.
        """
        await self._answer(wire.Compile(next(self._numbers), guided, tuple(received)), "compiled a structure")

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter between two steps; return its fingerprint. Raises ModelError, or Unavailable."""
        order = wire.LoadAdapter(next(self._numbers), name, folder)
        fingerprint = await self._answer(order, f"loaded adapter {name!r}")
        self.adapters[name], self._folders[name] = Adapter(name, 0, fingerprint), folder
        return fingerprint

    async def _answer(self, message: wire.Compile | wire.LoadAdapter, what: str) -> str:
        if self._worker is None or self._worker.loss is not None:
            raise Unavailable("ENGINE_RESTARTING", "the engine failed and is being restarted")
        try:
            return await self._worker.ask(message)
        except (EngineCrashed, EngineHung, wire.WireError) as loss:
            raise Unavailable("ENGINE_RESTARTING", f"the engine failed while it {what}") from loss

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses; nothing to do for a lost engine."""
        del self.adapters[name], self._folders[name]
        if self._worker is not None and self._worker.loss is None:
            self._worker.send(wire.UnloadAdapter(name))

    # ------------------------------------------------------------------------------------------ state of the engine

    @property
    def pid(self) -> int | None:
        """Number of the engine's process; None between two engines, and after the end."""
        return None if self._worker is None else self._worker.process.pid

    @property
    def load(self) -> EngineLoad:
        """The last reported load; between two engines that of a full engine."""
        return _FULL if self._worker is None else self._worker.newest.load

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_room(self) -> bool:
        """Whether another request can start: the last reported room, less the requests that were sent since."""
        if self._worker is None:
            return False
        load, seen = self._worker.newest.load, self._worker.newest.num_orders
        unseen = [live for live in self._live.values() if live.order > seen]
        sequences = load.num_running + load.num_waiting + sum(live.num_sequences for live in unseen)
        return sequences < self.config.max_batch_size and load.spare_pages > sum(live.num_pages for live in unseen)


def _log(stage: str) -> None:
    logger.info("%s", stage)


def _drop(forking: asyncio.Future[Forked]) -> None:
    """Close the socket of an abandoned process, which then ends."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().socket.close()
