"""An engine on a thread of this process; `remote.py` has the same methods for one in its own process.

The driver calls the methods of a host instead of the engine's. Its orders take effect before the next step, and `turn`
returns their results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

from engine.config import EngineConfig
from engine.types import FinishReason, Request, TokenEvent
from server.errors import EngineGone, EngineHung
from server.model import Load, Progress, ServedModel
from server.worker.wire import StepReport

if TYPE_CHECKING:
    from engine.engine import Engine


Args = TypeVarTuple("Args")
T = TypeVar("T")


class LocalHost:
    """An engine that steps on one worker thread. All other changes of the engine happen between two steps, at once."""

    def __init__(
        self, load: Load, config: EngineConfig, hang_seconds: float | None = None, *, watches_cache: bool = False
    ) -> None:
        self.is_hung, self._watches_cache = False, watches_cache  # whether a step does not end
        self._load, self._config, self._hang_seconds = load, config, hang_seconds
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._ended: list[TokenEvent] = []  # events of ordered ends, not yet returned by a turn
        self.engine: Engine  # once it is loaded

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or a turn has yet to return its end."""
        return self.engine.has_work or bool(self._ended)

    async def start(self, progress: Progress) -> ServedModel:
        """Load the models. Raises ModelError if they cannot be served; may be cancelled."""
        model = await self._computed(self._load, self._config, progress)
        self.engine = cast("Engine", model.engine)  # a model that was loaded here has its engine in this process
        self._watch()
        return model

    def add(self, request: Request) -> None:
        """Add a checked request. Raises a PilotfishError that concerns only this request."""
        self._ended += self.engine.add(request)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None, keep: int | None = None) -> None:
        """End a request, or one output of it, as `Engine.finish` does; a later turn returns the terminal events."""
        self._ended += self.engine.finish(request_id, reason, index=index, keep=keep)

    def drop(self, request_id: str, reason: FinishReason) -> None:
        """End a request whose reader is gone; no later turn returns an event of it."""
        self.engine.finish(request_id, reason)
        self._ended = [event for event in self._ended if event.request_id != request_id]

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter between two steps; return its fingerprint. Raises ModelError, or Unavailable."""
        return (await self._computed(self.engine.adapters.load, name, Path(folder))).fingerprint

    def unload_adapter(self, name: str) -> None:
        self.engine.adapters.unload(name)

    async def turn(self, wake: asyncio.Event) -> StepReport | None:
        """Return the events of ordered ends at once, if any; else take one step, or wait for `wake` without work.

        None if only `wake` was set. Raises if the engine failed: then call `restart`.
        """
        if self._ended:
            ended, self._ended = tuple(self._ended), []
            return StepReport(ended, None, 0, self.engine.load)
        if not self.engine.has_work:
            await wake.wait()
            wake.clear()
            return None
        step = self._computed(self.engine.step)
        await asyncio.wait((step,), timeout=self._hang_seconds)
        if not step.done():
            self.is_hung = True
            step.add_done_callback(lambda late: late.cancelled() or late.exception())  # which nobody needs any more
            raise EngineHung(f"a step has taken more than {self._hang_seconds:g} seconds")
        output = step.result()
        changes = self.engine.pages.take_changes() if self._watches_cache else ()
        return StepReport(output.events, output.stats, 0, self.engine.load, changes)

    def _watch(self) -> None:
        """Let the next steps' outputs contain all that is cached, and its changes."""
        if self._watches_cache:
            self.engine.pages.watch()

    async def restart(self) -> None:
        """Test the engine in place, with the same weights and pages. Raises EngineGone if it does not work."""
        self._ended = []
        if self.is_hung:
            raise EngineGone("a step that does not end has the compute thread")
        try:
            await self._computed(self.engine.recover)
        except Exception as error:
            raise EngineGone("it does not work any more, with nothing to do but a trial") from error
        self._watch()

    async def close(self) -> None:
        self._compute.shutdown(wait=False, cancel_futures=True)

    def _computed(self, work: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._compute, work, *args)
