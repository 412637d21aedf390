r"""Users for Locust: gRPC streams and HTTP streams, in scenarios. `python -m loadtest locust` runs it with workers.

    locust -f loadtest/swarm/locustfile.py --headless -u 20 -r 10 --load-seconds 60 --scenario spike \
        --grpc-address HOST:PORT

A stream is four things to measure, and each is an entry of its own: time to the first token, time between messages
with tokens, the whole call, and (not a time) its tokens. A closed loop: a user waits for an answer before the next
question, so latencies at a rate are the business of `python -m loadtest curve`.
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

# Before any channel is made, and after locust has patched the standard library, which it does when it is imported.
grpc.experimental.gevent.init_gevent()

from client import Client, Delta, RequestFailedError, Retry  # noqa: E402
from loadtest.swarm.shapes import SHAPES, share_of_users  # noqa: E402
from loadtest.workload import WORKLOADS, Ask  # noqa: E402

runners.HEARTBEAT_LIVENESS = (
    30  # seconds: on a busy machine a worker may be late by Locust's three, and none is replaced
)
SCENARIOS = (*WORKLOADS, *(name for name in SHAPES if name not in WORKLOADS))
THINKING = 0.5  # seconds between an answer and the next question
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
    """One stream's times, told to Locust as they come; in milliseconds there."""

    user: Any
    kind: str
    scenario: str
    started: float
    last: float | None = None
    tokens: int = 0

    @classmethod
    def start(cls, user: Any, kind: str, scenario: str) -> StreamTimer:
        """Now."""
        return cls(user, kind, scenario, time.perf_counter())

    def take(self, tokens: int) -> None:
        """A message with so many tokens came."""
        now = time.perf_counter()
        if self.last is None:
            self._tell("1 first token", now - self.started)
        else:
            self._tell("2 between messages", now - self.last)
        self.last, self.tokens = now, self.tokens + tokens

    def end(self, error: Exception | None = None) -> None:
        """It is over; a call that failed counts once, as a whole."""
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
    """What both kinds of users do: ask, read, and go away where the workload says so."""

    kind = ""

    def on_start(self: Any) -> None:
        """Each user has questions of his own."""
        self.scenario = self.environment.parsed_options.scenario
        self._random = Random(str(id(self)))
        self._workload = WORKLOADS.get(self.scenario, WORKLOADS["steady"])

    def ask(self: Any) -> None:
        """One question and its answer."""
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
    """GenerateStream through our own client."""

    kind, wait_time, weight = "gRPC", constant(THINKING), 4

    def on_start(self) -> None:
        """A client each; gRPC lets them share connections."""
        super().on_start()
        self._client = Client(self.environment.parsed_options.grpc_address, retry=RETRY)

    def on_stop(self) -> None:
        """Disconnect."""
        self._client.close()

    @task  # type: ignore[untyped-decorator]
    def generate(self) -> None:
        """The scenario's question."""
        self.ask()

    def tokens(self, ask: Ask) -> Iterator[int]:
        """How many each message brought."""
        with closing(self._client.stream(ask.prompt, deadline=120, **ask.options)) as found:
            for event in found:
                if isinstance(event, Delta) and event.token_ids:
                    yield len(event.token_ids)


class HttpStreams(_Streams, HttpUser):  # type: ignore[misc]  # locust is not typed
    """`/v1/completions` with `stream`, read as server-sent events."""

    kind, wait_time, weight, abstract = "HTTP", constant(THINKING), 1, False
    host = "http://none"  # from the options, once they are there

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        """The scenario's question."""
        self.ask()

    def tokens(self, ask: Ask) -> Iterator[int]:
        """How many each event brought: the server sends no counts, so an event with text counts as one."""
        body = {"prompt": ask.prompt, "stream": True, "temperature": 0, "max_tokens": ask.options["max_tokens"]}
        url = f"http://{self.environment.parsed_options.http_address}/v1/completions"
        for attempt in range(RETRY.attempts):
            with self._post(url, body) as answer:
                if answer.status_code == 429 and attempt + 1 < RETRY.attempts:
                    answer.success()  # as gRPC's retries are no failures either
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
    """As many users as the scenario has at this moment, of those that were asked for."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Users and how many begin per second; None at the end."""
        options = self.runner.environment.parsed_options
        now = self.get_run_time()
        if now > options.load_seconds:
            self.runner.stop()  # Locust's own end would cut the calls under way, and count them nowhere
            return None
        share = share_of_users(options.scenario, now / options.load_seconds)
        return max(1, round(share * options.num_users)), options.spawn_rate
