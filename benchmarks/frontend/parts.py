"""The event loop's time by parts of a token's path to the client. Only for the benchmark's own process.

Functions are replaced by wrappers that record when they begin and end. Time inside a nested part counts only for that
part. Coroutines count while they run and not while they wait.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import grpc

from engine.text.codec import OutputText
from server.admission import admission, answers
from server.driver import Driver
from server.grpc.inference import InferenceService
from server.http import calls, native_answers
from server.http.openai.text import TextAnswers
from server.streams.output import OutputBuffer
from server.telemetry.metrics import RequestMetrics, StepMetrics

PARTS = {
    "driver": "driver: queue, endings, delivery",
    "metrics": "metrics",
    "detokenize": "detokenize",
    "gather": "gather what is unread",
    "convert": "convert to messages",
    "shape": "shape as JSON objects",
    "serialise": "serialise",
    "write": "write: gRPC, or ASGI and h11",
}


class Parts:
    """Seconds per part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        """Count the time from now on for the part `name`."""
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._open.append(name)
        self._since = now

    def leave(self) -> None:
        """End the current part; time counts for the enclosing part again."""
        now = perf_counter()
        self.seconds[self._open.pop()] += now - self._since
        self._since = now

    def install(self) -> None:
        """Replace the functions by wrappers."""
        for owner, names, part in (
            (Driver, ("_emit", "_apply_endings", "_admit"), "driver"),
            (StepMetrics, ("observe",), "metrics"),
            (RequestMetrics, ("deliver", "set_load", "end", "end_output"), "metrics"),
            (OutputText, ("push", "flush"), "detokenize"),
            (OutputBuffer, ("push", "take", "close"), "gather"),
        ):
            for name in names:
                setattr(owner, name, self._function(getattr(owner, name), part))
        answers.stream_responses = self._listed(answers.stream_responses, "convert")
        admission.Call.messages = self._generator(admission.Call.messages, "gather")  # type: ignore[method-assign]
        TextAnswers.events = self._generator(TextAnswers.events, "shape")  # type: ignore[method-assign]
        native_answers.events = self._generator(native_answers.events, "shape")
        vars(calls)["json"] = SimpleNamespace(dumps=self._function(json.dumps, "serialise"))
        calls._event = self._coroutine(calls._event, "write")  # noqa: SLF001
        InferenceService.GenerateStream = self._with_context(InferenceService.GenerateStream)  # type: ignore[method-assign]
        grpc.unary_stream_rpc_method_handler = self._with_serializer(grpc.unary_stream_rpc_method_handler)

    def _function(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return timed

    def _listed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrap a generator that never waits."""
        return self._function(lambda *arguments, **options: list(function(*arguments, **options)), part)

    def _coroutine(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        async def timed(*arguments: Any, **options: Any) -> Any:
            return await _Sliced(function(*arguments, **options), self, part)

        return timed

    def _generator(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        async def timed(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            values = function(*arguments, **options)
            while True:
                try:
                    value = await _Sliced(_next(values), self, part)
                except StopAsyncIteration:
                    return
                yield value

        return timed

    def _with_context(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that writes through its context."""
        return lambda service, request, context: function(service, request, _Context(context, self))

    def _with_serializer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the calls that `server.grpc.boundary` creates, which pass all arguments by position."""

        def made(*arguments: Any, **named: Any) -> Any:
            if named:
                return make(*arguments, **named)
            behaviour, parse, serialize = arguments
            return make(behaviour, parse, self._function(serialize, "serialise"))

        return made


class _Context:
    """A call's context that measures the time of its writes."""

    def __init__(self, context: Any, parts: Parts) -> None:
        self._context, self._parts = context, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def write(self, message: Any) -> Awaitable[Any]:
        """Write and measure the time."""
        return _Sliced(self._context.write(message), self._parts, "write")


async def _next(values: Any) -> Any:
    return await anext(values)


class _Sliced(Awaitable[Any]):
    """Runs a coroutine and measures each slice of its running time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], parts: Parts, part: str) -> None:
        self._coroutine, self._parts, self._part = coroutine, parts, part

    def __await__(self) -> Generator[Any, Any, Any]:
        send: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        while True:
            self._parts.enter(self._part)
            try:
                waited = send()
            except StopIteration as stop:
                return stop.value
            finally:
                self._parts.leave()
            try:
                send = functools.partial(self._coroutine.send, (yield waited))
            except BaseException as error:  # noqa: BLE001  # every exception is passed on to the coroutine
                send = functools.partial(self._coroutine.throw, error)
