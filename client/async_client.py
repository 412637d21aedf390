"""The asyncio client. It uses the protocol only and loads no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc import aio
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


class AsyncClient:
    """A connection to one or more servers, for use inside one event loop.

    Requests are retried, and streams resumed, on other servers within the limits of `retry`. Every method raises
    `RequestFailedError` or one of its subclasses if the call fails. A `deadline` is in seconds; the server stops
    working on a call after its deadline.

    Args:
        address, token, tls, retry: As in `Connection`; several addresses are used in turn.
        control_deadline: The deadline of all other calls than `generate` and `stream`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        control_deadline: float = 10.0,
    ) -> None:
        connection = Connection(address=address, token=token, tls=tls, retry=retry)
        self._metadata, self._channel = connection.metadata, connection.aio_channel()
        self._inference = InferenceServiceStub(self._channel)
        self._control = ControlServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._control_deadline, self._retry, self._closed = control_deadline, retry, asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the active calls and disconnect."""
        self._closed.set()
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate a completion of `prompt` (text, token ids or a conversation)."""
        request, patience = build_request(prompt, options), Patience(self._retry, deadline)
        while True:
            call = self._inference.Generate(request, timeout=patience.timeout, metadata=self._metadata)
            try:
                return convert.completion(await _answer(call))
            except errors.RequestFailedError as failure:
                pause = patience.pause_before_resending(failure)
            await self._wait(pause)

    async def stream(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Stream a completion of `prompt` as tokens are accepted. The last event of each output is `Finished`.

        If the server is lost, another one resumes the stream: the caller sees a pause and the same events. Closing
        the iterator (`aclose`, or `contextlib.aclosing` around it) cancels the request.
        """
        stream = ResumableStream(build_request(prompt, options), Patience(self._retry, deadline))
        while True:
            request, timeout = stream.next_request(), stream.timeout
            call = self._inference.GenerateStream(request, timeout=timeout, metadata=self._metadata)
            try:
                async for message in call:
                    yield stream.take(message)
                return
            except (aio.AioRpcError, errors.RequestFailedError) as failure:
                pause = stream.pause_after(errors.from_grpc(failure))
            finally:
                call.cancel()  # has no effect on a call that has ended
            if pause is None:
                return
            await self._wait(pause)

    async def server_info(self) -> ServerInfo:
        """Return the server's description and its state."""
        request = control_pb2.GetServerInfoRequest()
        return convert.server_info(await self._ask(self._control.GetServerInfo, request))

    async def model_info(self, model: str | None = None) -> ModelInfo:
        """Return the model and its limits."""
        request = control_pb2.GetModelInfoRequest(model=model)
        return convert.model_info(await self._ask(self._control.GetModelInfo, request))

    async def load(self) -> Load:
        """Return the current load of the server."""
        request = control_pb2.GetLoadRequest()
        return convert.load(await self._ask(self._control.GetLoad, request))

    async def abort(self, request_id: str) -> int:
        """End the live request with this id and return 1; its caller receives the partial result."""
        return await self._abort(control_pb2.AbortRequest(request_id=request_id))

    async def abort_all(self) -> int:
        """End all live requests; their callers receive the partial results. Returns the number of ended requests."""
        return await self._abort(control_pb2.AbortRequest(all=True))

    async def load_adapter(self, name: str, path: str) -> str:
        """Load an adapter from a directory on the server; return its fingerprint. For operators."""
        request = control_pb2.LoadAdapterRequest(name=name, path=path)
        return (await self._ask(self._control.LoadAdapter, request)).fingerprint

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter as soon as no request uses it. For operators."""
        await self._ask(self._control.UnloadAdapter, control_pb2.UnloadAdapterRequest(name=name))

    async def tokenize(self, text: str, *, model: str | None = None) -> tuple[int, ...]:
        """Return the token ids of `text` as a prompt."""
        request = control_pb2.TokenizeRequest(text=text, model=model)
        return tuple((await self._ask(self._control.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """Return the text of these tokens."""
        request = control_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        return (await self._ask(self._control.Detokenize, request)).text

    async def health(self, service: str = "") -> str:
        """Return SERVING or NOT_SERVING as in `grpc.health.v1`, by default for the whole server."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self._ask(self._health.Check, request)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def wait_until_serving(self, deadline: float = 120.0) -> None:
        """Return as soon as the server accepts requests; raise TimeoutError after `deadline` seconds."""
        async with asyncio.timeout(deadline):
            while not await self._serves():  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(0.1)

    async def _ask(self, method: grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT], request: RequestT) -> AnswerT:
        """Make a call of the control API."""
        return await _answer(method(request, timeout=self._control_deadline, metadata=self._metadata))

    async def _wait(self, seconds: float) -> None:
        """Wait before the next attempt. Raises CancelledError if the client is closed."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise errors.closed()

    async def _serves(self) -> bool:
        try:
            return await self.health() == "SERVING"
        except (errors.UnavailableError, errors.DeadlineExceededError):
            return False

    async def _abort(self, request: control_pb2.AbortRequest) -> int:
        return (await self._ask(self._control.Abort, request)).aborted_requests


async def _answer(call: Awaitable[AnswerT]) -> AnswerT:
    try:
        return await call
    except aio.AioRpcError as failure:
        raise errors.from_grpc(failure) from None
