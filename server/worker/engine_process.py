"""The engine's process: one thread steps, another reads orders.

The process steps while there is work, at most `MAX_LEAD` outputs ahead of the front-end process. Between two steps it
executes the orders that have arrived. Structures are compiled immediately, on other threads. When the front-end process
ends, this process ends, too.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import GrammarFault, InvalidRequest, ModelError, Unsupported
from pilotfish.engine.params import Guided
from pilotfish.engine.stats import StepOutput
from pilotfish.engine.types import (
    GRAMMAR_TOKENS,
    DraftStats,
    FinishedOutput,
    FinishReason,
    Grammar,
    Request,
    TokenEvent,
)
from pilotfish.server.model import Progress
from pilotfish.server.telemetry import logs
from pilotfish.server.worker import wire
from pilotfish.server.worker.garbage import settle

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.text.guided import GrammarCompiler

logger = logging.getLogger(__name__)

# Maximum unread outputs: enough that steps do not wait for the front ends, few enough that cancellations act soon.
MAX_LEAD = 2
_QUIET_SECONDS = 0.05  # without an order, after which an idle engine runs deferred work
_RECEIVE_BYTES = 1 << 16
COMPILE_THREADS = 2
# For a structure that was compiled in time before: its request must not fail because this process is busier now.
AGAIN_SECONDS = 300.0


class FrontEndGone(EOFError):
    """Expected: the front-end process has ended, or closed the connection."""


@dataclass(frozen=True, slots=True, eq=False)
class _Compiling:
    """A request that waits for its structure, and the ends of its outputs ordered in the meantime."""

    request: Request
    grammar: Future[Grammar]
    finishes: list[wire.Finish] = field(default_factory=list)


_Received: TypeAlias = wire.Message | _Compiling | Exception


class Link:
    """The engine's end of the socket. Its calls block, except `receive` with a time limit; any thread may `send`.

    `received` has what `receive` will yield, or raise; any thread may add to it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._frames = sock, wire.Frames(wire.MOST_ORDER_BYTES)
        self.received: SimpleQueue[_Received] = SimpleQueue()
        self._sending = threading.Lock()

    def first(self) -> wire.Start:
        """Wait for the first message. The front ends send no other before its answer."""
        message = next(self._read())
        if not isinstance(message, wire.Start):
            raise wire.WireError(f"a {type(message).__name__} before the start")
        return message

    def listen(self, compile_structure: Callable[[wire.Compile], None]) -> None:
        """Start the thread that reads messages and starts the compilation of structures, independent of steps."""
        threading.Thread(target=self._listen, args=[compile_structure], name="orders", daemon=True).start()

    def _listen(self, compile_structure: Callable[[wire.Compile], None]) -> None:
        try:
            for message in self._read():
                if isinstance(message, wire.Compile):
                    compile_structure(message)
                else:
                    self.received.put(message)
        except Exception as error:  # noqa: BLE001  # re-raised on the thread that steps
            self.received.put(error)

    def _read(self) -> Iterator[wire.Message]:
        """Yield messages. Raises FrontEndGone when the connection is closed, or WireError."""
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                for payload in self._frames.feed(data):
                    yield wire.read(payload)
        except OSError as error:
            raise FrontEndGone from error
        raise FrontEndGone

    def receive(self, seconds: float) -> Iterator[wire.Message | _Compiling]:
        """Wait for at most `seconds`, and yield what has been received. Raises FrontEndGone or WireError."""
        try:
            order = self.received.get(timeout=seconds) if seconds else self.received.get_nowait()
            while True:
                if isinstance(order, Exception):
                    raise order
                yield order
                order = self.received.get_nowait()
        except Empty:
            return

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
        self._heartbeat_seconds, self._last_sent = start.heartbeat_seconds, time.monotonic()
        self._num_orders = 0  # that were executed
        self._lead = 0  # outputs that the front ends have not read
        self._compiling: dict[str, _Compiling] = {}  # by the id of a request whose structure is compiled again
        self._events: list[TokenEvent] = []  # not sent yet
        self._has_idle_work = True  # whether the engine may have deferred work
        self._is_calm = False  # whether no order has arrived for a while
        link.listen(lambda asked: structures.answer(asked, link.send))

    def turn(self) -> None:
        """Execute the orders that have arrived, report their results, and run a step if there is work.

        An idle engine runs deferred work in small pieces, after a short time without orders. It calibrates between its
        first heartbeat without an order and the next order, so that a request that arrives when the server becomes
        ready, or soon after another one, never waits for it. A standby does not calibrate, because another engine uses
        the machine, nor does an engine that has not received the calibration text.
        """
        reported, is_quiet = self._num_orders, True
        for message in self._link.receive(self._patience):
            self._execute(message)
            is_quiet = False
        if self._events or (self._num_orders != reported and not self._may_step):
            self._report(StepOutput((), None, self._engine.load))
        if self._may_step:
            self._report(self._engine.step())
            return
        is_due = self._heartbeat()
        if self._is_idle and (is_due or (is_quiet and self._has_idle_work)):
            self._is_calm |= is_due
            has_text = self._engine.calibration_text is not None
            calibrates = self._is_calm and has_text and not (self._is_successor and not self._num_orders)
            self._has_idle_work = self._engine.idle_tick(self._is_wanted if calibrates else None)

    def _heartbeat(self) -> bool:
        """Send a heartbeat if one is due; whether it was."""
        is_due = time.monotonic() - self._last_sent >= self._heartbeat_seconds
        if is_due:
            self._send(wire.Heartbeat())
        return is_due

    def _is_wanted(self) -> bool:
        """Whether an order has arrived. Called between pieces of deferred work."""
        self._heartbeat()
        return not self._link.received.empty()

    @property
    def _patience(self) -> float:
        """Maximum seconds to wait for an order."""
        if self._may_step:
            return 0.0
        return min(_QUIET_SECONDS if self._is_idle and self._has_idle_work else math.inf, self._heartbeat_seconds)

    @property
    def _is_idle(self) -> bool:
        return not (self._engine.has_work or self._compiling)

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and self._lead < MAX_LEAD

    # ------------------------------------------------------------------------------------------------------ orders

    def _execute(self, message: wire.Message | _Compiling) -> None:
        match message:
            case wire.Taken():
                self._lead -= 1
                return
            case wire.CalibrationText():
                self._engine.calibration_text, self._has_idle_work = message.token_ids, True
                return
            case _Compiling():
                self._add_compiled(message)
                return
            case Request():
                self._add(message)
            case wire.Finish(is_dropped=True):
                self._drop(message.request_id, message.reason)
            case wire.Finish():
                self._finish(message)
            case wire.LoadAdapter():
                self._send(_answer(message.number, "the adapter could not be loaded", lambda: self._load(message)))
            case wire.UnloadAdapter():
                self._engine.adapters.unload(message.name)
            case _:
                raise wire.WireError(f"a {type(message).__name__} after the start")
        self._num_orders, self._has_idle_work, self._is_calm = self._num_orders + 1, True, False

    def _load(self, order: wire.LoadAdapter) -> str:
        return self._engine.adapters.load(order.name, Path(order.folder), order.fingerprint).fingerprint

    def _add(self, request: Request) -> None:
        """Add a request, with its structure. If that is no longer cached, it is compiled again while steps continue."""
        guided = request.sampling.guided
        grammar = None if guided is None else self._structures.ready(guided)
        if guided is None or grammar is not None:
            self._add_ready(replace(request, grammar=grammar))
            return
        waiting = _Compiling(request, self._structures.again(guided))
        self._compiling[request.request_id] = waiting
        waiting.grammar.add_done_callback(lambda _: self._link.received.put(waiting))

    def _add_compiled(self, waiting: _Compiling) -> None:
        request = waiting.request
        if self._compiling.get(request.request_id) is not waiting:
            return  # its reader is gone
        del self._compiling[request.request_id]
        if (error := waiting.grammar.exception()) is not None:
            self._refuse(request, error)
            return
        self._add_ready(replace(request, grammar=waiting.grammar.result()))
        for order in waiting.finishes:
            self._finish(order)

    def _add_ready(self, request: Request) -> None:
        try:
            self._events += self._engine.add(request)
        except Exception as error:  # noqa: BLE001  # the front ends have checked the request; `_refuse` logs it
            self._refuse(request, error)

    def _finish(self, order: wire.Finish) -> None:
        if order.request_id in self._compiling:
            self._compiling[order.request_id].finishes.append(order)
        else:
            self._events += self._engine.finish(order.request_id, order.reason, index=order.index, keep=order.keep)

    def _drop(self, request_id: str, reason: FinishReason) -> None:
        """End a request whose reader is gone; discard its unsent events."""
        self._compiling.pop(request_id, None)
        self._engine.finish(request_id, reason)
        self._events = [event for event in self._events if event.request_id != request_id]

    # ------------------------------------------------------------------------------------------------- messages

    def _refuse(self, request: Request, error: BaseException) -> None:
        """Store the terminal events of a request that could not be added to the engine because of an internal error."""
        logger.error("request %s was not added to the engine", request.request_id, exc_info=error)
        finished = FinishedOutput(
            reason=FinishReason.ERROR,
            prompt_tokens=len(request.token_ids),
            completion_tokens=0,
            seed=request.sampling.seed or 0,
            speculation=self._engine.speculation_of(request),
            stats=DraftStats(),
            error=str(error),
        )
        self._events += (
            TokenEvent(request_id=request.request_id, index=index, finished=finished) for index in request.unfinished
        )

    def _report(self, output: StepOutput) -> None:
        """Send an output, after the stored events; prompt log-probabilities one by one, to keep messages small."""
        events, self._events = (*self._events, *output.events), []
        output = output._replace(num_orders=self._num_orders)
        for event in events:
            if event.prompt_logprobs:
                self._send(output._replace(events=(event,), stats=None))
        rest = tuple(event for event in events if not event.prompt_logprobs)
        changes = self._engine.pages.take_changes() if self._watches_cache else ()
        self._send(output._replace(events=rest, cache_changes=changes))

    def _send(self, message: StepOutput | wire.Answer | wire.Heartbeat) -> None:
        self._lead += isinstance(message, StepOutput)
        self._link.send(message)
        self._last_sent = time.monotonic()


