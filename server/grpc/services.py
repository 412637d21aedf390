"""The gRPC services: generation, control and health. `messages` converts, the driver schedules.

The done-callback of a call releases its request, so the engine frees the pages before its next step, however the call
ended. The health service `liveness` is for systems that replace failed processes: it is SERVING until the server has
FAILED. The servicer of grpcio-health-checking holds a lock while it writes to a watcher, and a change of state waits
for that lock: one watcher that does not read would block recovery and shutdown. Here no change waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pilotfish.engine.errors import InvalidRequest, Unsupported, shown
from pilotfish.engine.request.validation import unknown_ids
from pilotfish.engine.stats import Clock
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import FinishReason
from pilotfish.server import version
from pilotfish.server.admission.admission import Admission
from pilotfish.server.admission.check import require_model
from pilotfish.server.admission.security import AdapterCalls, Caller, Callers
from pilotfish.server.admission.slow_work import release_turn
from pilotfish.server.admission.stalls import stall_limit
from pilotfish.server.config import ServerConfig
from pilotfish.server.errors import Forbidden, NotFound
from pilotfish.server.grpc import messages
from pilotfish.server.grpc.server import host_of
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream
from pilotfish.v1 import control_pb2 as pb
from pilotfish.v1 import control_pb2_grpc, generation_pb2_grpc
from pilotfish.v1 import generation_pb2 as generation

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # the caller of the current call

_STATES = {
    State.STARTING: pb.SERVER_STATE_STARTING,
    State.READY: pb.SERVER_STATE_READY,
    State.RECOVERING: pb.SERVER_STATE_STARTING,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
    State.FAILED: pb.SERVER_STATE_FAILED,
}


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Implements ControlService. Calls are quick except adapter loads and conversions of long texts or many tokens.

    Conversions use threads. They count against their caller's quota and as arriving requests.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        config: ServerConfig,
        callers: Callers,
        admission: Admission,
        clock: Clock = time.monotonic,
    ) -> None:
        self._lifecycle, self._config, self._callers, self._admission = lifecycle, config, callers, admission
        self._driver = admission.driver
        self._adapters = AdapterCalls(self._driver, config.adapter_root)
        self._clock, self._started = clock, clock()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Return version, state and queue limits, in every state of the server."""
        return pb.GetServerInfoResponse(
            version=version(),
            state=_STATES[self._lifecycle.state],
            uptime_seconds=self._clock() - self._started,
            max_queue_requests=self._config.max_queue_requests,
            max_queue_tokens=self._config.max_queue_tokens,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return messages.model_info(self._model(request), self._driver().adapters)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        driver = self._driver()
        engine = driver.model.engine
        return pb.GetLoadResponse(
            running_requests=engine.load.num_running,
            waiting_requests=engine.load.num_waiting + len(driver.queue),
            queued_tokens=driver.queue.num_tokens,
            total_pages=engine.facts.total_pages,
            free_pages=engine.load.free_pages,
            spec_gain_ratio=engine.load.spec_gain,
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End one request, or all. The response also counts requests that end on their own in the meantime."""
        driver, caller = self._driver(), self._caller(context)
        if request.all and not caller.is_operator:
            raise Forbidden("all is true; only an operator may end all callers' requests")
        streams = driver.live() if request.all else ()
        match request.WhichOneof("target"):
            case None:
                raise InvalidRequest.of("target", "is missing; expected request_id or all")
            case "request_id":
                stream = driver.find(caller.key(request.request_id))
                if stream is None:
                    raise NotFound(f"no live request has the id {shown(request.request_id)}")
                streams = (stream,)
        for stream in streams:
            driver.end(stream, FinishReason.ABORTED)
        return pb.AbortResponse(aborted_requests=len(streams))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Convert a text of at most a prompt's length to token ids."""
        with self._admission.conversion(self._caller(context)):
            model = self._model(request)
            codec, most = _require_codec(model), model.engine.facts.limits.max_model_len
            if problem := codec.excess(request.text, most):
                raise InvalidRequest.of("text", problem)
            release_turn()
            return await self._admission.slow.encode(
                request.text, lambda text: pb.TokenizeResponse(token_ids=codec.encode(text))
            )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Convert token ids to text, at most the context's length."""
        with self._admission.conversion(self._caller(context)):
            model = self._model(request)
            codec, most = _require_codec(model), model.engine.facts.limits.max_model_len
            if len(request.token_ids) > most:
                raise InvalidRequest.of("token_ids", f"has {len(request.token_ids)} ids; the limit is {most}")
            return await self._admission.slow.run(
                _detokenized, codec, request.token_ids, model.engine.facts.limits.vocab_size
            )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        fingerprint = await self._adapters.load(request.name, request.path, self._caller(context))
        return pb.LoadAdapterResponse(fingerprint=fingerprint)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        self._adapters.unload(request.name, self._caller(context))
        return pb.UnloadAdapterResponse()

    def _caller(self, context: Context) -> Caller:
        return self._callers.of_metadata(context.invocation_metadata(), host_of(context.peer()))

    def _model(self, request: pb.GetModelInfoRequest | pb.TokenizeRequest | pb.DetokenizeRequest) -> ServedModel:
        model = self._driver().model
        require_model(request.model if request.HasField("model") else None, model)
        return model


def _require_codec(model: ServedModel) -> Codec:
    if model.codec is None:
        raise Unsupported(f"{model.name} has no tokenizer; it supports token ids only")
    return model.codec


def _detokenized(codec: Codec, token_ids: Sequence[int], vocab_size: int) -> pb.DetokenizeResponse:
    if unknown := list(unknown_ids("token_ids", token_ids, vocab_size)):
        raise InvalidRequest(unknown)
    return pb.DetokenizeResponse(text=codec.decode(token_ids))


class InferenceService(generation_pb2_grpc.InferenceServiceServicer):
    """Generate and GenerateStream; both use the same admission."""

    def __init__(self, admission: Admission, callers: Callers, stall_seconds: float) -> None:
        self._admission, self._callers, self._stall_seconds = admission, callers, stall_seconds

    async def Generate(self, request: generation.GenerateRequest, context: Context) -> generation.GenerateResponse:
        if request.HasField("resume"):
            raise InvalidRequest.of("resume", "is only supported by GenerateStream")
        return await messages.response(await self._admit(request, context))

    # The type stubs expect a generator, but its cleanup may never run. So this method writes the messages itself.
    async def GenerateStream(  # type: ignore[override]
        self, request: generation.GenerateRequest, context: Context
    ) -> None:
        stream = await self._admit(request, context)
        try:
            answers = messages.responses(stream, self._admission.driver().model)
            async with aclosing(answers), stall_limit(self._stall_seconds) as writes:
                async for message in answers:
                    with writes:
                        await context.write(message)
        except TimeoutError:
            problem = f"the client read nothing for {self._stall_seconds:g} seconds"
            raise self._admission.stalled([stream], problem) from None

    async def _admit(self, message: generation.GenerateRequest, context: Context) -> OutputStream:
        """Admit the request. Before this returns, nothing is sent, not even metadata: refused calls can be retried."""
        metadata = context.invocation_metadata() or ()
        caller = self._callers.of_metadata(metadata, host_of(context.peer()))
        headers = {k: v for k, v in metadata if isinstance(v, str)}
        read, remaining = partial(messages.request_of, message), partial(_remaining, context)
        stream = await self._admission.admit(read, caller, remaining, headers, messages.num_outputs(message))
        # The type stubs expect their own class; any callable works.
        context.add_done_callback(lambda _: stream.release(late=remaining() <= 0))  # type: ignore[arg-type]
        return stream


def _remaining(context: Context) -> float:
    """Return the seconds until the caller's deadline; infinite without one."""
    remaining: Any = context.time_remaining()  # None without a deadline, which the type stubs omit
    return math.inf if remaining is None else float(remaining)


LIVENESS = "liveness"

Response = health_pb2.HealthCheckResponse
Status: TypeAlias = int  # grpcio-health-checking has no types


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of "" (the whole server) and of each service: SERVING in the state READY, else NOT_SERVING."""

    def __init__(self, services: Iterable[str], state: State) -> None:
        self._names = ("", *services)
        self._statuses = self._of(state)
        self._changed = asyncio.Event()  # set at the next change, then replaced

    async def follow(self, state: State) -> None:
        self._statuses = self._of(state)
        self._changed.set()
        self._changed = asyncio.Event()

    def _of(self, state: State) -> dict[str, Status]:
        status = Response.SERVING if state is State.READY else Response.NOT_SERVING
        liveness = Response.NOT_SERVING if state is State.FAILED else Response.SERVING
        return dict.fromkeys(self._names, status) | {LIVENESS: liveness}

    async def Check(self, request: Any, context: Context) -> Any:
        """Return the status of a service; NOT_FOUND for an unknown name."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Response(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Context) -> None:
        """Write the status of a service and its later changes; a slow watcher receives only the newest."""
        written = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, Response.SERVICE_UNKNOWN)
            if status != written:
                await context.write(Response(status=status))
                written = status
            await changed.wait()
