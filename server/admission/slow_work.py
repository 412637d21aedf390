"""Processes inputs by size: small ones on the event loop, others on threads, large ones one at a time.

Parsing and validation hold the GIL. One thread runs one such task at a time, usually the smallest, and starts the next
only after the event loop has processed the result of the last. So the event loop waits for at most one task, however
many callers send large inputs at once. A large input has exclusive use of the memory ("its turn") from parsing until
its entries are counted or its text is extracted, because four megabytes can become a hundred when they are parsed.

Tokenization releases the GIL, but can take seconds; it has its own threads, so that parsing does not wait for it.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar, TypeVarTuple

from pilotfish.engine.machine.mapped import release_freed
from pilotfish.server.errors import DeadlinePassed, QueueFull

Args = TypeVarTuple("Args")
T = TypeVar("T")

MAX_BYTES_ON_LOOP = 2 << 10  # this many bytes are processed in less than a millisecond
MAX_MIDDLE_BYTES = 256 << 10  # this many in tens of milliseconds, and tokenized in a quarter of a second
PIECES_PER_OLDEST = 4  # every fourth task is the oldest one, so that small ones cannot starve it
TRIM_SECONDS = 0.5  # after a large input, until freed memory is returned to the system
MAX_PENDING = 64  # grammars that are being compiled or wait for it
RETRY_SECONDS = 1.0  # by then the queue of grammars is likely to be shorter


@dataclass(slots=True)
class InputTurn:
    """The size of an asyncio task's input, and the function that ends its turn if the input is large."""

    size: int = 0
    release: Callable[[], None] = lambda: None  # starts the turn of the next large input; repeated calls do nothing


_turn: ContextVar[InputTurn] = ContextVar("turn")


class SlowWork:
    """One thread for work that holds the GIL, two that tokenize, the slots for grammar compilation, and the turn.

    Slots are assigned in order of arrival.
    """

    def __init__(self, max_compiling: int = 2, max_pending: int = MAX_PENDING) -> None:
        self._places, self._max_pending = asyncio.Semaphore(max_compiling), max_pending
        self._num_waiting = 0  # structures
        self._compiling: set[asyncio.Future[None]] = set()
        self._locking, self._middle, self._long = _Lane("slow-work"), _Lane("encode"), _Lane("encode-long")
        self._large_turn = asyncio.Lock()
        self._is_trim_due = False

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[InputTurn]:
        """Set the size of the input for `run`; wait for the turn of a large one and hold it until it is released."""
        turn = InputTurn(size)
        if size > MAX_MIDDLE_BYTES:
            await self._large_turn.acquire()
            ending = ExitStack()  # closes only once
            ending.callback(self._trim_later)
            ending.callback(self._large_turn.release)
            turn.release = ending.close
        token = _turn.set(turn)
        try:
            yield turn
        finally:
            _turn.reset(token)
            turn.release()

    def _trim_later(self) -> None:
        if not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_trim_due = False
        with suppress(RuntimeError):  # the server stopped in the meantime
            self._long.thread.submit(_give_memory_back)

    async def run(self, work: Callable[[*Args], T], /, *args: *Args, is_slow: bool = False) -> T:
        """Return `work(*args)`, run on the event loop or on a thread, by the size of the input.

        `is_slow`: use a thread for a small input, too.
        """
        size = _turn.get(InputTurn()).size
        if size <= MAX_BYTES_ON_LOOP and not is_slow:
            return work(*args)
        return await self._locking.run(size, work, *args)

    async def encode(self, text: str, work: Callable[[str], T]) -> T:
        """Return `work(text)`, which tokenizes a text and releases the GIL meanwhile."""
        if len(text) <= MAX_BYTES_ON_LOOP:
            return work(text)
        if len(text) <= MAX_MIDDLE_BYTES:
            return await self._middle.run(len(text), work, text)
        try:
            return await self._long.run(len(text), work, text)
        finally:
            self._trim_later()  # a tokenizer allocates two hundred bytes per byte of text

    async def compile(self, compile_one: Callable[[], Awaitable[None]], remaining: float = math.inf) -> None:
        """Let the engine's process compile a grammar within `remaining` seconds.

        After this time, or if the caller is cancelled, a compilation that has not started is dropped.

        Raises:
            InvalidRequest: the grammar is invalid.
            DeadlinePassed: the compilation took longer than `remaining` seconds.
            QueueFull: too many grammars are waiting.
        """
        if self._num_waiting + len(self._compiling) >= self._max_pending:
            problem = f"{self._max_pending} grammars are waiting to be compiled"
            raise QueueFull(problem, bound="grammars", retry_seconds=RETRY_SECONDS)
        try:
            async with asyncio.timeout(None if remaining == math.inf else remaining):
                await self._place()
                compiling = asyncio.ensure_future(compile_one())
                self._compiling.add(compiling)
                compiling.add_done_callback(self._compiled)
                await asyncio.shield(compiling)
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the grammar was compiled") from None

    async def _place(self) -> None:
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1

    def _compiled(self, compiling: asyncio.Future[None]) -> None:
        """Free the slot of a structure when it is compiled, not when its caller disconnects."""
        self._compiling.remove(compiling)
        self._places.release()
        if not compiling.cancelled():
            compiling.exception()  # its caller may have disconnected

    def close(self) -> None:
        for compiling in self._compiling:
            compiling.cancel()
        for threads in (self._locking.thread, self._middle.thread, self._long.thread):
            threads.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """One thread. The next task is the smallest waiting one, and every fourth time the oldest."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # size, and the future of its start, oldest first
        self._num_done = 0
        self._is_busy = False

    async def run(self, size: int, work: Callable[[*Args], T], /, *args: *Args) -> T:
        await self._wait(size)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)
        finally:
            self._next()

    async def _wait(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((size, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # this task was to start next
                self._next()
            raise

    def _next(self) -> None:
        """Start the next task that was not cancelled."""
        self._num_done += 1
        takes_oldest = self._num_done % PIECES_PER_OLDEST == 0
        while self._waiting:
            piece = self._waiting[0] if takes_oldest else min(self._waiting, key=itemgetter(0))
            self._waiting.remove(piece)
            if not piece[1].done():
                piece[1].set_result(None)
                return
        self._is_busy = False


def release_turn() -> None:
    """End the turn of this task's input: its entries are counted, or its text is extracted."""
    _turn.get(InputTurn()).release()


def _give_memory_back() -> None:
    """Return freed memory to the system.

    Reference cycles, such as exceptions that hold the refused message, are collected first, but only if loaded objects
    are frozen: otherwise a collection would take a second.
    """
    if gc.get_freeze_count():
        gc.collect()
    release_freed()
