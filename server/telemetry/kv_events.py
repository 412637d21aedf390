"""Publishes changes of the prefix cache to routers: K/V events in vLLM's format, over ZeroMQ.

A router sends a request to the server with the longest cached prefix of its prompt. Batches of events are
numbered from 0, and subscribers can request a replay from any number. When the log has become long, it is restarted:
batch 0 then clears the subscriber's state and lists all cached pages.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from pilotfish.engine.stats import CacheChange

if TYPE_CHECKING:
    import zmq
    from zmq.asyncio import Socket

    from pilotfish.server.config import ServerConfig

logger = logging.getLogger(__name__)

EXTRA = "kv_events_endpoint needs ZeroMQ: pip install 'pilotfish[kv-events]'"
HASH_BYTES = 8
NUMBER_BYTES = 8
MAX_UNREAD = 100_000  # queued messages per subscriber; further ones are dropped, and it has to request a replay
LOG_EVENTS = 10_000  # the log is restarted after this many events plus twice the number of cached pages
_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # the number that ends a replay
_MEDIUM = "GPU"  # vLLM's name for the memory of the compute device, also for a CPU

_encoder = msgspec.msgpack.Encoder()


def _event(*fields: Any) -> msgspec.Raw:
    """Encode a tag and its fields by position. Encoded events take little memory."""
    return msgspec.Raw(_encoder.encode(fields))


_CLEARED = _event("AllBlocksCleared")


@dataclass(slots=True)
class _Block:
    """A cached page: its hash, the number of its predecessor, and the event that announced it."""

    hash: int
    before: int | None
    stored: msgspec.Raw
    adapter: str | None  # the name of the adapter with which its keys and values were computed
    followers: set[int] = field(default_factory=set)


class CachedBlocks:
    """The pages of the prefix cache by hashes of their content, which are equal on all servers of a model.

    A hash covers the model's name, the salt, the adapter and its weights, and all tokens up to the end of the page.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks: dict[int, _Block] = {}  # by number, in order of insertion, so that predecessors come first

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop all pages, after their engine was lost."""
        self._blocks.clear()

    def stored(self) -> Iterator[msgspec.Raw]:
        return (block.stored for block in self._blocks.values())

    def apply(self, change: CacheChange) -> msgspec.Raw | None:
        """Return the event of a change; None if routers cannot use it."""
        return self._enter(change) if change.tokens else self._remove(change.number)

    def _enter(self, change: CacheChange) -> msgspec.Raw | None:
        before = None if change.before is None else self._blocks.get(change.before)
        if change.before is not None and before is None:
            return None  # unreachable without its predecessor
        root = [self._model, change.salt] if before is None else before.hash
        digest = hashlib.sha256(_encoder.encode((root, change.tokens))).digest()
        name = int.from_bytes(digest[-HASH_BYTES:], "big")
        parent = None if before is None else before.hash
        if before is not None:
            before.followers.add(change.number)
            salt, adapter = None, before.adapter
        else:
            # The salt consists of the tenant's salt, the rotary table and the adapter (name and fingerprint), if any.
            salt, adapter = change.salt[0], change.salt[2][0] if len(change.salt) > 2 else None
        extra: tuple[Any, ...] = ()
        if salt is not None or adapter is not None:  # which the router has to hash together with the tokens
            extra = (adapter, None if salt is None else ((salt,),))
        stored = _event("BlockStored", (name,), parent, change.tokens, len(change.tokens), None, _MEDIUM, *extra)
        self._blocks[change.number] = _Block(name, change.before, stored, adapter)
        return stored

    def _remove(self, number: int) -> msgspec.Raw | None:
        """Remove a page and its followers, which cannot be found without it."""
        removed = self._blocks.get(number)
        if removed is None:
            return None
        if removed.before is not None:
            self._blocks[removed.before].followers.remove(number)
        gone, left = [], [number]
        while left:
            block = self._blocks.pop(left.pop())
            gone.append(block.hash)
            left.extend(block.followers)
        return _event("BlockRemoved", gone, _MEDIUM)


class ZmqKvEvents:
    """Publishes batches on one socket, and replays them on another one if `replay_endpoint` is set."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, model: str, max_events: int = LOG_EVENTS
    ) -> None:
        """Open the sockets. Raises ValueError without pyzmq, OSError if an endpoint cannot be bound."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ValueError(EXTRA) from error
        self._topic, self._max_events = topic.encode(), max_events
        self._blocks = CachedBlocks(model)
        self._log: list[bytes] = []  # the payload of each batch, by number
        self._num_logged = 0  # events in the log
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replays: Socket | None = None
        try:
            _listen(self._publisher, "kv_events_endpoint", endpoint)
            if replay_endpoint is not None:
                self._replays = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                _listen(self._replays, "kv_events_replay_endpoint", replay_endpoint)
        except OSError:
            self.close()
            raise
        self._send([_CLEARED])

    @classmethod
    def configured(cls, config: ServerConfig, model: str) -> Self | None:
        """Open the configured sockets; None if none are configured."""
        if config.kv_events_endpoint is None:
            return None
        topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{model}"
        return cls(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic, model)

    def publish(self, changes: Iterable[CacheChange]) -> None:
        """Publish changes of the engine's prefix cache, in order, as one batch."""
        if self._num_logged > self._max_events + 2 * len(self._blocks):
            self._log, self._num_logged = [], 0
            self._send([_CLEARED, *self._blocks.stored()])
        events = [event for change in changes if (event := self._blocks.apply(change)) is not None]
        if events:
            self._send(events)

    def clear(self) -> None:
        """Publish that the engine and its whole cache are lost."""
        self._blocks.clear()
        self._send([_CLEARED])

    async def answer_replays(self) -> None:
        """Answer replay requests until the task is cancelled."""
        while self._replays is not None:
            frames = await self._replays.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                logger.warning("a replay request has %d frames; expected '' and a batch number", len(frames) - 1)
                continue
            reader, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in enumerate(self._log[first:], first):
                await self._replays.send_multipart((reader, b"", self._topic, _number(number), payload))
            await self._replays.send_multipart((reader, b"", b"", _END, b""))

    def close(self) -> None:
        if self._replays is not None:
            self._replays.close(linger=0)
        self._context.destroy(linger=0)

    def _send(self, events: list[msgspec.Raw]) -> None:
        import zmq

        payload = _encoder.encode((time.time(), events, 0))  # the last field is the data-parallel rank
        self._publisher.send_multipart((self._topic, _number(len(self._log)), payload), zmq.NOBLOCK)
        self._log.append(payload)
        self._num_logged += len(events)


def _listen(listener: zmq.Socket[Any], option: str, endpoint: str) -> None:
    import zmq

    listener.sndhwm = MAX_UNREAD
    try:
        listener.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"cannot listen on {option} {endpoint!r}: {error}") from error


def _number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