class Structures:
    """Threads that compile structures, for callers that wait and for requests whose structure is no longer cached."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        """`make` is called for the first structure: it reads a tokenizer, which takes time and memory."""
        self._make, self._making = make, threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="structure")

    def ready(self, guided: Guided) -> Grammar | None:
        """Return the grammar if it is cached; does not block."""
        return None if self._compiler is None else self._compiler.ready(guided)

    def again(self, guided: Guided) -> Future[Grammar]:
        """Compile a structure again that is no longer cached, or that an earlier engine compiled."""
        return self._threads.submit(lambda: self._made().compile(guided, AGAIN_SECONDS))

    def answer(self, asked: wire.Compile, send: Callable[[wire.Answer], None]) -> None:
        """Compile, check the tokens, and `send` the answer, on another thread."""

        def checked() -> str:
            require_fit(asked.received, self._made().compile(asked.guided))
            return ""

        self._threads.submit(lambda: send(_answer(asked.number, "the structure could not be compiled", checked)))

    def _made(self) -> GrammarCompiler:
        with self._making:
            self._compiler = self._compiler or self._make()
        return self._compiler


def _answer(number: int, problem: str, work: Callable[[], str]) -> wire.Answer:
    """Do the work of a message, and return the answer to it."""
    try:
        return wire.Answer(number, work())
    except InvalidRequest as error:
        return wire.Answer(number, violations=error.violations)
    except Unsupported as error:
        return wire.Answer(number, unsupported=str(error))
    except ModelError as error:
        return wire.Answer(number, refused=str(error))
    except Exception:
        logger.exception(problem)
        return wire.Answer(number, fault=problem)


LoadEngine = Callable[..., "Engine"]  # from a config and a progress callback; `is_successor`: without calibration
MakeCompiler = Callable[["Engine", EngineConfig], "GrammarCompiler"]


def compiler_of(engine: Engine, config: EngineConfig) -> GrammarCompiler:
    """Make the compiler of a loaded engine, with its own tokenizer."""
    from pilotfish.engine.text.codec import Codec
    from pilotfish.engine.text.guided import GrammarCompiler

    codec = Codec.load(config.target, config.revision)
    assert codec is not None, "a structure for a model without a tokenizer"
    return GrammarCompiler(codec, engine.facts.limits.vocab_size, engine.facts.limits.eos_token_ids, config)


def require_fit(received: Sequence[Sequence[int]], grammar: Grammar) -> None:
    """Check that the received tokens of each output match the structure. Raises InvalidRequest."""
    for index, tokens in enumerate(received):
        field, state = f"resume.outputs[{index}].token_ids", grammar.start()
        for start in range(0, len(tokens), GRAMMAR_TOKENS):
            part = tokens[start : start + GRAMMAR_TOKENS]
            try:
                taken = state.advance(part)
            except GrammarFault as fault:
                raise InvalidRequest.of(field, str(fault)) from fault
            if taken < len(part):
                raise InvalidRequest.of(
                    f"{field}[{start + taken}]", f"is {part[taken]}, which does not fit the structure"
                )


def serve(link: Link, load: LoadEngine, make_compiler: MakeCompiler = compiler_of) -> None:
    """Load the models of the first message, and serve until the connection is closed."""
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
    """Load the engine only; the front ends load tokenizer and template."""
    from pilotfish.engine.startup.warm import load

    return load(config, progress, is_successor=is_successor, defers=True)


def main(load: LoadEngine = load_engine, make_compiler: MakeCompiler = compiler_of) -> None:
    """Run the process; its only argument is the number of an open socket. Never returns.

    The fork server has set the signal handlers of this process and that it ends with its parent.
    """
    code = 1
    link = Link(socket.socket(fileno=int(sys.argv[1])))  # stays open: when it closes, the status is set
    try:
        serve(link, load, make_compiler)
    except FrontEndGone:
        code = 0
    except wire.WireError as error:
        logger.error("invalid message from the front-end process: %s", error)  # noqa: TRY400  # a traceback is of no use
    except Exception:
        logger.exception("the engine failed")
    finally:
        logging.shutdown()
        os._exit(code)  # does not wait for threads that still compile a structure
