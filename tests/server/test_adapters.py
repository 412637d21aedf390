"""Adapters over gRPC and HTTP: requests name them, and operators load and unload them while the server runs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from pilotfish.client import NotFoundError
from pilotfish.engine.errors import ModelError
from pilotfish.server.lifecycle import State
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import detail, error_of, request, streamed
from tests.server.test_security import ALICE, ROOT, bearer
from tests.server.test_security import tokens as tokens  # noqa: PLC0414  # a fixture
from tests.server.worker import fake_child
from tests.server.worker.test_engine_process import apart
from tests.serving import grpc_client, http_client, serving, until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two adapters in it, and one beside it."""
    for name in ("root/one", "root/two", "beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "fingerprint").write_text(f"of {name}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "beside")
    (tmp_path / "root" / "empty").mkdir()
    (tmp_path / "root" / "loop").symlink_to("loop")
    return tmp_path / "root"


async def load(server, name: str = "one", path: str = "one", **how) -> str:
    answer = await server.control.LoadAdapter(control.LoadAdapterRequest(name=name, path=path), **how)
    return answer.fingerprint


async def unload(server, name: str = "one", **how) -> None:
    await server.control.UnloadAdapter(control.UnloadAdapterRequest(name=name), **how)


async def names(server) -> list[str]:
    return list((await server.control.GetModelInfo(control.GetModelInfoRequest())).adapters)


async def test_a_request_names_an_adapter_that_was_loaded_by_a_call(root):
    async with serving(adapter_root=root) as server:
        assert await names(server) == []
        assert await load(server) == "of root/one"
        assert await load(server, "other", str(root / "two")) == "of root/two"
        assert await names(server) == ["one", "other"]
        for asked in ({"adapter": "one"}, {"model": "one"}, {"model": "fake", "adapter": "one"}):
            assert (await server.inference.Generate(request(**asked))).model == "one"
        assert (await server.inference.Generate(request())).model == "fake"
        assert [one.adapter for one in server.engine.requests] == ["one", "one", "one", None]
        await unload(server)
        assert await names(server) == ["other"]
        error = await error_of(server.inference.Generate(request(adapter="one")))
        assert (error.code().name, error.details()) == ("NOT_FOUND", "adapter is 'one'; this server has 'other'")
        error = await error_of(server.inference.Generate(request(model="one")))
        assert (error.code().name, error.details()) == ("NOT_FOUND", "model is 'one'; this server has 'fake', 'other'")
        assert (await error_of(unload(server))).code() == grpc.StatusCode.NOT_FOUND


async def test_an_adapter_in_use_goes_with_its_last_request(root):
    """One runs and one waits when it is unloaded: both are served. Then there is room for another of the name."""
    engine = FakeEngine(batch=1)
    async with serving(engine, adapter_root=root) as server:
        await load(server)
        engine.gate.clear()
        calls = [server.inference.Generate(request(adapter="one")) for _ in range(2)]
        await until(lambda: len(server.app.driver.live()) == 2)
        await unload(server)
        assert await names(server) == []
        error = await error_of(server.inference.Generate(request(adapter="one")))
        assert (error.code().name, error.details()) == ("NOT_FOUND", "adapter is 'one', which was unloaded")
        error = await error_of(load(server))
        assert (error.code().name, "requests still use it" in error.details()) == ("ALREADY_EXISTS", True)
        engine.gate.set()
        assert [answer.model for answer in await asyncio.gather(*calls)] == ["one", "one"]
        await until(lambda: "one" not in engine.adapters)
        await load(server)
        assert await names(server) == ["one"]


WRONG = [
    ("", "one", "name", "is ''; expected 1 to 128"),
    ("a b", "one", "name", "is 'a b'; expected 1 to 128"),
    ("a\n", "one", "name", "expected 1 to 128"),
    ("fake", "one", "name", "is 'fake', which is the model's own"),
    ("a", "", "path", "no such file"),
    ("a", "three", "path", "is 'three'; expected a directory below adapter_root"),
    ("a", "../beside", "path", "expected a directory below adapter_root"),
    ("a", "link", "path", "expected a directory below adapter_root"),
    ("a", "/etc", "path", "expected a directory below adapter_root"),
    ("a", "one\0", "path", "null"),
    ("a", "x" * 5000, "path", "xxx', which cannot be opened: File name too long"),
    ("a", "x/" * 2500, "path", "x/', which cannot be opened: File name too long"),
    ("a", "loop", "path", "is 'loop', which cannot be opened: Symlink loop"),
    ("a", "one\n", "path", "is 'one\\n'; expected a directory below adapter_root"),
    ("a", "one/fingerprint", "path", "expected a directory below adapter_root"),
    ("a", "empty", "path", "is 'empty': adapter 'a': "),
]


