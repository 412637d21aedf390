"""The composition root: creates all parts, and starts and stops them in the right order.

Signal handlers are installed before the model is loaded. The front ends (gRPC and HTTP) open first and report
NOT_SERVING; once the model is loaded and warm they report SERVING. After SIGTERM the server drains: it accepts no new
requests, and live streams may finish. A second SIGTERM ends them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector

from pilotfish.engine.errors import ModelError
from pilotfish.engine.types import FinishReason
from pilotfish.server.admission.admission import Admission
from pilotfish.server.admission.security import Callers, Quotas
from pilotfish.server.admission.slow_work import SlowWork
from pilotfish.server.config import LOOPBACK, ServerConfig
from pilotfish.server.driver import Driver
from pilotfish.server.errors import EngineCrashed, Unavailable
from pilotfish.server.grpc.server import listen, make_server
from pilotfish.server.grpc.services import ControlService, Health, InferenceService
from pilotfish.server.http.gateway import HttpServer, gateway
from pilotfish.server.http.routes import add_adapters, add_generation
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.model import ServedModel, model_name
from pilotfish.server.queue import AdmissionQueue
from pilotfish.server.telemetry.kv_events import ZmqKvEvents
from pilotfish.server.telemetry.logs import PROGRESS
from pilotfish.server.telemetry.metrics import Exposition, Metrics, watch_lag
from pilotfish.server.telemetry.tracing import Tracing
from pilotfish.server.worker.remote import RemoteEngine
from pilotfish.server.worker.supervisor import Supervisor
from pilotfish.server.worker.worker import first_of
from pilotfish.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

logger = logging.getLogger(__name__)

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
)
LAST_MESSAGES_SECONDS = 2.0  # time to send what is already written when the last stream has ended


class App:
    """One server process."""

    def __init__(
        self,
        config: ServerConfig,
        host: RemoteEngine | None = None,  # default: as configured
        on_ready: Callable[[App], None] = lambda _: None,
        tracing: Tracing | None = None,  # default: as configured
    ) -> None:
        self.config, self.lifecycle = config, Lifecycle()
        self.metrics = Metrics(CollectorRegistry())
        ProcessCollector(registry=self.metrics.registry)
        self.driver: Driver | None = None
        self.grpc_port = self.http_port = 0
        self._on_ready = on_ready
        self.kv_events = ZmqKvEvents.configured(config, model_name(config.target))
        self.host = host or RemoteEngine(config)
        self._slow = SlowWork()
        self._callers = Callers.load(config.token_file)
        quotas = Quotas(config.max_requests_per_token, config.requests_per_second, time.monotonic)
        if tracing is None:
            tracing = Tracing.configured(model_name(config.target)) if config.tracing else Tracing()
        self._admission = Admission(self._require_driver, self.metrics, self._slow, quotas, tracing)
        self._stop, self._cut = asyncio.Event(), asyncio.Event()
        # Other ranks end with the engine, and this process cannot restart them: torchrun has to restart all ranks.
        most = config.max_engine_crashes if config.tensor_parallel_size == 1 else 0
        self._supervisor = Supervisor(self.host, self.lifecycle, self.metrics, most)

    async def run(self) -> int:
        """Serve until `stop` is called; return the exit code."""
        async with asyncio.TaskGroup() as tasks:
            await self.startup(tasks)
            await self._stop.wait()
            await self.shutdown()
        return 1 if self.lifecycle.state is State.FAILED else 0

    def stop(self) -> None:
        """Drain, then let `run` return; a second call ends the remaining streams. SIGTERM and SIGINT call this."""
        (self._cut if self._stop.is_set() else self._stop).set()

    # --------------------------------------------------------------------------------------------------- startup

    async def startup(self, tasks: asyncio.TaskGroup) -> None:
        """Catch signals, open the front ends, load the model, start the driver."""
        started = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await self._open_grpc()
        self._http = self._http_server()
        self.http_port = self._http.port
        tasks.create_task(self._http.run_until_stopped())
        self._beside = [tasks.create_task(watch_lag(self.metrics.loop_lag.observe, time.monotonic))]
        if self.kv_events is not None:
            self._beside.append(tasks.create_task(self.kv_events.answer_replays()))
        model = await self._load_model()
        if model is not None:
            self.driver = self._make_driver(model)
            pages = str(model.engine.facts.page_size), str(model.engine.facts.total_pages)
            self.metrics.requests.cache_config.labels(*pages).set(1)
            tasks.create_task(self.driver.run())
            self.metrics.engine_up.set(1)
            self.metrics.model_load.set(time.monotonic() - started)
            await self.lifecycle.move(State.READY)
            self._warn_of_strangers()
            self._on_ready(self)

    def _make_driver(self, model: ServedModel) -> Driver:
        config = self.config
        queue = AdmissionQueue(config.max_queue_requests, config.max_queue_tokens, config.max_queue_seconds)
        self.metrics.requests.queue_usage.set_function(lambda: queue.usage)
        seconds = config.ageing_seconds
        return Driver(model, queue, self._supervisor, ageing_seconds=seconds, kv_events=self.kv_events)

    def _http_server(self) -> HttpServer:
        config = self.config
        exposition = Exposition(self.metrics.registry, model_name(config.target) if config.vllm_metrics else None)
        app = gateway(self.lifecycle, lambda: self.driver, exposition, config, self._callers)
        add_generation(app, self._admission, config.stall_seconds)
        add_adapters(app, self._require_driver, config.adapter_root)
        return HttpServer(app, config)

    async def _open_grpc(self) -> None:
        config, self._grpc = self.config, make_server(self.config, self._callers, self._slow)
        health = Health(SERVICES, self.lifecycle.state)
        self.lifecycle.listen(health.follow)
        self.lifecycle.listen(self._follow)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._grpc)
        inference = InferenceService(self._admission, self._callers, config.stall_seconds)
        generation_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self._grpc)
        control = ControlService(self.lifecycle, config, self._callers, self._admission)
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, self._grpc)
        if config.reflection:
            reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), self._grpc)
        self.grpc_port = listen(self._grpc, config)
        await self._grpc.start()

    async def _load_model(self) -> ServedModel | None:
        """Load the model, again if the engine dies; None if it cannot be served or if `stop` was called meanwhile."""
        pause: float | None = 0.0
        config = self.config
        while pause is not None:
            await first_of(asyncio.sleep(pause), self._stop.wait())
            loading = asyncio.ensure_future(self.host.start(self._progress))
            await first_of(loading, self._stop.wait())
            if self._stop.is_set():
                return None
            try:
                model = loading.result()
                if config.chat_format is not None:
                    model = model.with_format(config.chat_format)
                if model.chat is not None:
                    logger.info("tool call format: %s", model.format.name)
                return model
            except EngineCrashed as error:
                self._supervisor.record()
                has_failed = error.status is not None and error.status > 0  # would fail again
                pause = None if has_failed else self._supervisor.pause()
                what = "giving up" if pause is None else "loading it again"
                logger.error("the engine process ended while loading %s: %s; %s", config.target, error, what)  # noqa: TRY400
            except ModelError as error:
                logger.error("cannot serve %s: %s", config.target, error)  # noqa: TRY400  # an error of the user: no traceback
                break
            except Exception:
                logger.exception("cannot load %s", config.target)
                break
        await self.lifecycle.move(State.FAILED)
        return None

    def _progress(self, stage: str) -> None:
        """Log a stage of loading; called on any thread. Raises InterruptedError to stop the load."""
        if self._stop.is_set():
            raise InterruptedError("stopped while loading")
        logger.info("%s", stage, extra=PROGRESS)
        self.lifecycle.progress = stage

    def _warn_of_strangers(self) -> None:
        config = self.config
        if config.host in LOOPBACK:
            return
        if not self._callers.are_known and config.tls_client_ca is None:
            logger.warning("listening on %s without authentication: anyone who reaches it can use it", config.host)
        elif config.tls_cert is None:
            logger.warning("listening on %s without TLS: tokens and texts are sent unencrypted", config.host)

    async def _follow(self, state: State) -> None:
        if state is State.FAILED:
            self._stop.set()  # the state is final: the process ends, so that its supervisor sees the exit code

    def _require_driver(self) -> Driver:
        if self.driver is None:
            raise Unavailable("STARTING", f"the model is still loading: {self.lifecycle.progress}")
        return self.driver

    # ------------------------------------------------------------------------------------------------- shutdown

    async def shutdown(self) -> None:
        """Accept no new requests, let live streams finish, end those that do not, and close the front ends."""
        await self.lifecycle.move(State.DRAINING)
        if self.driver is not None:
            await self._drain(self.driver)
        await self._grpc.stop(LAST_MESSAGES_SECONDS)
        self._http.stop()
        for task in self._beside:
            task.cancel()
        self._slow.close()
        await self.host.close()
        if self.kv_events is not None:
            self.kv_events.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def _drain(self, driver: Driver) -> None:
        logger.info("draining: %d live requests have %g seconds", len(driver.live()), self.config.drain_seconds)
        await first_of(driver.wait_idle(), self._cut.wait(), timeout=self.config.drain_seconds)
        for stream in driver.live():
            driver.end(stream, FinishReason.ABORTED, Unavailable("DRAINING", "the server shut down"))
        await driver.wait_idle()
        driver.stop()
