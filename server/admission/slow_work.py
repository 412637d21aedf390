"""Work on inputs by their size: small ones on the event loop, others on threads beside it, large ones one by one.

Parsing and checking hold the lock of the interpreter. Each thread does one piece at a time, so the event loop waits for
a few pieces at most, however many callers send large inputs at once. A large input has its turn from its first parsing
until it is converted, because what is parsed of four megabytes can take a hundred.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
T = TypeVar("T")

MAX_BYTES_ON_LOOP = 2 << 10  # work on so many bytes takes less than a millisecond
MAX_MIDDLE_BYTES = 256 << 10  # and on so many some tens of milliseconds
TRIM_SECONDS = 0.5  # after the turn of a large input what was made of it is free


@dataclass(slots=True)
class InputTurn:
    """The size of the input that a task serves, and whether the task has the turn of the large ones."""

    size: int = 0
    release: Callable[[], None] = lambda: None  # lets the next large input have its turn; later calls have no effect


_turn: ContextVar[InputTurn] = ContextVar("turn")


class SlowWork:
    """Two threads, for middle and for large inputs, and the turn of the large ones."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(max_workers=1, thread_name_prefix="middle-inputs")
        self._large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-inputs")
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[InputTurn]:
        """Within it `run` works on an input of `size` bytes; if it is large, until the turn is released."""
        turn = InputTurn(size)
        if size > MAX_MIDDLE_BYTES:
            await self._lock.acquire()
            turn.release = self._releasing()
        token = _turn.set(turn)
        try:
            yield turn
        finally:
            _turn.reset(token)
            turn.release()

    def _releasing(self) -> Callable[[], None]:
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._lock.release()
                asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

        return release

    def _trim(self) -> None:
        with suppress(RuntimeError):  # the server has stopped meanwhile
            self._middle.submit(_trim)

    async def run(self, work: Callable[[*Args], T], /, *args: *Args, is_slow: bool = False) -> T:
        """Return `work(*args)`, which is done where an input of this size belongs.

        `is_slow`: it is slow for a small input, too.
        """
        size = _turn.get(InputTurn()).size
        if size <= MAX_BYTES_ON_LOOP and not is_slow:
            return work(*args)
        thread = self._middle if size <= MAX_MIDDLE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

    def close(self) -> None:
        """Start no further work."""
        for thread in (self._middle, self._large):
            thread.shutdown(wait=False, cancel_futures=True)


def release_turn() -> None:
    """Release the turn of this task's input: it is converted, and the memory of its parts is about to be free."""
    _turn.get(InputTurn()).release()


def _trim() -> None:
    """Free what only cycles hold, such as exceptions, and give freed memory back to the system, where C can do that."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
