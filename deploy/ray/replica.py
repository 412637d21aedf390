"""One replica: engine, queue and driver, as in `server/app.py`, without front ends, because Ray sends the calls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from deploy.ray.edge import REMAINING
from deploy.ray.envelope import Envelope
from pilotfish.engine.errors import InvalidRequest, PilotfishError, Unsupported
from pilotfish.server.admission.admission import Admission, Remaining
from pilotfish.server.admission.security import ANYBODY, Callers, Quotas
from pilotfish.server.admission.slow_work import SlowWork
from pilotfish.server.config import ServerConfig
from pilotfish.server.driver import Driver
from pilotfish.server.grpc import messages
from pilotfish.server.grpc.services import ControlService
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.model import ServedModel
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.streams.stream import OutputStream
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.server.telemetry.tracing import Tracing
from pilotfish.server.worker.remote import RemoteEngine
from pilotfish.server.worker.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Options of the front ends of `pilotfish serve`, which Ray's proxy does not support.
WITHOUT_EFFECT = (
    "token_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "tracing",
    "vllm_metrics",
    "reflection",
    "stall_seconds",
    "kv_events_endpoint",
    "kv_events_replay_endpoint",
    "kv_events_topic",
)


class Replica:
    """A deployment of Ray Serve. Ray sends each call of the protocol to the method with the same name."""

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        self._config, self._lifecycle, self._slow = configured(options), Lifecycle(), SlowWork()
        self._host = RemoteEngine(self._config)  # its process has this one's devices, and ends with it
        model = await self._host.start(logger.info)
        self._driver = self._started(model, Metrics(CollectorRegistry()))
        self._clock = asyncio.create_task(self._driver.run())
        await self._lifecycle.move(State.READY)

    def _started(self, model: ServedModel, metrics: Metrics) -> Driver:
        config, callers = self._config, Callers()
        queue = AdmissionQueue(config.max_queue_requests, config.max_queue_tokens, config.max_queue_seconds)
        supervisor = Supervisor(self._host, self._lifecycle, metrics, config.max_engine_crashes)
        driver = Driver(model, queue, supervisor, ageing_seconds=config.ageing_seconds)
        quotas = Quotas(None, None, time.monotonic)
        self._admission = Admission(lambda: driver, metrics, self._slow, quotas, Tracing())
        self._control = ControlService(self._lifecycle, config, callers, self._admission)
        return driver

    async def check_health(self) -> None:
        """Raise an error if the engine failed. Ray calls this at intervals and replaces a replica that raises."""
        if self._lifecycle.state is State.FAILED:
            raise RuntimeError("the engine failed")

    # --------------------------------------------------------------------------------------------- InferenceService

    async def Generate(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        """Return the complete answer."""
        if request.HasField("resume"):
            return Envelope.refused(InvalidRequest.of("resume", "is only supported by GenerateStream"))
        try:
            async with self._slow.turn(request.ByteSize()):
                stream = await self._admit(request, grpc_context)
        except PilotfishError as error:
            return Envelope.refused(error)
        try:
            return await _enveloped(messages.response(stream))
        finally:
            stream.release()

    async def GenerateStream(self, request: Any, grpc_context: Any) -> AsyncGenerator[Envelope, None]:  # noqa: N802
        """Yield messages as they are produced."""
        try:
            async with self._slow.turn(request.ByteSize()):
                stream = await self._admit(request, grpc_context)
        except PilotfishError as error:
            yield Envelope.refused(error)
            return
        try:
            async with aclosing(_enveloped_each(messages.responses(stream, self._driver.model))) as envelopes:
                async for envelope in envelopes:
                    yield envelope
        finally:
            stream.release()

    async def _admit(self, request: Any, grpc_context: Any) -> OutputStream:
        read, remaining = partial(messages.request_of, request), _remaining(grpc_context)
        return await self._admission.admit(read, ANYBODY, remaining, {}, messages.num_outputs(request))

    # ----------------------------------------------------------------------------------------------- ControlService

    async def GetServerInfo(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        """Describe the replica that received the call."""
        return await _enveloped(self._control.GetServerInfo(request, grpc_context))

    async def GetModelInfo(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        """Describe the model; all replicas give the same answer."""
        return await _enveloped(self._control.GetModelInfo(request, grpc_context))

    async def GetLoad(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        """Return the load of the replica that received the call."""
        return await _enveloped(self._control.GetLoad(request, grpc_context))

    async def Abort(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        """Not supported, because Ray may send the call to a replica without the request."""
        return Envelope.refused(Unsupported("Abort is not supported with replicas; cancel the call itself"))

    async def Tokenize(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        async with self._slow.turn(request.ByteSize()):
            return await _enveloped(self._control.Tokenize(request, grpc_context))

    async def Detokenize(self, request: Any, grpc_context: Any) -> Envelope:  # noqa: N802
        async with self._slow.turn(request.ByteSize()):
            return await _enveloped(self._control.Detokenize(request, grpc_context))


def configured(options: Mapping[str, Any]) -> ServerConfig:
    """Validate the options of `pilotfish serve`; raise ValueError for those that have no effect under Ray."""
    useless = sorted(set(options) & set(WITHOUT_EFFECT))
    if useless:
        raise ValueError(f"{', '.join(useless)}: not supported by Ray's proxy; use a gateway in front of it")
    return ServerConfig(**options)


async def _enveloped_each(answers: AsyncGenerator[Any, None]) -> AsyncGenerator[Envelope, None]:
    """Yield the messages of a call; if the call fails, the last one is a status."""
    try:
        async with aclosing(answers):
            async for message in answers:
                yield Envelope.of(message)
    except PilotfishError as error:
        yield Envelope.refused(error)
    except Exception:
        logger.exception("a call failed")
        yield Envelope.failed()


def _remaining(grpc_context: Any) -> Remaining:
    """Return what counts down the seconds that the edge sent."""
    metadata = dict(grpc_context.invocation_metadata())
    ends = time.monotonic() + float(metadata.get(REMAINING, math.inf))
    return lambda: ends - time.monotonic()


async def _enveloped(answer: Awaitable[Any]) -> Envelope:
    try:
        return Envelope.of(await answer)
    except PilotfishError as error:
        return Envelope.refused(error)
    except Exception:
        logger.exception("a call failed")
        return Envelope.failed()
