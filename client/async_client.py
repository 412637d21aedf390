"""The client for asyncio. Knows the protocol, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client import convert, errors
from client.connection import Connection, Retry, Tls
from client.options import GenerateOptions, Prompt, build_request
from client.results import Completion, Event, Load, ModelInfo, ServerInfo
from pilotfish.v1 import control_pb2
from pilotfish.v1.control_pb2_grpc import ControlServiceStub
from pilotfish.v1.generation_pb2_grpc import InferenceServiceStub

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class AsyncClient:
    """A connection to one server, for use inside one event loop.

    Every method raises `RequestFailed`, or one of its subclasses, where the server has no answer.
    A `deadline` is in seconds; the server stops working for a call whose deadline has passed.

    Args:
        address, token, tls, retry: as in `Connection`; several addresses are called in turn.
        control_deadline: for all calls that generate nothing.
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
        self._control_deadline = control_deadline

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is under way and disconnect."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Continue `prompt`, text, token ids or a conversation, and return all of it at once."""
        request = build_request(prompt, options)
        return convert.completion(
            await _answer(self._inference.Generate(request, timeout=deadline, metadata=self._metadata))
        )

    async def stream(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Continue `prompt` and yield tokens as they are accepted, `Finished` last of each output.

        Closing the iterator (`aclose`, or `contextlib.aclosing` around it) cancels the request.
        """
        request = build_request(prompt, options)
        call = self._inference.GenerateStream(request, timeout=deadline, metadata=self._metadata)
        try:
            async for message in call:
                yield convert.event(message)
        except aio.AioRpcError as failure:
            raise errors.from_grpc(failure) from None
        finally:
            call.cancel()  # without effect on a call that has ended

    async def server_info(self) -> ServerInfo:
        """What runs there and in which state it is."""
        request = control_pb2.GetServerInfoRequest()
        return convert.server_info(await self._ask(self._control.GetServerInfo, request))

    async def model_info(self, model: str | None = None) -> ModelInfo:
        """The model and the limits it is served with."""
        request = control_pb2.GetModelInfoRequest(model=model)
        return convert.model_info(await self._ask(self._control.GetModelInfo, request))

    async def load(self) -> Load:
        """How busy the server is now."""
        request = control_pb2.GetLoadRequest()
        return convert.load(await self._ask(self._control.GetLoad, request))

    async def abort(self, request_id: str) -> int:
        """End the live request of this id; its caller gets what there is. Returns how many were ended: 1."""
        return await self._abort(control_pb2.AbortRequest(request_id=request_id))

    async def abort_all(self) -> int:
        """End all live requests; their callers get what there is. Returns how many."""
        return await self._abort(control_pb2.AbortRequest(all=True))

    async def tokenize(self, text: str, *, model: str | None = None) -> tuple[int, ...]:
        """The tokens that `text` is as a prompt."""
        request = control_pb2.TokenizeRequest(text=text, model=model)
        return tuple((await self._ask(self._control.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of these tokens."""
        request = control_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        return (await self._ask(self._control.Detokenize, request)).text

    async def health(self, service: str = "") -> str:
        """SERVING or NOT_SERVING, as `grpc.health.v1` says it; without a service: the whole server."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self._ask(self._health.Check, request)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def wait_until_serving(self, deadline: float = 120.0) -> None:
        """Return as soon as the server takes requests; TimeoutError if it does not within `deadline` seconds."""
        async with asyncio.timeout(deadline):
            while not await self._serves():  # noqa: ASYNC110 - what is waited for is another process
                await asyncio.sleep(0.1)

    async def _ask(self, method: grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT], request: RequestT) -> AnswerT:
        """A call that generates nothing."""
        return await _answer(method(request, timeout=self._control_deadline, metadata=self._metadata))

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
