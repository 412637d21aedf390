"""ControlService: information about server and model, the load, aborts, the tokenizer, and adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from engine.errors import InvalidRequest, Unsupported, shown
from engine.request.validation import unknown_ids
from engine.stats import Clock
from engine.text.codec import Codec
from engine.types import FinishReason
from pilotfish.v1 import control_pb2 as pb
from pilotfish.v1 import control_pb2_grpc
from server.admission import answers, convert
from server.admission.adapters import AdapterCalls
from server.admission.admission import Admission
from server.admission.security import Caller, Callers
from server.admission.slow_work import SlowWork, release_turn
from server.config import ServerConfig
from server.driver import Driver
from server.errors import Forbidden, NotFound
from server.grpc.boundary import host_of
from server.lifecycle import Lifecycle, State
from server.model import ServedModel
from server.version import version

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # read for the caller of some methods

_STATES = {
    State.STARTING: pb.SERVER_STATE_STARTING,
    State.READY: pb.SERVER_STATE_READY,
    State.RECOVERING: pb.SERVER_STATE_STARTING,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
    State.FAILED: pb.SERVER_STATE_FAILED,
}


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Implements ControlService. All calls are quick, except loads and the conversion of long texts and many token ids.

    Conversions use threads. They count against their caller's quota and as requests that arrive.
    """

    def __init__(
        self,
        driver: Callable[[], Driver],
        lifecycle: Lifecycle,
        config: ServerConfig,
        callers: Callers,
        admission: Admission,
        slow: SlowWork,
        clock: Clock = time.monotonic,
    ) -> None:
        self._driver, self._lifecycle, self._config, self._callers = driver, lifecycle, config, callers
        self._admission, self._slow = admission, slow
        self._adapters = AdapterCalls(driver, config.adapter_root)
        self._clock, self._started = clock, clock()

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return version, state and queue limits. This method works in every state of the server."""
        return pb.GetServerInfoResponse(
            version=version(),
            state=_STATES[self._lifecycle.state],
            uptime_seconds=self._clock() - self._started,
            max_queue_requests=self._config.max_queue_requests,
            max_queue_tokens=self._config.max_queue_tokens,
        )

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Return the model and its limits."""
        return answers.model_info(self._model(request), self._driver().adapters)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:  # noqa: N802
        """Return the numbers of requests, queued tokens and pages."""
        driver = self._driver()
        engine = driver.model.engine
        return pb.GetLoadResponse(
            running_requests=engine.load.num_running,
            waiting_requests=engine.load.num_waiting + len(driver.queue),
            queued_tokens=driver.queue.num_tokens,
            total_pages=engine.total_pages,
            free_pages=engine.load.free_pages,
            spec_gain_ratio=engine.load.spec_gain,
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """End one request, or all. The response also counts requests that end by themselves in the meantime."""
        driver, caller = self._driver(), self._caller(context)
        if request.all and not caller.is_operator:
            raise Forbidden("all is true; only an operator may end everybody's requests")
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

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Convert a text to token ids. The text may be as long as a prompt."""
        with self._admission.conversion(self._caller(context)):
            model = self._model(request)
            codec, most = _require_codec(model), model.engine.max_model_len
            codec.require_room("text", request.text, most)
            release_turn()
            return await self._slow.encode(request.text, partial(_tokenized, codec))

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Convert token ids to text: as many as the context has."""
        with self._admission.conversion(self._caller(context)):
            model = self._model(request)
            codec, most = _require_codec(model), model.engine.max_model_len
            if len(request.token_ids) > most:
                raise InvalidRequest.of("token_ids", f"has {len(request.token_ids)} ids; the limit is {most}")
            return await self._slow.run(_detokenized, codec, request.token_ids, model.engine.vocab_size)

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        """Load an adapter from a folder of this machine."""
        fingerprint = await self._adapters.load(request.name, request.path, self._caller(context))
        return pb.LoadAdapterResponse(fingerprint=fingerprint)

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        """Unload an adapter as soon as no live request uses it."""
        self._adapters.unload(request.name, self._caller(context))
        return pb.UnloadAdapterResponse()

    def _caller(self, context: Context) -> Caller:
        return self._callers.of_metadata(context.invocation_metadata(), host_of(context.peer()))

    def _model(self, request: pb.GetModelInfoRequest | pb.TokenizeRequest | pb.DetokenizeRequest) -> ServedModel:
        model = self._driver().model
        convert.require_model(request.model if request.HasField("model") else None, model)
        return model


def _require_codec(model: ServedModel) -> Codec:
    if model.codec is None:
        raise Unsupported(f"{model.name} has no tokenizer: it takes and gives token ids alone")
    return model.codec


def _tokenized(codec: Codec, text: str) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=codec.encode(text))


def _detokenized(codec: Codec, token_ids: Sequence[int], vocab_size: int) -> pb.DetokenizeResponse:
    if unknown := list(unknown_ids("token_ids", token_ids, vocab_size)):
        raise InvalidRequest(unknown)
    return pb.DetokenizeResponse(text=codec.decode(token_ids))
