"""The engine's own process: it receives orders and sends outputs, on one thread. Knows no network.

The process steps as long as there is work, at most `MAX_LEAD` outputs ahead of what the front-end process has read.
Between two steps it reads new orders. When the front-end process ends, this process ends too. The only text here is the
source of structures.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.params import Guided
from engine.stats import StepStats
from engine.types import DraftStats, FinishedOutput, FinishReason, Grammar, Request, TokenEvent
from server.model import CompileGrammar, EngineView, Progress, ServedModel, model_name
from server.telemetry import logs
from server.worker import wire
from server.worker.garbage import settle

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.text.guided import GrammarCompiler

logger = logging.getLogger(__name__)

# Most unread outputs: enough that a step does not wait for the front ends, few enough that cancellations act soon.
MAX_LEAD = 2
COMPILE_THREADS = 2
# The front ends have compiled each structure in time; that this process is busier must not end its request.
COMPILE_SECONDS = 300.0
_QUIET_SECONDS = 0.05  # without an order, after which an idle engine does what it has left for later
_RECEIVE_BYTES = 1 << 16


class FrontEndGone(EOFError):
    """Expected: the front-end process has ended, or closed the connection."""


class Link:
    """The engine's end of the sockets. Its calls block, except `receive` with a time limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._frames = sock, wire.Frames(wire.MOST_ORDER_BYTES)
        self._woken, self._waker = socket.socketpair()

    def wake(self) -> None:
        """Let a waiting `receive` return; any thread may call this."""
        self._waker.send(b"\0")

    def receive(self, seconds: float | None) -> Iterator[wire.ToEngine]:
        """Wait for at most `seconds`, and yield the messages that have arrived. Raises FrontEndGone or WireError."""
        ready, _, _ = select.select([self._socket, self._woken], [], [], seconds)
        if self._woken in ready:
            self._woken.recv(_RECEIVE_BYTES)
        if self._socket in ready:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise FrontEndGone from error
            if not data:
                raise FrontEndGone
            for payload in self._frames.feed(data):
                yield wire.read(payload, wire.TO_ENGINE)

    @property
    def has_news(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(select.select([self._socket, self._woken], [], [], 0.0)[0])

    def send(self, message: wire.ToFrontEnd) -> None:
        """Send the whole message. Raises FrontEndGone if the connection is closed."""
        try:
            self._socket.sendall(wire.framed(message))
        except OSError as error:
            raise FrontEndGone from error

    def close(self) -> None:
        for end in (self._socket, self._woken, self._waker):
            end.close()


class EngineServer:
    """Executes orders of the front ends on the engine, turn by turn, and reports the results."""

    def __init__(self, link: Link, engine: Engine, compile_grammar: CompileGrammar | None, start: wire.Start) -> None:
        self._watches_cache, self._is_successor = start.watches_cache, start.is_successor
        if self._watches_cache:
            engine.pages.watch()
        self._link, self._engine, self._compile = link, engine, compile_grammar
        self._beat_seconds, self._spoke = start.beat_seconds, time.monotonic()
        self._order = 0  # number of the last order that was executed
        self._lead = 0  # outputs that the front ends have not read
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        # By request id: a request, its structure in the making, and the orders that its outputs get when it is added.
        self._compiling: dict[str, tuple[Request, Future[Grammar], list[wire.Finish]]] = {}
        self._events: list[TokenEvent] = []  # not sent yet
        self._has_chores = True  # for the engine, once nobody waits: until it says that nothing is left
        self._is_calm = False  # whether no order has come for a while

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
        self._add_compiled()
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

    def _obey(self, message: wire.ToEngine) -> None:
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
            case wire.Start():
                raise wire.WireError("a second start")
        self._order, self._has_chores, self._is_calm = message.order, True, False

    def _load_adapter(self, order: wire.LoadAdapter) -> None:
        """Load an adapter between two steps, and answer at once."""
        try:
            loaded = self._engine.adapters.load(order.name, Path(order.folder), order.fingerprint)
        except ModelError as error:
            self._send(wire.AdapterAnswer(order.name, problem=str(error)))
        else:
            self._send(wire.AdapterAnswer(order.name, loaded.fingerprint))

    def _take(self, request: Request) -> None:
        """Add a request. If it has a structure, compile that first, on another thread so that steps do not wait."""
        if request.sampling.guided is None or self._compile is None:
            self._add(request)
            return
        future = self._threads.submit(self._compile, request.sampling.guided)
        future.add_done_callback(lambda _: self._link.wake())
        self._compiling[request.request_id] = request, future, []

    def _add_compiled(self) -> None:
        for name, (request, future, finishes) in list(self._compiling.items()):
            if future.done():
                del self._compiling[name]
                try:
                    grammar = future.result()
                except Exception as error:
                    logger.exception("request %s: its structure did not compile again", name)
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
            self._compiling[order.request_id][2].append(order)
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


LoadEngine = Callable[..., ServedModel]  # of a config and a progress; `is_successor`: it calibrates nothing


def serve(link: Link, load: LoadEngine) -> None:
    """Load what the first message names, and serve it until the connection is closed."""
    start = _first(link)
    logs.configure(start.log_format)
    config = EngineConfig.model_validate_json(start.config)
    try:
        model = load(config, lambda stage: link.send(wire.Progress(stage)), is_successor=start.is_successor)
    except ModelError as error:
        link.send(wire.Refused(str(error)))
        return
    engine = cast("Engine", model.engine)  # a model that was loaded here has its engine in this process
    settle()
    adapters = {name: adapter.fingerprint for name, adapter in engine.adapters.items()}
    pages, names = (engine.total_pages, engine.page_size), engine.proposer_names
    link.send(wire.Ready(engine.limits, names, *pages, engine.loop, engine.dtype, model.device, engine.load, adapters))
    server = EngineServer(link, engine, model.compile_grammar, start)
    while True:
        server.turn()


def structure_compiler(engine: EngineView, config: EngineConfig, seconds: float = COMPILE_SECONDS) -> CompileGrammar:
    """Return what compiles structures as `GrammarCompiler` does, and reads a tokenizer for the first of them."""
    lock = threading.Lock()

    @cache
    def made() -> GrammarCompiler:
        from engine.text.codec import Codec
        from engine.text.guided import GrammarCompiler

        sizes = engine.vocab_size, engine.eos_token_ids
        found = GrammarCompiler.of(Codec.load(config.target, config.revision), *sizes, config, seconds)
        assert found is not None, "the front ends refuse structures of a model that has none"
        return found

    def compiled(guided: Guided) -> Grammar:
        with lock:
            compiler = made()
        return compiler.compile(guided)

    return compiled


def load_engine(config: EngineConfig, progress: Progress, *, is_successor: bool = False) -> ServedModel:
    """Load the engine alone: its front ends have the tokenizer and the template."""
    from engine.startup.build import pick_device
    from engine.startup.warm import load

    engine = load(config, progress, is_successor=is_successor, rests=True)
    device, compiler = str(pick_device(config.device)), structure_compiler(engine, config)
    return ServedModel(model_name(config.target), None, device, engine, None, compiler)


def main(load: LoadEngine = load_engine) -> None:
    """Run the process; its only argument is the number of an open socket. Never returns.

    The fork server has set how this process handles signals, and that it ends with its parent.
    """
    code = 1
    link = Link(socket.socket(fileno=int(sys.argv[1])))  # stays open: when it closes, the status is set
    try:
        serve(link, load)
    except FrontEndGone:
        code = 0
    except wire.WireError as error:
        logger.error("the front-end process is not understood: %s", error)  # noqa: TRY400  # a traceback is of no use
    except Exception:
        logger.exception("the engine failed")
    finally:
        logging.shutdown()
        os._exit(code)  # does not wait for threads that still compile a structure


def _first(link: Link) -> wire.Start:
    """Wait for the first message, which must be Start. The front ends send no other message before the answer."""
    while True:
        for message in link.receive(None):
            if not isinstance(message, wire.Start):
                raise wire.WireError(f"a {type(message).__name__} before the start")
            return message
