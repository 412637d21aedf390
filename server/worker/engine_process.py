"""The engine's own process: one thread steps, another one reads orders. Knows no network.

The process steps as long as there is work, at most `MAX_LEAD` outputs ahead of what the front-end process has read.
Between two steps it executes the orders that have arrived. Structures are compiled at once, on other threads. When the
front-end process ends, this process ends too. The only text here is the source of structures.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.stats import StepStats
from engine.types import DraftStats, FinishedOutput, FinishReason, Grammar, Request, TokenEvent
from server.model import Progress
from server.telemetry import logs
from server.worker import wire
from server.worker.garbage import settle
from server.worker.structures import Structures, compiler_of

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.text.guided import GrammarCompiler

logger = logging.getLogger(__name__)

# Most unread outputs: enough that a step does not wait for the front ends, few enough that cancellations act soon.
MAX_LEAD = 2
_QUIET_SECONDS = 0.05  # without an order, after which an idle engine does what it has left for later
_RECEIVE_BYTES = 1 << 16


class FrontEndGone(EOFError):
    """Expected: the front-end process has ended, or closed the connection."""


@dataclass(frozen=True, slots=True)
class _Recompiled:
    """The structure of a request that waits for it has been compiled, or failed to."""

    request: Request
    grammar: Future[Grammar]


_Order: TypeAlias = wire.ToEngine | _Recompiled


class Link:
    """The engine's end of the socket. Its calls block, except `receive` with a time limit; any thread may `send`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._frames = sock, wire.Frames(wire.MOST_ORDER_BYTES)
        self._orders: SimpleQueue[_Order | Exception] = SimpleQueue()
        self._sending = threading.Lock()

    def first(self) -> wire.Start:
        """Wait for the first message. The front ends send no other one before the answer."""
        for message in self._read():
            if not isinstance(message, wire.Start):
                raise wire.WireError(f"a {type(message).__name__} before the start")
            return message
        raise FrontEndGone

    def listen(self, compile_structure: Callable[[wire.Compile], None]) -> None:
        """From now on read on another thread, where also structures are compiled, or begin to be: not between steps."""
        threading.Thread(target=self._listen, args=[compile_structure], name="orders", daemon=True).start()

    def _listen(self, compile_structure: Callable[[wire.Compile], None]) -> None:
        try:
            for message in self._read():
                if isinstance(message, wire.Compile):
                    compile_structure(message)
                else:
                    self._orders.put(message)
        except Exception as error:  # noqa: BLE001  # the thread that steps raises it
            self._orders.put(error)
        else:
            self._orders.put(FrontEndGone())

    def _read(self) -> Iterator[wire.ToEngine]:
        """Yield messages until the connection is closed. Raises FrontEndGone or WireError."""
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                for payload in self._frames.feed(data):
                    yield wire.read(payload, wire.TO_ENGINE)
        except OSError as error:
            raise FrontEndGone from error

    def put(self, order: _Order) -> None:
        """Let `receive` yield an order of this process; any thread may call this."""
        self._orders.put(order)

    def receive(self, seconds: float) -> Iterator[_Order]:
        """Wait for at most `seconds`, and yield the orders that have arrived. Raises FrontEndGone or WireError."""
        try:
            order = self._orders.get(timeout=seconds) if seconds else self._orders.get_nowait()
            while True:
                if isinstance(order, Exception):
                    raise order
                yield order
                order = self._orders.get_nowait()
        except Empty:
            return

    @property
    def has_news(self) -> bool:
        """Whether `receive` would return at once."""
        return not self._orders.empty()

    def send(self, message: wire.ToFrontEnd) -> None:
        """Send the whole message. Raises FrontEndGone if the connection is closed."""
        frame = wire.framed(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise FrontEndGone from error


class EngineServer:
    """Executes orders of the front ends on the engine, turn by turn, and reports the results."""

    def __init__(self, link: Link, engine: Engine, structures: Structures, start: wire.Start) -> None:
        self._watches_cache, self._is_successor = start.watches_cache, start.is_successor
        if self._watches_cache:
            engine.pages.watch()
        self._link, self._engine, self._structures = link, engine, structures
        self._beat_seconds, self._spoke = start.beat_seconds, time.monotonic()
        self._order = 0  # number of the last order that was executed
        self._lead = 0  # outputs that the front ends have not read
        # By the id of a request whose structure is compiled again: the orders that its outputs get when it is added.
        self._compiling: dict[str, list[wire.Finish]] = {}
        self._events: list[TokenEvent] = []  # not sent yet
        self._has_chores = True  # for the engine, once nobody waits: until it says that nothing is left
        self._is_calm = False  # whether no order has come for a while
        link.listen(lambda asked: structures.answer(asked, link.send))

    def turn(self) -> None:
        """Execute the orders that have arrived, report their results, and take a step if there is work.

        An engine that is idle rests: one chore at a time, after a moment in which no order has come. It calibrates
        from its first sign of life without an order until the next order, so that whoever asks as soon as the server is
        ready, or again and again, never waits for it. A standby does not: another engine needs the machine. Nor does
        one that has not been told with what text.
        """
        told, is_quiet = self._order, True
        for message in self._link.receive(self._patience):
            self._obey(message)
            is_quiet = False
        if self._events or (self._order != told and not self._may_step):
            self._tell(None)
        if self._may_step:
            output = self._engine.step()
            self._events += output.events
            self._tell(output.stats)
            return
        is_due = self._beat()
        if self._is_idle and (is_due or (is_quiet and self._has_chores)):
            self._is_calm |= is_due
            has_text = self._engine.calibration_text is not None
            calibrates = self._is_calm and has_text and not (self._is_successor and not self._order)
            self._has_chores = self._engine.rest(self._is_wanted if calibrates else None)

    def _beat(self) -> bool:
        """Send a sign of life if one is due; whether it was."""
        is_due = time.monotonic() - self._spoke >= self._beat_seconds
        if is_due:
            self._send(wire.Beat())
        return is_due

    def _is_wanted(self) -> bool:
        """Whether an order has arrived. Called after each step of a chore."""
        self._beat()
        return self._link.has_news

    @property
    def _patience(self) -> float:
        """Most seconds to wait for an order."""
        if self._may_step:
            return 0.0
        return min(_QUIET_SECONDS, self._beat_seconds) if self._is_idle and self._has_chores else self._beat_seconds

    @property
    def _is_idle(self) -> bool:
        return not (self._engine.has_work or self._compiling)

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and self._lead < MAX_LEAD

    # ------------------------------------------------------------------------------------------------------ orders

    def _obey(self, message: _Order) -> None:
        match message:
            case wire.Taken():
                self._lead -= 1
                return
            case wire.CalibrationText():
                self._engine.calibration_text, self._has_chores = message.token_ids, True
                return
            case wire.Add():
                self._take(message.request)
            case wire.Finish(is_dropped=True):
                self._end(message.request_id, message.reason)
            case wire.Finish():
                self._finish(message)
            case wire.LoadAdapter():
                self._load_adapter(message)
            case wire.UnloadAdapter():
                self._engine.adapters.unload(message.name)
            case _Recompiled():
                self._add_compiled(message)
                return
            case _:
                raise wire.WireError(f"a {type(message).__name__} after the start")
        self._order, self._has_chores, self._is_calm = message.order, True, False

    def _load_adapter(self, order: wire.LoadAdapter) -> None:
        """Load an adapter between two steps, and answer at once."""
        try:
            loaded = self._engine.adapters.load(order.name, Path(order.folder), order.fingerprint)
        except ModelError as error:
            self._send(wire.AdapterAnswer(order.order, problem=str(error)))
        else:
            self._send(wire.AdapterAnswer(order.order, loaded.fingerprint))

    def _take(self, request: Request) -> None:
        """Add a request, with its structure. If that is not kept, it is compiled again first, while steps go on."""
        guided = request.sampling.guided
        if guided is None:
            self._add(request)
        elif (grammar := self._structures.ready(guided)) is not None:
            self._add(replace(request, grammar=grammar))
        else:
            self._compiling[request.request_id] = []
            again = self._structures.again(guided)
            again.add_done_callback(lambda grammar: self._link.put(_Recompiled(request, grammar)))

    def _add_compiled(self, compiled: _Recompiled) -> None:
        request = compiled.request
        finishes = self._compiling.pop(request.request_id, None)
        if finishes is None:
            return  # its reader is gone
        try:
            grammar = compiled.grammar.result()
        except Exception as error:
            logger.exception("request %s: its structure did not compile again", request.request_id)
            self._refuse(request, str(error))
        else:
            self._add(replace(request, grammar=grammar))
            for order in finishes:
                self._finish(order)

    def _add(self, request: Request) -> None:
        try:
            self._events += self._engine.add(request)
        except Exception as error:  # the front ends have checked the request, so this is an internal fault
            logger.exception("request %s: the engine refused it", request.request_id)
            self._refuse(request, str(error))

    def _finish(self, order: wire.Finish) -> None:
        if order.request_id in self._compiling:
            self._compiling[order.request_id].append(order)
        else:
            self._events += self._engine.finish(order.request_id, order.reason, index=order.index, keep=order.keep)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        """End a dropped request; discard its events that are not sent yet."""
        self._compiling.pop(request_id, None)
        self._engine.finish(request_id, reason)
        self._events = [event for event in self._events if event.request_id != request_id]

    # ------------------------------------------------------------------------------------------------- messages

    def _refuse(self, request: Request, problem: str) -> None:
        """Store the terminal events of a request that was never added to the engine."""
        finished = FinishedOutput(
            reason=FinishReason.ERROR,
            prompt_tokens=len(request.token_ids),
            completion_tokens=0,
            seed=request.sampling.seed or 0,
            speculation=self._engine.speculation_of(request),
            stats=DraftStats(),
            error=problem,
        )
        self._events += (
            TokenEvent(request_id=request.request_id, index=index, finished=finished) for index in request.unfinished
        )

    def _tell(self, stats: StepStats | None) -> None:
        """Send the stored events; those with prompt log-probabilities one by one, to keep messages below the limit."""
        events, self._events = self._events, []
        load = self._engine.load
        for event in events:
            if event.prompt_logprobs:
                self._send(wire.StepReport((event,), None, self._order, load))
        rest = tuple(event for event in events if not event.prompt_logprobs)
        changes = self._engine.pages.take_changes() if self._watches_cache else ()
        self._send(wire.StepReport(rest, stats, self._order, load, changes))

    def _send(self, message: wire.StepReport | wire.AdapterAnswer | wire.Beat) -> None:
        self._lead += isinstance(message, wire.StepReport)
        self._link.send(message)
        self._spoke = time.monotonic()


LoadEngine = Callable[..., "Engine"]  # of a config and a progress; `is_successor`: it calibrates nothing
MakeCompiler = Callable[["Engine", EngineConfig], "GrammarCompiler"]


def serve(link: Link, load: LoadEngine, make_compiler: MakeCompiler = compiler_of) -> None:
    """Load what the first message names, and serve it until the connection is closed."""
    start = link.first()
    logs.configure(start.log_format)
    config = EngineConfig.model_validate_json(start.config)
    try:
        engine = load(config, lambda stage: link.send(wire.Progress(stage)), is_successor=start.is_successor)
    except ModelError as error:
        link.send(wire.Refused(str(error)))
        return
    settle()
    adapters = {name: adapter.fingerprint for name, adapter in engine.adapters.items()}
    server = EngineServer(link, engine, Structures(partial(make_compiler, engine, config)), start)
    link.send(wire.Ready(engine.facts, engine.load, adapters))
    while True:
        server.turn()


def load_engine(config: EngineConfig, progress: Progress, *, is_successor: bool = False) -> Engine:
    """Load the engine alone: its front ends have the tokenizer and the template."""
    from engine.startup.warm import load

    return load(config, progress, is_successor=is_successor, rests=True)


def main(load: LoadEngine = load_engine, make_compiler: MakeCompiler = compiler_of) -> None:
    """Run the process; its only argument is the number of an open socket. Never returns.

    The fork server has set how this process handles signals, and that it ends with its parent.
    """
    code = 1
    link = Link(socket.socket(fileno=int(sys.argv[1])))  # stays open: when it closes, the status is set
    try:
        serve(link, load, make_compiler)
    except FrontEndGone:
        code = 0
    except wire.WireError as error:
        logger.error("the front-end process is not understood: %s", error)  # noqa: TRY400  # a traceback is of no use
    except Exception:
        logger.exception("the engine failed")
    finally:
        logging.shutdown()
        os._exit(code)  # does not wait for threads that still compile a structure
