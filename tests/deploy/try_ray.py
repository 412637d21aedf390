"""Pilotfish on a real Ray of this machine: a replica of the embedded pair, then two, one of which is killed under load.

`make test-ray` installs the extra and runs it, in this order; replicas start and end, which takes a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2 as details_pb

from client import AsyncClient, Delta
from client.errors import InvalidRequestError, QueueFullError, UnavailableError, UnsupportedError
from models.corpus import held_out_prompts
from pilotfish.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.deploy.prometheus import DEPLOY
from tests.server.test_generate import detail
from tests.serving import until

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0", "RAY_AUTH_MODE": "disabled"}
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
BATCH = len(PROMPTS) // 2  # of one replica: of as many streams as there are prompts, each of two has half
WAITING = 3 * BATCH


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


@pytest.fixture(scope="module")
def served(address):
    """One replica, which becomes two when there is too much for it; Ray stops none within ten minutes."""
    options = {"threads": 1, "max_batch_size": BATCH, "max_batch_tokens": 256}
    scale = {"min_replicas": 1, "max_replicas": 2, "max_waiting": WAITING, "upscale_seconds": 1}
    serve.run(build({"num_cpus": 0.5, "options": options, **scale}), name="pilotfish", route_prefix="/pilotfish")
    yield address
    serve.delete("pilotfish")


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


async def test_tokens_are_those_of_plain_decoding_streamed_or_not(served):
    async with AsyncClient(served) as client:
        assert (await client.model_info()).model == "pilotfish-embedded"
        for prompt in PROMPTS[:3]:
            whole = await client.generate(prompt, max_tokens=48)
            plain = await client.generate(prompt, max_tokens=48, speculation="off")
            events = [event async for event in client.stream(prompt, max_tokens=48)]
            deltas = [event for event in events if isinstance(event, Delta)]
            assert whole.token_ids == plain.token_ids == tuple(t for delta in deltas for t in delta.token_ids)
            assert "".join(delta.text for delta in deltas) == whole.text
            assert 1 < len(deltas) == len(events) - 1


async def test_mistakes_are_told_field_by_field(served):
    async with AsyncClient(served, retry=None) as client:
        with pytest.raises(InvalidRequestError) as error:
            await client.generate("x", max_tokens=0, top_p=3.0)
        assert {v.field for v in error.value.violations} == {"stopping.max_tokens", "sampling.top_p"}
        with pytest.raises(InvalidRequestError) as error:
            async for _ in client.stream("x", max_tokens=0):
                pass
        assert [v.field for v in error.value.violations] == ["stopping.max_tokens"]
        with pytest.raises(UnsupportedError):
            await client.abort("anything")


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b'"\x02\xc3\x28'], ids=["no message", "no UTF-8"])
async def test_bytes_that_are_no_message_are_a_mistake_too(served, data):
    async with grpc.aio.insecure_channel(served) as channel:
        call = channel.unary_unary("/pilotfish.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(data)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert detail(error.value, details_pb.BadRequest).field_violations[0].field == "request"


async def test_a_deadline_is_kept(served):
    async with grpc.aio.insecure_channel(served) as channel:
        stub = generation_pb2_grpc.InferenceServiceStub(channel)
        stopping = generation_pb2.StoppingParams(max_tokens=900, ignore_eos=True)
        request = generation_pb2.GenerateRequest(prompt=PROMPTS[0], stopping=stopping)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.GenerateStream(request, timeout=0.05):
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_stream_frees_its_replica(served):
    async with AsyncClient(served) as client, grpc.aio.insecure_channel(served) as channel:
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


async def test_a_resume_that_is_no_stream_is_a_mistake(served):
    async with grpc.aio.insecure_channel(served) as channel:
        stub = generation_pb2_grpc.InferenceServiceStub(channel)
        request = generation_pb2.GenerateRequest(prompt="x", resume=generation_pb2.Resume(fingerprint="f"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GenerateStream(request).read()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# ------------------------------------------------------------------------------- too many, and then another replica


async def test_too_many_are_refused_with_a_time_to_come_again_and_bring_another_replica(served):
    assert len(replicas()) == 1
    async with AsyncClient(served, retry=None) as client:
        ends = await asyncio.gather(
            *(client.generate(prompt, **LONG) for prompt in PROMPTS * 4), return_exceptions=True
        )
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
        await until(_both_serve, 90)
        busy.cancel()
        await asyncio.wait([busy])


# ------------------------------------------------------------------------------------------------- one that is killed


async def _read(client, prompt, started):
    """The tokens of one stream, and its end or the error that ended it."""
    tokens = []
    try:
        async for event in client.stream(prompt, **LONG):
            if isinstance(event, Delta):
                tokens += event.token_ids
                started.add(asyncio.current_task())
    except UnavailableError as error:
        return tokens, error
    return tokens, event


async def test_a_killed_replica_costs_its_own_streams_alone_and_they_go_on_with_the_other_for_who_asks_again(served):
    """Every second stream is of a client that asks once; the other client is as it is by default."""
    async with AsyncClient(served, retry=None) as once, AsyncClient(served) as patient:
        await until(_both_serve, 90)
        wanted = [list((await patient.generate(prompt, **LONG)).token_ids) for prompt in PROMPTS]
        victim, survivor = replicas()
        clients, started = [once, patient] * (len(PROMPTS) // 2), set()
        reading = [
            asyncio.create_task(_read(client, prompt, started)) for client, prompt in zip(clients, PROMPTS, strict=True)
        ]
        await until(lambda: len(started) == len(reading), 60)
        os.kill(victim, signal.SIGKILL)
        fresh = await asyncio.gather(*(patient.generate(p, max_tokens=32, ignore_eos=True) for p in PROMPTS[:BATCH]))
        ends = await asyncio.gather(*reading)
        assert all(len(completion.token_ids) == 32 for completion in fresh)
        assert survivor in replicas()
        await until(lambda: len(replicas()) == 2, 90)  # Ray puts another in its place
    lost = [end for _, end in ends[::2] if isinstance(end, UnavailableError)]
    assert 0 < len(lost) < len(ends[::2]), "each replica had streams of the client that asks once"
    assert {error.message for error in lost} == {"the replica was lost; the request may be sent again"}
    assert {end.interruptions for _, end in ends[1::2]} == {0, 1}, "each had streams of the other one"
    for (tokens, end), whole in zip(ends, wanted, strict=True):
        assert tokens == whole if end not in lost else tokens == whole[: len(tokens)]