async def test_what_cannot_be_loaded_is_refused_by_its_field(root):
    async with serving(adapter_root=root) as server:
        for name, path, field, problem in WRONG:
            error = await error_of(load(server, name, path))
            (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
            assert (error.code(), violation.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert problem in violation.description.lower() or problem in violation.description
        assert await names(server) == []


async def test_only_an_operator_loads_and_only_where_a_folder_is_set(root, tokens):
    async with serving(adapter_root=root, token_file=tokens) as server, http_client(server) as http:
        for call in (load, unload):
            error = await error_of(call(server, metadata=bearer(ALICE)))
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        headers = dict(bearer(ALICE))
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await http.post(path, json={}, headers=headers)).status_code == 403
        await load(server, metadata=bearer(ROOT))
        await unload(server, metadata=bearer(ROOT))
    async with serving() as server, http_client(server) as http:
        error = await error_of(load(server))
        assert (error.code(), "adapter_root" in error.details()) == (grpc.StatusCode.UNIMPLEMENTED, True)
        assert (await http.post("/v1/load_lora_adapter", json={})).status_code == 400


async def test_over_http_as_with_vllm(root):
    async with serving(adapter_root=root) as server, http_client(server) as http:
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' added successfully.")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("fake", None), ("one", "fake")]
        assert (await http.get("/v1/models/one")).json() == cards[1]
        body = {"prompt": "ab", "max_tokens": 5}
        for model in ("one", "fake"):
            assert (await http.post("/v1/completions", json=body | {"model": model})).json()["model"] == model
        assert [one.adapter for one in server.engine.requests] == ["one", None]
        again = await http.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one"})
        assert again.status_code == 409
        wrong = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/etc"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
        wrong = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "two", "x": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x")
        answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'one' removed successfully.")
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "one"})).status_code == 404
        assert (await http.post("/v1/completions", json=body | {"model": "one"})).status_code == 404


async def test_a_stream_continues_with_its_own_adapter_alone(root):
    async with serving(adapter_root=root) as server:
        await load(server)
        await load(server, "two", "two")
        error = await error_of(server.inference.Generate(request(model="one", adapter="two")))
        assert "adapter is 'two', and model is 'one'; expected the same" in error.details()
        prints = {}
        for adapter in (None, "one", "two"):
            *_, messages = await streamed(server, adapter=adapter)
            prints[adapter] = messages[0].resume_info.fingerprint
        assert len(set(prints.values())) == 3
        again = {"resume": pb.Resume(fingerprint=prints["one"]), "sampling": pb.SamplingParams(seed=1)}
        error = await error_of(streamed(server, adapter="two", **again))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        await streamed(server, adapter="one", **again)


async def killed(server) -> None:
    """Kill the engine's process and wait for its successor."""
    pid = server.host.pid
    server.kill()
    await until(lambda: server.host.pid not in (pid, None) and server.app.lifecycle.state is State.READY)


async def model_of(server, adapter: str) -> str:
    return (await server.inference.Generate(request(adapter=adapter))).model


@pytest.mark.parametrize("standby", [False, True])
async def test_a_successor_has_the_adapters_that_were_loaded_and_not_those_that_were_unloaded(root, standby):
    async with apart(
        adapter_root=root, adapter={"first": str(root / "two"), "gone": str(root / "two")}, standby=standby
    ) as server:
        assert await names(server) == ["first", "gone"]
        await load(server)
        await unload(server, "gone")
        for _ in range(2):
            assert [await model_of(server, name) for name in ("one", "first")] == ["one", "first"]
            await killed(server)
        assert await names(server) == ["first", "one"]
        await load(server, "gone", "one")  # its name is free in the successor, too
        assert await model_of(server, "gone") == "gone"


async def test_a_running_request_goes_on_with_its_adapter_after_a_crash(root):
    async with apart(adapter_root=root) as server:
        await load(server)
        long = pb.StoppingParams(max_tokens=300)
        running = asyncio.ensure_future(
            streamed(server, adapter="one", token_ids=pb.TokenIds(ids=[fake_child.SLOW]), stopping=long)
        )
        await until(lambda: server.app.driver.live() and server.app.driver.live()[0].outputs[0].num_tokens)
        await unload(server)  # the request still has it
        await killed(server)
        _, tokens, (finished,), _ = await running
        assert (len(tokens), finished.interruptions) == (300, 1)
        await until(lambda: "one" not in server.app.host.adapters)


async def test_an_adapter_whose_files_changed_is_lost_with_its_engine(root):
    """Its streams would go on with other weights. The server and its other requests go on."""
    (root / "three").mkdir()
    async with apart(adapter_root=root, adapter={"kept": str(root / "two")}) as server:
        (root / "three" / "fingerprint").write_text("of three")
        await load(server)
        await load(server, "three", "three")
        (root / "one" / "fingerprint").write_text("another")
        (root / "three" / "fingerprint").unlink()
        await killed(server)
        await until(lambda: set(server.app.host.adapters) == {"kept"})
        for name in ("one", "three"):
            error = await error_of(server.inference.Generate(request(adapter=name)))
            assert error.code() == grpc.StatusCode.NOT_FOUND
        assert await model_of(server, "kept") == "kept"


async def test_a_loss_of_the_engine_ends_a_load_that_can_be_repeated(root):
    async with apart(adapter_root=root) as server:
        server.kill(signal.SIGSTOP)
        loads = [asyncio.ensure_future(error_of(load(server))) for _ in range(2)]
        (second,), (first,) = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
        assert second.result().code() == grpc.StatusCode.ALREADY_EXISTS  # so the other one is on its way
        await killed(server)
        assert (await first).code() == grpc.StatusCode.UNAVAILABLE
        await load(server)
        with pytest.raises(ModelError, match="adapter 'a'"):  # the reason is the engine's
            await server.app.host.load_adapter("a", str(root / "empty"))
        assert "a" not in server.app.host.adapters


async def test_by_the_client(root):
    async with serving(adapter_root=root) as server, grpc_client(server) as connection:
        assert await connection.load_adapter("one", "one") == "of root/one"
        assert (await connection.model_info()).adapters == ("one",)
        assert (await connection.generate("ab", adapter="one", max_tokens=3)).model == "one"
        await connection.unload_adapter("one")
        with pytest.raises(NotFoundError):
            await connection.generate("ab", adapter="one")
