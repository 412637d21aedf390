"""Users for Locust: streams over gRPC and HTTP, four to one. `make loadtest` runs them against a server.

Each stream has four entries in Locust's statistics: time to first token, time between messages with tokens, time of the
whole call, and (not a time) its number of tokens. This is a closed loop: a user waits for the answer before the next
request. No call may fail, so there must be no more users than fit into the server's batch and queue. Unfinished calls
are not counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from random import Random
from typing import Any

import grpc.experimental.gevent
from locust import HttpUser, User, constant, events, runners

from loadtest.workload import request
from pilotfish.client import Client, Delta, RequestFailedError

runners.HEARTBEAT_LIVENESS = (
    30  # seconds: on a busy machine a worker may exceed Locust's default of three, and a lost worker is not replaced
)
_THINKING = 0.5  # seconds between an answer and the next request
_numbers = count()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: Any) -> None:
    parser.add_argument("--grpc-address", default="127.0.0.1:50051", help="host:port of gRPC")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _prepare(**_: Any) -> None:
    grpc.experimental.gevent.init_gevent()  # after Locust has forked, and before any channel


class _Streams:
    """Common part of both kinds of users: sends a request and reports the times of its stream in milliseconds."""

    kind, wait_time = "", constant(_THINKING)

    def on_start(self: Any) -> None:
        """Give each user its own random requests."""
        self.random = Random(f"{self.kind} {next(_numbers)}")

    def ask(self: Any) -> None:
        """Send one request and read the answer; a failed call counts once, as a whole."""
        started = last = time.perf_counter()
        tokens = 0
        try:
            for number in self.messages(*request(self.random)):
                now = time.perf_counter()
                self.note("2 between messages" if tokens else "1 first token", now - last, tokens)
                last, tokens = now, tokens + number
        except (RequestFailedError, OSError, RuntimeError) as error:
            self.note("3 whole call", time.perf_counter() - started, tokens, error)
        else:
            self.note("3 whole call", time.perf_counter() - started, tokens)
            self.note("4 tokens (not ms)", tokens / 1000, tokens)

    def note(self: Any, name: str, seconds: float, tokens: int, error: Exception | None = None) -> None:
        """Add an entry to Locust's statistics."""
        self.environment.events.request.fire(
            request_type=self.kind, name=name, response_time=1000 * seconds, response_length=tokens, exception=error,
            context={},
        )  # fmt: skip


class GrpcStreams(_Streams, User):  # type: ignore[misc]  # locust is not typed
    """GenerateStream through the client of this repository."""

    kind, weight, tasks = "gRPC", 4, [_Streams.ask]

    def on_start(self) -> None:
        """Create a client for each user; gRPC lets the clients share connections."""
        super().on_start()
        self._client = Client(self.environment.parsed_options.grpc_address)

    def on_stop(self) -> None:
        self._client.close()

    def messages(self, prompt: str, options: Any) -> Iterator[int]:
        """Yield the number of tokens in each message."""
        with closing(self._client.stream(prompt, deadline=120, **options)) as found:
            for event in found:
                if isinstance(event, Delta) and event.token_ids:
                    yield len(event.token_ids)


class HttpStreams(_Streams, HttpUser):  # type: ignore[misc]  # locust is not typed
    """`/v1/completions` with `stream`, read as server-sent events."""

    kind, weight, tasks = "HTTP", 1, [_Streams.ask]

    def messages(self, prompt: str, options: Any) -> Iterator[int]:
        """Yield 1 for each event with text, because the server sends no token counts in events."""
        body = {"prompt": prompt, "stream": True, "temperature": 0, **options}
        kwargs = {"name": "0 headers", "timeout": 120, "catch_response": True}
        with self.client.post("/v1/completions", json=body, stream=True, **kwargs) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:200]}")
            for line in answer.iter_lines():
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    yield 1
