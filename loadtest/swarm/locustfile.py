r"""Users for Locust: gRPC streams and HTTP streams, in scenarios. `python -m loadtest locust` runs it with workers.

    locust -f loadtest/swarm/locustfile.py --headless -u 20 -r 10 --load-seconds 60 --scenario spike \
        --grpc-address HOST:PORT

A stream has four entries in Locust's statistics: time to the first token, time between messages with tokens, time of
the whole call, and (not a time) its tokens. This is a closed loop: a user waits for a response before it sends the next
request. To measure latencies at a fixed rate, use `python -m loadtest curve`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

import gevent
import grpc.experimental.gevent
from locust import HttpUser, LoadTestShape, User, constant, events, runners, task

# This must run before any channel is created, and after locust has patched the standard library during its import.
grpc.experimental.gevent.init_gevent()

from client import Client, Delta, RequestFailedError, Retry  # noqa: E402
from loadtest.swarm.shapes import SHAPES, share_of_users  # noqa: E402
from loadtest.workload import WORKLOADS, Ask  # noqa: E402

runners.HEARTBEAT_LIVENESS = (
    30  # seconds: on a busy machine a worker may exceed Locust's default of three, and a lost worker is not replaced
)
SCENARIOS = (*WORKLOADS, *(name for name in SHAPES if name not in WORKLOADS))
THINKING = 0.5  # seconds between a response and the next request
RETRY = Retry(attempts=5)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: Any) -> None:
    parser.add_argument("--scenario", choices=SCENARIOS, default="steady", help="what is asked, and by how many")
    parser.add_argument(
        "--load-seconds", type=float, default=60.0, help="how long users ask; --run-time would cut calls"
    )
    parser.add_argument("--grpc-address", default="127.0.0.1:50051", help="host:port of gRPC")
    parser.add_argument("--http-address", default="", help="host:port of HTTP; without it nobody uses HTTP")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _leave_out_http(environment: Any, **_: Any) -> None:
    if not environment.parsed_options.http_address:
        environment.user_classes = [kind for kind in environment.user_classes if kind is not HttpStreams]


@dataclass(slots=True)
class StreamTimer:
    """Measures one stream and reports its times to Locust in milliseconds."""

    user: Any
    kind: str
    scenario: str
    started: float
    last: float | None = None
    tokens: int = 0

    @classmethod
    def start(cls, user: Any, kind: str, scenario: str) -> StreamTimer:
        """Start the timer now."""
        return cls(user, kind, scenario, time.perf_counter())

    def take(self, tokens: int) -> None:
        """Record a message with this number of tokens."""
        now = time.perf_counter()
        if self.last is None:
            self._tell("1 first token", now - self.started)
        else:
            self._tell("2 between messages", now - self.last)
        self.last, self.tokens = now, self.tokens + tokens

    def end(self, error: Exception | None = None) -> None:
        """Record the end of the call; a failed call counts once, as a whole."""
        self._tell("3 whole call", time.perf_counter() - self.started, error)
        if error is None:
            self._tell("4 tokens (not ms)", self.tokens / 1000)

    def _tell(self, name: str, seconds: float, error: Exception | None = None) -> None:
        self.user.environment.events.request.fire(
            request_type=self.kind,
            name=f"{self.scenario}: {name}",
            response_time=1000 * seconds,
            response_length=self.tokens,
            exception=error,
            context={},
        )


class _Streams:
    """The common part of both kinds of users: send, read, and cancel if the workload says so."""

    kind = ""

    def on_start(self: Any) -> None:
        """Give each user its own random requests."""
        self.scenario = self.environment.parsed_options.scenario
        self._random = Random(str(id(self)))
        self._workload = WORKLOADS.get(self.scenario, WORKLOADS["steady"])

    def ask(self: Any) -> None:
        """Send one request and read the response."""
        ask: Ask = self._workload(self._random)
        watch = StreamTimer.start(self, self.kind, self.scenario)
        try:
            with gevent.Timeout(ask.patience, exception=False), closing(self.tokens(ask)) as messages:
                for tokens in messages:
                    watch.take(tokens)
        except (RequestFailedError, OSError, RuntimeError) as error:
            watch.end(error)
        else:
            watch.end()


class GrpcStreams(_Streams, User):  # type: ignore[misc]  # locust is not typed
    """GenerateStream through the client of this repository."""

    kind, wait_time, weight = "gRPC", constant(THINKING), 4

    def on_start(self) -> None:
        """Create a client for each user; gRPC lets the clients share connections."""
        super().on_start()
        self._client = Client(self.environment.parsed_options.grpc_address, retry=RETRY)

    def on_stop(self) -> None:
        self._client.close()

    @task  # type: ignore[untyped-decorator]
    def generate(self) -> None:
        """Send a request of the scenario."""
        self.ask()

    def tokens(self, ask: Ask) -> Iterator[int]:
        """Yield the number of tokens in each message."""
        with closing(self._client.stream(ask.prompt, deadline=120, **ask.options)) as found:
            for event in found:
                if isinstance(event, Delta) and event.token_ids:
                    yield len(event.token_ids)


class HttpStreams(_Streams, HttpUser):  # type: ignore[misc]  # locust is not typed
    """`/v1/completions` with `stream`, read as server-sent events."""

    kind, wait_time, weight, abstract = "HTTP", constant(THINKING), 1, False
    host = "http://none"  # a placeholder: requests take the address from the options

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        """Send a request of the scenario."""
        self.ask()

    def tokens(self, ask: Ask) -> Iterator[int]:
        """Yield 1 for each event with text, because the server sends no token counts in events."""
        body = {"prompt": ask.prompt, "stream": True, "temperature": 0, "max_tokens": ask.options["max_tokens"]}
        url = f"http://{self.environment.parsed_options.http_address}/v1/completions"
        for attempt in range(RETRY.attempts):
            with self._post(url, body) as answer:
                if answer.status_code == 429 and attempt + 1 < RETRY.attempts:
                    answer.success()  # retries are no failures here either, as with gRPC
                elif answer.status_code != 200:
                    raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:200]}")
                else:
                    yield from _texts(answer)
                    return
            gevent.sleep(float(answer.headers["Retry-After"]))

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        name = f"{self.scenario}: 0 headers"
        return self.client.post(url, json=body, stream=True, name=name, timeout=120, catch_response=True)


def _texts(answer: Any) -> Iterator[int]:
    for line in answer.iter_lines():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            yield 1


class ScenarioShape(LoadTestShape):  # type: ignore[misc]  # locust is not typed
    """The number of users that the scenario has at this moment, as a share of the requested users."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users and how many start per second; None at the end."""
        options = self.runner.environment.parsed_options
        now = self.get_run_time()
        if now > options.load_seconds:
            self.runner.stop()  # Locust's own end would cancel the active calls without counting them
            return None
        share = share_of_users(options.scenario, now / options.load_seconds)
        return max(1, round(share * options.num_users)), options.spawn_rate
