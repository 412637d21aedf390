"""Pilotfish on a real Ray of this machine: two replicas of the embedded pair, one of which is killed under load.

`make test-ray` installs the extra and runs it; processes start and stop, which takes a minute or two.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import yaml

from pilotfish.client import AsyncClient, Delta
from pilotfish.client.errors import InvalidRequestError, QueueFullError, UnsupportedError
from pilotfish.models.corpus import held_out_prompts
from pilotfish.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.deploy.prometheus import DEPLOY
from tests.serving import until

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0", "RAY_AUTH_MODE": "disabled"}
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # the proxy's imports alone take more than 5 on busy cores
ray = pytest.importorskip("ray")
from ray import serve  # noqa: E402
from ray._common.utils import import_attr  # noqa: E402
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary  # noqa: E402
from ray.serve.config import gRPCOptions  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from deploy.ray.app import build  # noqa: E402
from deploy.ray.edge import add_control, add_inference  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

PROMPTS = [prompt[-200:] for prompt in held_out_prompts(8)]
LONG = {"max_tokens": 400, "ignore_eos": True}
SHARE = len(PROMPTS)  # as many at once as one replica takes: of twice as many, each has half
BATCH = 4


@pytest.fixture(scope="module")
def address():
    """Ray with a gRPC proxy that knows our methods, and no application yet."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        grpc_port, http_port = one.getsockname()[1], other.getsockname()[1]
    functions = ["deploy.ray.edge.add_inference", "deploy.ray.edge.add_control"]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=functions, enable_reflection=False),
        http_options={"location": "HeadOnly", "port": http_port},
    )
    yield f"127.0.0.1:{grpc_port}"
    serve.shutdown()
    ray.shutdown()


@contextmanager
def deployed(**arguments):
    options = {"threads": 1} | arguments.pop("options", {})
    application = build({"num_cpus": 0.5, "options": options, **arguments})
    serve.run(application, name="pilotfish", route_prefix="/pilotfish")
    try:
        yield
    finally:
        serve.delete("pilotfish")


@pytest.fixture(scope="module")
def two(address):
    """Two replicas. Neither has room for all streams: Ray sends nothing to a replica whose load it does not know."""
    with deployed(min_replicas=2, max_replicas=2, options={"max_batch_size": SHARE}):
        yield address


def replicas():
    """Process ids of the replicas that this Ray has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if title.startswith(b"ray::ServeReplica:pilotfish:Replica") and _ours(int(folder.name)):
                found.append(int(folder.name))
    return found


def _both_serve():
    """Whether there are two replicas, and Ray sends calls to both."""
    states = serve.status().applications["pilotfish"].deployments["Replica"].replica_states
    return len(replicas()) == 2 and states == {"RUNNING": 2}


def _ours(pid):
    """Whether a process is among our descendants: another Ray may run on this machine."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_the_configuration_is_one_for_ray():
    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text()))
    [application] = config.applications
    assert import_attr(application.import_path) is build
    call_user_app_builder_with_args_if_necessary(build, application.args)
    assert [import_attr(path) for path in config.grpc_options.grpc_servicer_functions] == [add_inference, add_control]


# ------------------------------------------------------------------------------------------------- as any server is


async def test_tokens_are_those_of_plain_decoding_streamed_or_not(two):
    async with AsyncClient(two) as client:
        assert (await client.model_info()).model == "pilotfish-embedded"
        for prompt in PROMPTS[:3]:
            whole = await client.generate(prompt, max_tokens=48)
            plain = await client.generate(prompt, max_tokens=48, speculation="off")
            events = [event async for event in client.stream(prompt, max_tokens=48)]
            deltas = [event for event in events if isinstance(event, Delta)]
            assert whole.token_ids == plain.token_ids == tuple(t for delta in deltas for t in delta.token_ids)
            assert "".join(delta.text for delta in deltas) == whole.text
            assert 1 < len(deltas) == len(events) - 1


