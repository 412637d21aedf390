"""Both clients with the methods of the blocking one, so that a law is stated once and holds for both."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import contextmanager

from pilotfish import client


class Blocking:
    """The async client, one call at a time: lets one test speak to both."""

    def __init__(self, address, **options) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(address, options))

    async def _connect(self, address, options):
        return client.AsyncClient(address, **options)

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return self._runner.run(result) if inspect.iscoroutine(result) else self._iterate(result)

        return call

    def _iterate(self, events):
        async def following():
            return await anext(events, None)

        try:
            while (event := self._runner.run(following())) is not None:
                yield event
        finally:
            self._runner.run(events.aclose())

    def finish(self):
        self._runner.run(self._client.close())
        self._runner.close()


@contextmanager
def blocking(kind, address, **options):
    """A client of one kind, "sync" or "async", for the length of the block."""
    if kind == "sync":
        with client.Client(address, **options) as connection:
            yield connection
        return
    connection = Blocking(address, **options)
    try:
        yield connection
    finally:
        connection.finish()
