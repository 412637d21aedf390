"""The state of the server, and listeners for its changes. Uses no model and no network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum

from pilotfish.server.errors import Unavailable


class State(StrEnum):
    """States of the server. READY can change to RECOVERING and back, DRAINING only to FAILED; FAILED is final."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"  # the engine failed and is being restarted
    DRAINING = "draining"
    FAILED = "failed"


_PROBLEMS = {
    State.STARTING: ("STARTING", "the model is still loading"),
    State.RECOVERING: ("ENGINE_RESTARTING", "the engine failed and is being restarted"),
    State.DRAINING: ("DRAINING", "the server is shutting down"),
    State.FAILED: ("ENGINE_DEAD", "the engine failed"),
}


class Lifecycle:
    """The current state of the server and its listeners."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.progress = "starting"  # description of the current loading stage
        self._listeners: list[Callable[[State], Awaitable[None]]] = []

    def listen(self, listener: Callable[[State], Awaitable[None]]) -> None:
        """Await `listener` with every new state."""
        self._listeners.append(listener)

    async def move(self, state: State) -> None:
        """Enter `state` and await every listener; ignored if the current state does not allow the change."""
        if self.state in (state, State.FAILED) or (self.state is State.DRAINING and state is not State.FAILED):
            return
        self.state = state
        for listener in self._listeners:
            await listener(state)

    def require_ready(self) -> None:
        if self.state is not State.READY:
            raise Unavailable(*_PROBLEMS[self.state])
