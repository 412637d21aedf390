"""The front-end process's view of an engine in its own process. Orders are sent at once; the engine never waits.

The engine's process is a child of this one, connected by a pair of sockets that no other process can open. It is killed
if it sends nothing for too long, or bytes that are not a valid message. It ends when this process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.params import SpeculationSettings
from engine.request.intake import Intake, Limits
from engine.types import FinishReason, Request
from server.config import LogFormat
from server.model import EngineView, Progress, ServedModel
from server.worker import wire
from server.worker.channel import Channel
from server.worker.child import ENGINE, Child, said
from server.worker.host import TurnOutput

logger = logging.getLogger(__name__)

MOST_BEAT_SECONDS = 1.0  # the engine sends a message at least this often
_BEATS_PER_HANG = 4

Around = Callable[[EngineView, EngineConfig, str], ServedModel]


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """What the engine's process runs (Python source; its last argument is a socket), and the loader for this process.

    `around` loads what this process needs: tokenizer, grammar compiler and chat template.
    """

    source: str = ENGINE
    around: Around = ServedModel.around


@dataclass(slots=True)
class _RemoteRequest:
    """A request that was sent to the engine and has not ended."""

    request_id: str
    order: int
    num_sequences: int  # outputs that have not ended
    num_pages: int  # of its prompt


class RemoteEngine:
    """A Host whose engine runs in another process, and the last known state of that engine."""

    is_hung = False  # a hung process can be killed

    def __init__(
        self, config: EngineConfig, program: EngineProgram, hang_seconds: float, log_format: LogFormat = "text",
        child: Child | None = None,
    ) -> None:  # fmt: skip
        """`child` already runs `program`; without it, `start` starts the process."""
        self.config = config
        self._program, self._hang_seconds, self._log_format = program, hang_seconds, log_format
        self._limit = wire.most_bytes(config)
        self._child = child
        self._channel: Channel | None = None
        self._order = self._ticket = 0
        self._wake = asyncio.Event()
        self._live: dict[int, _RemoteRequest] = {}
        self._tickets: dict[str, int] = {}
        self._outputs: deque[wire.StepReport] = deque()
        self._loss: Exception | None = None

    # ---------------------------------------------------------------------------------- start and end of the process

    async def start(self, progress: Progress) -> ServedModel:
        """Start the process, wait until it is ready, and load the tokenizer and the like in this process."""
        await self._spawn(progress)
        return await asyncio.to_thread(self._program.around, self, self.config, self._facts.device)

    async def restart(self) -> None:
        """Start another process in place of the lost one."""
        await self.close()
        await self._spawn(lambda stage: logger.info("%s", stage))

    async def close(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._channel is not None:
            self._channel.close()
        if self._child is not None:
            process = self._child.process
            process.kill()
            status = await asyncio.to_thread(process.wait)
            logger.info("the engine's process %d has ended: %s", process.pid, said(status))
        self._child = self._channel = None

    async def _spawn(self, progress: Progress) -> None:
        self._live, self._tickets, self._outputs, self._loss, self._progress = {}, {}, deque(), None, progress
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(
            lambda ready: ready.cancelled() or ready.exception()
        )  # the waiting task may be gone
        child = self._child = self._child or Child.start(self._program.source)
        beat = min(MOST_BEAT_SECONDS, self._hang_seconds / _BEATS_PER_HANG)
        make = lambda: Channel(self._limit, self._take, self._lose)  # noqa: E731
        _, self._channel = await asyncio.get_running_loop().create_unix_connection(make, sock=child.socket)
        self._send(wire.Start(self.config.model_dump_json(), self._log_format, beat))
        self._facts = facts = await self._ready
        limits = Limits(facts.vocab_size, facts.max_model_len, facts.eos_token_ids)
        self._load, self._intake = facts.load, Intake(self.config, limits, facts.proposer_names)
        self._channel.watch(self._hang_seconds)

    def _lose(self, error: Exception) -> None:
        """Record that the engine is lost, kill its process, and wake the waiting turn."""
        if self._loss is None:
            self._loss = error
            if not self._ready.done():
                self._ready.set_exception(error)
            if self._child is not None:
                self._child.process.kill()
            self._wake.set()

    # -------------------------------------------------------------------------------------------- messages from it

    def _take(self, message: wire.ToFrontEnd) -> None:
        match message:
            case wire.StepReport():
                self._outputs.append(message)
                self._load = message.load
                self._wake.set()
            case wire.Progress():
                self._progress(message.stage)
            case wire.Ready():
                self._ready.set_result(message)
            case wire.Refused():
                self._loss = ModelError(message.problem)
                self._ready.set_exception(self._loss)

    async def turn(self, wake: asyncio.Event) -> TurnOutput | None:
        """Return the oldest unread output; None if only `wake` was set, so that the driver can send orders."""
        self._wake = wake
        if not self._outputs and self._loss is None:
            await wake.wait()
            wake.clear()
        if self._outputs:
            self._send(wire.Taken())
            output = self._outputs.popleft()
            read = [(event, self._reader(event)) for event in output.events]
            return TurnOutput(tuple(event.named(name) for event, name in read if name is not None), output.stats)
        if self._loss is not None:
            raise self._loss
        return None

    def _reader(self, event: wire.Event) -> str | None:
        """Return the id of the event's request; None if its reader is gone."""
        live = self._live.get(event.ticket)
        if live is None:
            return None
        if event.finished is not None:
            live.num_sequences -= 1
            if not live.num_sequences:
                self._forget(live.request_id)
        return live.request_id

    # -------------------------------------------------------------------------------------------------- orders to it

    def add(self, request: Request) -> None:
        """See Host. Raises wire.Unsayable for a request that does not fit into a message."""
        self._ticket += 1
        # A compiled structure cannot be sent. The request also contains its source.
        self._send(wire.Add(self._next_order(), self._ticket, replace(request, grammar=None)))
        pages = -(-request.num_tokens // self._facts.page_size)
        self._live[self._ticket] = _RemoteRequest(request.request_id, self._order, len(request.unfinished), pages)
        self._tickets[request.request_id] = self._ticket

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None, keep: int | None = None) -> None:
        """See Host."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._send(wire.Finish(self._next_order(), ticket, reason, index, keep))

    def drop(self, request_id: str, reason: FinishReason) -> None:
        """See Host."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._send(wire.Drop(self._next_order(), ticket, reason))
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._live[self._tickets.pop(request_id)]

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _send(self, message: wire.ToEngine) -> None:
        assert self._channel is not None, "not started"
        self._channel.send(wire.framed(message, self._limit))

    # ------------------------------------------------------------------------------------------ state of the engine

    @property
    def engine(self) -> EngineView:
        """This object, which has the last known state of the engine."""
        return self

    @property
    def has_work(self) -> bool:
        """Whether any request was sent to the engine and has not ended."""
        return bool(self._live)

    @property
    def has_room(self) -> bool:
        """Whether another request can start: the last reported room, less the requests that were sent since."""
        unseen = [live for live in self._live.values() if live.order > self._load.order]
        sequences = self._load.num_running + self._load.num_waiting + sum(live.num_sequences for live in unseen)
        return sequences < self.config.max_batch_size and self._load.spare_pages > sum(
            live.num_pages for live in unseen
        )

    def check(self, request: Request) -> None:
        """Check the request in this process, as the engine does."""
        self._intake.check(request)

    def speculation_of(self, request: Request) -> SpeculationSettings:
        """The effective speculation settings of a request."""
        return self._intake.speculation_of(request)

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return self._facts.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._facts.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-text tokens."""
        return self._facts.eos_token_ids

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """Names of the proposers that a request may select."""
        return self._facts.proposer_names

    @property
    def loop(self) -> str:
        """How sequences decode where they can, as reported at load: `rounds` on the device, or `plain` steps."""
        return self._facts.loop

    @property
    def dtype(self) -> str:
        """Type of the target's activations, keys and values."""
        return self._facts.dtype

    @property
    def default_proposer(self) -> str:
        """The proposer of a request that names none."""
        return self._intake.default_proposer

    @property
    def num_running(self) -> int:
        """The last reported value."""
        return self._load.num_running

    @property
    def num_waiting(self) -> int:
        """The last reported value."""
        return self._load.num_waiting

    @property
    def total_pages(self) -> int:
        """Pages of the target's arena."""
        return self._facts.total_pages

    @property
    def free_pages(self) -> int:
        """The last reported value."""
        return self._load.free_pages

    @property
    def spec_gain(self) -> float:
        """The last reported value."""
        return self._load.spec_gain
