"""Work on inputs by their size: small ones on the event loop, others on threads beside it, large ones one by one.

Parsing and checking hold the lock of the interpreter. One thread does one piece of such work at a time, mostly the
smallest first, and begins a piece only after the event loop has seen the end of the one before. So the loop waits for
one piece at most, however many callers send large inputs at once. A large input has its turn from its first parsing
until all its entries are counted or its text is known, because what is parsed of four megabytes can take a hundred
megabytes.

Encoding holds no lock, but it can take seconds, so it has threads of its own, on which no parsing waits.
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

from engine import heap
from server.errors import DeadlinePassed, QueueFull

Args = TypeVarTuple("Args")
T = TypeVar("T")

MAX_BYTES_ON_LOOP = 2 << 10  # work on so many bytes takes less than a millisecond
MAX_MIDDLE_BYTES = 256 << 10  # and on so many some tens of milliseconds; to encode them a quarter of a second
PIECES_PER_OLDEST = 4  # of so many pieces one is the oldest, so that a steady flow of small ones keeps none for ever
TRIM_SECONDS = 0.5  # after it, what was made of a large input is free
MAX_PENDING = 64  # structures that are being compiled or wait for that
RETRY_SECONDS = 1.0  # after it, what others wait for here is likely to be over


@dataclass(slots=True)
class InputTurn:
    """The size of the input that a task serves, and how its turn ends if it is a large one."""

    size: int = 0
    release: Callable[[], None] = lambda: None  # lets the next large input have its turn; later calls have no effect


_turn: ContextVar[InputTurn] = ContextVar("turn")


class SlowWork:
    """A thread for work that holds the lock, two for the encoding of middle and of long texts, and the turn.

    And the places of structures that are being compiled, in the order of their arrival.
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
        """Within it `run` works on an input of `size` bytes; if it is large, until the turn is released."""
        turn = InputTurn(size)
        if size > MAX_MIDDLE_BYTES:
            await self._large_turn.acquire()
            ending = ExitStack()  # which closes once
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
        with suppress(RuntimeError):  # the server has stopped meanwhile
            self._long.thread.submit(_give_memory_back)

    async def run(self, work: Callable[[*Args], T], /, *args: *Args, is_slow: bool = False) -> T:
        """Return `work(*args)`, which is done where an input of this size belongs.

        `is_slow`: it is slow for a small input, too.
        """
        size = _turn.get(InputTurn()).size
        if size <= MAX_BYTES_ON_LOOP and not is_slow:
            return work(*args)
        return await self._locking.run(size, work, *args)

    async def encode(self, text: str, work: Callable[[str], T]) -> T:
        """Return `work(text)`, which encodes a text and holds no lock while it does."""
        if len(text) <= MAX_BYTES_ON_LOOP:
            return work(text)
        if len(text) <= MAX_MIDDLE_BYTES:
            return await self._middle.run(len(text), work, text)
        try:
            return await self._long.run(len(text), work, text)
        finally:
            self._trim_later()  # a tokenizer needs two hundred bytes for each byte of a text

    async def compile(self, compile_one: Callable[[], Awaitable[None]], remaining: float = math.inf) -> None:
        """Let the engine's process compile a structure, and wait for that for at most `remaining` seconds.

        After this time, or if the caller is cancelled, a compilation that has not started does not start any more.

        Raises:
            InvalidRequest: the structure is not valid.
            DeadlinePassed: the compilation took longer than `remaining` seconds.
            QueueFull: too many structures wait already.
        """
        if self._num_waiting + len(self._compiling) >= self._max_pending:
            problem = f"{self._max_pending} structures wait to be compiled"
            raise QueueFull(problem, bound="grammars", retry_seconds=RETRY_SECONDS)
        try:
            async with asyncio.timeout(None if remaining == math.inf else remaining):
                await self._place()
                compiling = asyncio.ensure_future(compile_one())
                self._compiling.add(compiling)
                compiling.add_done_callback(self._compiled)
                await asyncio.shield(compiling)
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the structure was compiled") from None

    async def _place(self) -> None:
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1

    def _compiled(self, compiling: asyncio.Future[None]) -> None:
        """Free the place of a structure: when it is compiled, not when its caller leaves."""
        self._compiling.remove(compiling)
        self._places.release()
        if not compiling.cancelled():
            compiling.exception()  # whose caller may have gone

    def close(self) -> None:
        for compiling in self._compiling:
            compiling.cancel()
        for threads in (self._locking.thread, self._middle.thread, self._long.thread):
            threads.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """One thread; of the pieces of work that wait for it, the smallest is next, and each fourth time the oldest."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # size, and what to wait for, the oldest first
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
            if not place.cancelled():  # this piece was the next
                self._next()
            raise

    def _next(self) -> None:
        """Let the next piece begin whose caller has not gone."""
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
    """Release the turn of this task's input: its entries are counted, or its text is known."""
    _turn.get(InputTurn()).release()


def _give_memory_back() -> None:
    """Give freed memory back to the system.

    What only cycles hold, such as exceptions with the messages that they refused, is freed before, where loaded objects
    are excluded from collections: else a collection would take a second.
    """
    if gc.get_freeze_count():
        gc.collect()
    heap.give_back()
