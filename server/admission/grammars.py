"""Compilation of structures on separate threads: a slow one delays neither the event loop nor a step."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

from engine.params import Guided
from engine.types import Grammar
from server.errors import DeadlinePassed, QueueFull
from server.model import CompileGrammar

THREADS = 2
MAX_PENDING = 64  # structures that are being compiled or wait for that
RETRY_SECONDS = 1.0


class GrammarPool:
    """A few threads, and a bound on the structures that may wait for them."""

    def __init__(self, threads: int = THREADS, max_pending: int = MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._max_pending, self._room = max_pending, threading.BoundedSemaphore(max_pending)

    async def compile(self, compiler: CompileGrammar, guided: Guided, remaining: float = math.inf) -> Grammar:
        """Compile a structure within `remaining` seconds.

        After this time, or if the caller is cancelled, a compilation that has not started does not start any more.

        Raises:
            InvalidRequest: the structure is not valid.
            DeadlinePassed: the compilation took longer than `remaining` seconds.
            QueueFull: too many structures wait already.
        """
        if not self._room.acquire(blocking=False):
            problem = f"{self._max_pending} structures wait to be compiled"
            raise QueueFull(problem, bound="grammars", retry_seconds=RETRY_SECONDS)
        future = self._threads.submit(compiler, guided)
        future.add_done_callback(lambda _: self._room.release())  # when it has compiled, not when its caller ends
        try:
            async with asyncio.timeout(None if remaining == math.inf else remaining):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the structure was compiled") from None

    def close(self) -> None:
        """Start no further compilations."""
        self._threads.shutdown(wait=False, cancel_futures=True)
