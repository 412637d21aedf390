"""The blocking client, which threads may share. It uses the protocol only and loads no model."""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pilotfish.client import convert, errors
from pilotfish.client.connection import Connection, Retry, Tls
from pilotfish.client.options import GenerateOptions, Prompt, build_request
from pilotfish.client.results import Completion, Event, Load, ModelInfo, ServerInfo
from pilotfish.client.resume import Patience, ResumableStream
from pilotfish.v1 import control_pb2
from pilotfish.v1.control_pb2_grpc import ControlServiceStub
from pilotfish.v1.generation_pb2_grpc import InferenceServiceStub

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
CallT = TypeVar("CallT")


class Client:
    """A connection to one or more servers.

    Requests are retried, and streams resumed, on other servers within the limits of `retry`. Every method raises
    `RequestFailedError` or one of its subclasses if the call fails. A `timeout` is in seconds; the server stops
    working on a call after that time.

    Args:
        address, token, tls, retry: As in `Connection`; several addresses are used in turn.
        control_timeout: The timeout of all other calls than `generate` and `stream`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        control_timeout: float = 10.0,
    ) -> None:
        connection = Connection(address=address, token=token, tls=tls, retry=retry)
        self._metadata, self._channel = connection.metadata, connection.channel()
        self._inference = InferenceServiceStub(self._channel)
        self._control = ControlServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._control_timeout, self._retry, self._closed = control_timeout, retry, threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the active calls and disconnect."""
        self._closed.set()
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate a completion of `prompt` (text, token ids or a conversation)."""
        request, patience = build_request(prompt, options), Patience(self._retry, timeout)
        while True:
            try:
                return convert.completion(_answer(self._inference.Generate, request, patience.timeout, self._metadata))
            except errors.RequestFailedError as failure:
                pause = patience.pause_before_resending(failure)
            self._wait(pause)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        """Stream a completion of `prompt` as tokens are accepted. The last event of each output is `Finished`.

        If the server is lost, another one resumes the stream: the caller sees a pause and the same events. Closing
        the iterator (`close`, or `contextlib.closing` around it) cancels the request.
        """
        stream = ResumableStream(build_request(prompt, options), Patience(self._retry, timeout))
        while True:
            request, timeout = stream.next_request(), stream.timeout
            call = _begin(partial(self._inference.GenerateStream, request, timeout=timeout, metadata=self._metadata))
            try:
                for message in call:
                    yield stream.take(message)
                return
            except (grpc.RpcError, errors.RequestFailedError) as failure:
                pause = stream.pause_after(errors.from_grpc(failure))
            finally:
                call.cancel()  # has no effect on a call that has ended
            if pause is None:
                return
            self._wait(pause)

    def server_info(self) -> ServerInfo:
        """Return the server's description and its state."""
        request = control_pb2.GetServerInfoRequest()
        return convert.server_info(self._ask(self._control.GetServerInfo, request))

    def model_info(self, model: str | None = None) -> ModelInfo:
        """Return the model and its limits."""
        request = control_pb2.GetModelInfoRequest(model=model)
        return convert.model_info(self._ask(self._control.GetModelInfo, request))

    def load(self) -> Load:
        """Return the current load of the server."""
        return convert.load(self._ask(self._control.GetLoad, control_pb2.GetLoadRequest()))

    def abort(self, request_id: str) -> int:
        """End the live request with this id and return 1; its caller receives the partial result."""
        return self._abort(control_pb2.AbortRequest(request_id=request_id))

    def abort_all(self) -> int:
        """End all live requests; their callers receive the partial results. Returns the number of ended requests."""
        return self._abort(control_pb2.AbortRequest(all=True))

    def load_adapter(self, name: str, path: str) -> str:
        """Load an adapter from a directory on the server; return its fingerprint. For operators."""
        request = control_pb2.LoadAdapterRequest(name=name, path=path)
        return (self._ask(self._control.LoadAdapter, request)).fingerprint

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter as soon as no request uses it. For operators."""
        self._ask(self._control.UnloadAdapter, control_pb2.UnloadAdapterRequest(name=name))

    def tokenize(self, text: str, *, model: str | None = None) -> tuple[int, ...]:
        """Return the token ids of `text` as a prompt."""
        request = control_pb2.TokenizeRequest(text=text, model=model)
        return tuple(self._ask(self._control.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """Return the text of these tokens."""
        request = control_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        return self._ask(self._control.Detokenize, request).text

    def health(self, service: str = "") -> str:
        """Return SERVING or NOT_SERVING as in `grpc.health.v1`, by default for the whole server."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = self._ask(self._health.Check, request)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def wait_until_serving(self, timeout: float = 120.0) -> None:
        """Return as soon as the server accepts requests; raise TimeoutError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self._serves(end - time.monotonic()):
            if time.monotonic() > end:
                raise TimeoutError(f"not serving after {timeout:g} s")
            time.sleep(0.1)

    def _ask(self, method: grpc.UnaryUnaryMultiCallable[RequestT, AnswerT], request: RequestT) -> AnswerT:
        """Make a call of the control API."""
        return _answer(method, request, self._control_timeout, self._metadata)

    def _wait(self, seconds: float) -> None:
        """Wait before the next attempt. Raises CancelledError if the client is closed."""
        if self._closed.wait(seconds):
            raise errors.closed()

    def _serves(self, seconds: float) -> bool:
        """Whether the server answers within `seconds` that it serves."""
        limit = max(0.0, min(seconds, self._control_timeout))
        try:
            answer = _answer(self._health.Check, health_pb2.HealthCheckRequest(), limit, self._metadata)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except (errors.UnavailableError, errors.DeadlineExceededError):
            return False

    def _abort(self, request: control_pb2.AbortRequest) -> int:
        return self._ask(self._control.Abort, request).aborted_requests


def _begin(call: Callable[[], CallT]) -> CallT:
    """Begin a stream where Ctrl-C cannot interrupt it, which is outside of the main thread.

    gRPC registers the call first, then starts the thread that completes it. An interrupt in between would leave a call
    that is never complete, for which `Channel.close` would wait forever. An interrupt here drops the call, which
    cancels it.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    begun: SimpleQueue[Future[CallT]] = SimpleQueue()

    def begin() -> None:
        result: Future[CallT] = Future()
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001  # raised on the main thread
            result.set_exception(error)
        begun.put(result)

    start_new_thread(begin, ())
    return begun.get().result()


def _answer(
    method: grpc.UnaryUnaryMultiCallable[RequestT, AnswerT],
    request: RequestT,
    timeout: float | None,
    metadata: tuple[tuple[str, str], ...],
) -> AnswerT:
    try:
        return method(request, timeout=timeout, metadata=metadata)
    except grpc.RpcError as failure:
        raise errors.from_grpc(failure) from None
