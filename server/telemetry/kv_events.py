"""What the prefix cache holds, told to routers as it changes: the K/V events of vLLM's form, over ZeroMQ.

A router that knows which server has the K/V of a prompt's beginning sends the request there. Each batch of events has a
number, and the log of all batches from number 0 on can be asked for again. When the log has grown long, it begins anew:
number 0 is then a batch that clears what the reader knows, and enters all that is cached at that time.
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

from engine.kv.pages import CacheChange

if TYPE_CHECKING:
    import zmq
    from zmq.asyncio import Socket

    from server.config import ServerConfig

logger = logging.getLogger(__name__)

EXTRA = "kv_events_endpoint needs ZeroMQ: pip install 'pilotfish[kv-events]'"
HASH_BYTES = 8
NUMBER_BYTES = 8
MAX_UNREAD = 100_000  # messages that wait for one reader; further ones are dropped, and it asks for them again
LOG_EVENTS = 10_000  # a log of so many events, and of twice the cached pages besides, begins anew
_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # the number that ends an answer
_MEDIUM = "GPU"  # the name for pages in the memory of the device that computes, whatever it is

_encoder = msgspec.msgpack.Encoder()


def _event(*fields: Any) -> msgspec.Raw:
    """Encode a tag and its fields, by position. Encoded, the events of a large cache take little memory."""
    return msgspec.Raw(_encoder.encode(fields))


_CLEARED = _event("AllBlocksCleared")


@dataclass(slots=True)
class _Block:
    """A cached page: its hash, the number of its predecessor, and the event that entered it."""

    hash: int
    before: int | None
    stored: msgspec.Raw
    adapter: str | None  # the name of the one that its keys and values were made with
    followers: set[int] = field(default_factory=set)


class CachedBlocks:
    """The pages of the prefix cache under hashes of their content, which are the same on every server of a model.

    A hash covers the model's name, the salt, the adapter and its weights, and all tokens from the beginning of the text
    to the end of the page.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks: dict[int, _Block] = {}  # by number, in the order of their entry, which has predecessors first

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all pages: their engine is lost."""
        self._blocks.clear()

    def stored(self) -> Iterator[msgspec.Raw]:
        return (block.stored for block in self._blocks.values())

    def apply(self, change: CacheChange) -> msgspec.Raw | None:
        """Return the event of a change; None if it tells a router nothing."""
        return self._enter(change) if change.tokens else self._remove(change.number)

    def _enter(self, change: CacheChange) -> msgspec.Raw | None:
        before = None if change.before is None else self._blocks.get(change.before)
        if change.before is not None and before is None:
            return None  # its predecessor is gone, so nobody can find it
        root = [self._model, change.salt] if before is None else before.hash
        digest = hashlib.sha256(_encoder.encode((root, change.tokens))).digest()
        name = int.from_bytes(digest[-HASH_BYTES:], "big")
        parent = None if before is None else before.hash
        if before is not None:
            before.followers.add(change.number)
            salt, adapter = None, before.adapter
        else:
            # The salt is the tenant's, the rotary table and, if there is one, the adapter: its name and fingerprint.
            salt, adapter = change.salt[0], change.salt[2][0] if len(change.salt) > 2 else None
        extra: tuple[Any, ...] = ()
        if salt is not None or adapter is not None:  # what the router has to hash with the tokens
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
    """Publishes batches on one socket and, if asked to, answers on another one with the log from some number on."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, model: str, most: int = LOG_EVENTS
    ) -> None:
        """Open the sockets. Raises ValueError without pyzmq, OSError if an endpoint cannot be listened on."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ValueError(EXTRA) from error
        self._topic, self._most = topic.encode(), most
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
        """Open what the configuration names; None if it names nothing."""
        if config.kv_events_endpoint is None:
            return None
        topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{model}"
        return cls(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic, model)

    def publish(self, changes: Iterable[CacheChange]) -> None:
        """Publish changes of the engine's prefix cache, in their order, as one batch."""
        if self._num_logged > self._most + 2 * len(self._blocks):
            self._log, self._num_logged = [], 0
            self._send([_CLEARED, *self._blocks.stored()])
        events = [event for change in changes if (event := self._blocks.apply(change)) is not None]
        if events:
            self._send(events)

    def clear(self) -> None:
        """Publish that the engine is lost, and with it all that was cached."""
        self._blocks.clear()
        self._send([_CLEARED])

    async def answer_replays(self) -> None:
        """Answer whoever asks for the log, until the task is cancelled."""
        while self._replays is not None:
            frames = await self._replays.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                logger.warning("a request for K/V events has %d frames; expected '' and a number", len(frames) - 1)
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

        payload = _encoder.encode((time.time(), events, 0))  # the last field is the rank among replicas of one server
        self._publisher.send_multipart((self._topic, _number(len(self._log)), payload), zmq.NOBLOCK)
        self._log.append(payload)
        self._num_logged += len(events)


def _listen(listener: zmq.Socket[Any], option: str, endpoint: str) -> None:
    import zmq

    listener.sndhwm = MAX_UNREAD
    try:
        listener.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"{option} is {endpoint!r}; it cannot be listened on: {error}") from error


def _number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