async def test_violations_are_reported_by_field(two):
    async with AsyncClient(two, retry=None) as client:
        with pytest.raises(InvalidRequestError) as error:
            await client.generate("x", max_tokens=0, top_p=3.0)
        assert {v.field for v in error.value.violations} == {"stopping.max_tokens", "sampling.top_p"}
        with pytest.raises(InvalidRequestError) as error:
            async for _ in client.stream("x", max_tokens=0):
                pass
        assert [v.field for v in error.value.violations] == ["stopping.max_tokens"]
        with pytest.raises(UnsupportedError):
            await client.abort("anything")


async def test_a_deadline_is_kept(two):
    async with grpc.aio.insecure_channel(two) as channel:
        stub = generation_pb2_grpc.InferenceServiceStub(channel)
        stopping = generation_pb2.StoppingParams(max_tokens=900, ignore_eos=True)
        request = generation_pb2.GenerateRequest(prompt=PROMPTS[0], stopping=stopping)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.GenerateStream(request, timeout=0.05):
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_stream_frees_its_replica(two):
    async with AsyncClient(two) as client, grpc.aio.insecure_channel(two) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        for prompt in PROMPTS[:4]:
            async for _ in client.stream(prompt, **LONG):
                break
        idle = 0
        async with asyncio.timeout(30):
            while idle < 8:  # whichever replica is asked
                load = await stub.GetLoad(control_pb2.GetLoadRequest())
                free = load.running_requests == load.waiting_requests == 0 and load.free_pages == load.total_pages
                idle = idle + 1 if free else 0


# ------------------------------------------------------------------------------------------------- one that is killed


async def _continued(client, prompt, started):
    """The tokens of one stream and its end, whatever becomes of its replica."""
    tokens = []
    async for event in client.stream(prompt, **LONG):
        if isinstance(event, Delta):
            tokens += event.token_ids
            started.add(asyncio.current_task())
    return tokens, event


async def test_streams_of_a_killed_replica_go_on_with_the_other(two):
    async with AsyncClient(two) as client:
        await until(_both_serve, 90)
        wanted = [(await client.generate(prompt, **LONG)).token_ids for prompt in PROMPTS] * 2
        victim, survivor = replicas()
        started = set()
        reading = [asyncio.create_task(_continued(client, prompt, started)) for prompt in PROMPTS * 2]
        await until(lambda: len(started) == len(reading), 60)
        os.kill(victim, signal.SIGKILL)
        ends = await asyncio.gather(*reading)
    assert [tuple(tokens) for tokens, _ in ends] == wanted
    assert {end.interruptions for _, end in ends} == {0, 1}, "both had streams"
    assert survivor in replicas()
    await until(lambda: len(replicas()) == 2, 90)  # Ray puts another in its place


async def test_a_resume_that_is_no_stream_is_a_mistake(two):
    async with grpc.aio.insecure_channel(two) as channel:
        stub = generation_pb2_grpc.InferenceServiceStub(channel)
        request = generation_pb2.GenerateRequest(prompt="x", resume=generation_pb2.Resume(fingerprint="f"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GenerateStream(request).read()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# ------------------------------------------------------------------------------------- too many, and then more replicas


async def test_too_many_are_refused_with_a_time_to_come_again_and_bring_another_replica(two):
    serve.delete("pilotfish")
    small = {"max_batch_size": BATCH, "max_batch_tokens": 256}
    with deployed(min_replicas=1, max_replicas=2, max_waiting=BATCH, upscale_seconds=1, options=small):
        assert len(replicas()) == 1
        async with AsyncClient(two, retry=None) as client:
            calls = [client.generate(prompt, **LONG) for prompt in PROMPTS * 4]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, BaseException)]
            assert 0 < len(refused) < len(ends)
            for error in refused:
                assert isinstance(error, QueueFullError), error
                assert error.retry_seconds == 1.0
                assert "\n" not in error.message

            async def keep_busy():
                while True:
                    await asyncio.gather(*(client.generate(p, **LONG) for p in PROMPTS), return_exceptions=True)

            busy = asyncio.create_task(keep_busy())
            await until(lambda: len(replicas()) == 2, 90)
            busy.cancel()
            await asyncio.wait([busy])
