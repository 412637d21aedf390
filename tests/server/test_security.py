"""Tokens, what each caller may do, and TLS: default deny, over both doors."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pilotfish.server.admission.security import ANYBODY, Caller, Callers, Quotas
from pilotfish.server.app import SERVICES
from pilotfish.server.errors import QuotaExceeded, Unauthenticated
from pilotfish.server.grpc.server import host_of
from pilotfish.v1 import control_pb2, generation_pb2_grpc
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.test_generate import collect, detail, error_of, request
from tests.server.test_life import LONG, metric, read_to_end
from tests.serving import http_client, serving, until

ALICE, BOB, ROOT = "alice-has-a-long-token", "bob-has-another-token", "root-has-one-more-token"
WRONG = ["", "Bearer", "Bearer ", f"Basic {ALICE}", "Bearer nobody-has-this-token", f"Bearer {ALICE}x", ALICE]


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# who may call\nalice {ALICE}\n\nbob {BOB}\nroot {ROOT} operator\n")
    return path


# ---------------------------------------------------------------------------------------------------------- tokens


def test_each_token_has_its_caller(tokens):
    callers = Callers.load(tokens)
    assert callers.are_known
    assert callers.identify(f"Bearer {ALICE}") == Caller("alice")
    assert callers.identify(f"bearer {ROOT}") == Caller("root", is_operator=True)
    for wrong in (None, *WRONG):
        with pytest.raises(Unauthenticated):
            callers.identify(wrong)
    assert Callers.load(None).identify(None) is ANYBODY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no token"),
        ("# nobody\n", "no token"),
        ("alice", ":1: expected NAME TOKEN"),
        (f"alice {ALICE} admin", ":1: expected NAME TOKEN"),
        (f"al/ice {ALICE}", "'al/ice'"),
        ("alice short", "5 characters"),
        (f"alice {ALICE}\nbob {ALICE}", ":2: 'bob' or its token is listed twice"),
        (f"alice {ALICE}\nalice {BOB}", ":2: 'alice' or its token is listed twice"),
    ],
)
def test_an_invalid_token_file_is_refused_without_showing_tokens(tmp_path, text, said):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Callers.load(path)
    assert ALICE not in str(error.value)


def test_callers_cannot_name_each_others_requests_or_prompts():
    alice, bob = Caller("alice"), Caller("bob")
    assert len({alice.key("r"), bob.key("r"), ANYBODY.key("r")}) == 3
    salts = {who.salt(salt) for who in (alice, bob) for salt in (None, "", "x", "bob/")}
    assert len(salts) == 6  # no salt and an empty one, which is refused before, are the same
    assert ANYBODY.salt("x") == "x"


async def all_calls(server, metadata):
    """Every kind of call, with the code it ends with."""
    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    calls = [
        server.inference.Generate(request(), metadata=metadata),
        collect(server.inference.GenerateStream(request(), metadata=metadata)),
        server.control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=metadata),
        server.control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata),
        server.control.Abort(control_pb2.AbortRequest(request_id="x"), metadata=metadata),
        server.channel.unary_unary("/pilotfish.v1.InferenceService/NoSuchMethod")(b"", metadata=metadata),
        reflection.ServerReflectionInfo(iter([listing]), metadata=metadata).read(),
    ]
    found = await asyncio.gather(*calls, return_exceptions=True)
    return [e.code().name if isinstance(e, grpc.aio.AioRpcError) else "OK" for e in found]


async def test_without_a_token_only_health_answers(tokens):
    async with serving(token_file=tokens, reflection=True) as server:
        for wrong in WRONG:
            metadata = [("authorization", wrong)] if wrong else None
            assert set(await all_calls(server, metadata)) == {"UNAUTHENTICATED"}
        twice = (*bearer(ALICE), *bearer(BOB))
        assert set(await all_calls(server, twice)) == {"UNAUTHENTICATED"}
        assert not server.engine.requests
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = await reflection.ServerReflectionInfo(iter([listing]), metadata=bearer(ALICE)).read()
        assert set(SERVICES) <= {service.name for service in listed.list_services_response.service}
        found = await all_calls(server, bearer(ALICE))
        assert found == ["OK", "OK", "OK", "OK", "NOT_FOUND", "UNIMPLEMENTED", "OK"]


async def test_over_http_too(tokens):
    paths = ["/metrics", "/v1/models", "/docs", "/openapi.json", "/nothing", "/health/", "//health", "/HEALTH"]
    async with serving(token_file=tokens) as server, http_client(server) as http:
        for wrong in map(str.strip, WRONG):
            headers = {"Authorization": wrong.encode()} if wrong else {}
            answers = [await http.get(f"{http.base_url}{path}", headers=headers) for path in paths]
            answers += [
                await http.post(path, headers=headers, json={"prompt": "a"})
                for path in ("/generate", "/v1/completions", "/v1/chat/completions")
            ]
            assert {answer.status_code for answer in answers} == {401}
            assert answers[0].headers["www-authenticate"] == "Bearer"
            assert answers[0].json()["error"]["type"] == "authentication_error"
        assert (await http.get("/health")).status_code == 200
        mine = {"Authorization": f"Bearer {ALICE}"}
        assert (await http.get("/metrics", headers=mine)).status_code == 200
        assert (await http.post("/generate", headers=mine, json={"prompt": "a"})).status_code == 200


async def test_callers_have_ids_and_aborts_of_their_own(tokens):
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine, token_file=tokens) as server:
        asked = request(request_id="same", stopping=LONG)
        calls = {}
        for token in (ALICE, BOB):
            calls[token] = server.inference.GenerateStream(asked, metadata=bearer(token))
            assert (await calls[token].read()).request_id == "same"
        error = await error_of(server.inference.Generate(request(request_id="same"), metadata=bearer(ALICE)))
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        assert "'same'" in error.details()
        one = control_pb2.AbortRequest(request_id="same")
        await server.control.Abort(one, metadata=bearer(ALICE))
        (end,) = await read_to_end(calls[ALICE])
        assert end.finish_reason == pb.FINISH_REASON_ABORTED
        assert len(server.app.driver.live()) == 1
        everybody = control_pb2.AbortRequest(all=True)
        error = await error_of(server.control.Abort(everybody, metadata=bearer(ALICE)))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert (await server.control.Abort(everybody, metadata=bearer(ROOT))).aborted_requests == 1
        (end,) = await read_to_end(calls[BOB])
        assert end.finish_reason == pb.FINISH_REASON_ABORTED
        salts = {asked.cache_salt for asked in engine.requests}
        assert len(salts) == 2
        assert None not in salts


# ---------------------------------------------------------------------------------------------------------- quotas


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def __call__(self):
        return self.now


def test_requests_per_second_are_limited_by_caller():
    clock = Clock()
    quotas = Quotas(None, 4.0, clock)
    alice, bob = Caller("alice"), Caller("bob")
    for _ in range(4):
        quotas.enter(alice)
    with pytest.raises(QuotaExceeded) as error:
        quotas.enter(alice)
    assert error.value.retry_seconds == pytest.approx(0.25)
    quotas.enter(bob)
    clock.now += error.value.retry_seconds
    quotas.enter(alice)
    begun = 0
    for _ in range(1000):
        clock.now += 0.01
        try:
            quotas.enter(alice)()
            begun += 1
        except QuotaExceeded:
            continue
    assert begun == pytest.approx(40, abs=1)


def test_leaving_counts_once():
    quotas = Quotas(1, None, Clock())
    leave = quotas.enter(Caller("alice"))
    with pytest.raises(QuotaExceeded, match="has 1 live requests; the limit is 1"):
        quotas.enter(Caller("alice"))
    leave()
    leave()
    quotas.enter(Caller("alice"))
    with pytest.raises(QuotaExceeded):
        quotas.enter(Caller("alice"))
    for _ in range(3):
        quotas.enter(ANYBODY)


def test_a_request_counts_as_its_outputs():
    clock, alice = Clock(), Caller("alice")
    live, rate = Quotas(16, None, clock), Quotas(None, 4.0, clock)
    leave = live.enter(alice, 12)
    for n in (5, 64):
        with pytest.raises(QuotaExceeded, match=f"has 12 live requests and requests {n} outputs; the limit is 16"):
            live.enter(alice, n)
    live.enter(alice, 4)
    leave()
    live.enter(alice, 12)
    begun = 0
    for _ in range(1000):
        clock.now += 0.1
        with contextlib.suppress(QuotaExceeded):
            rate.enter(alice, 16)()
            begun += 16
    assert begun == pytest.approx(400, abs=16)


async def test_a_quota_is_not_gone_around_by_n(tokens):
    async with serving(token_file=tokens, max_requests_per_token=3) as server:
        error = await error_of(server.inference.Generate(request(sampling={"n": 4}), metadata=bearer(ALICE)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await server.inference.Generate(request(sampling={"n": 3}), metadata=bearer(ALICE))).outputs
        wrong = await error_of(server.inference.Generate(request(sampling={"n": 10**6}), metadata=bearer(ALICE)))
        assert wrong.code() == grpc.StatusCode.INVALID_ARGUMENT


HOSTS = {
    "127.0.0.1": "127.0.0.1/32",
    "::ffff:10.0.0.9": "10.0.0.9/32",
    "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64",
    "fe80::1%eth0": "fe80::/64",
    "unix": "",
    None: "",
}


@pytest.mark.parametrize("host", HOSTS)
def test_without_tokens_a_caller_shares_with_all_of_its_network(host):
    caller = Callers().of_metadata(None, host)
    assert (caller.share, caller.name, caller.is_operator) == (HOSTS[host], "", True)
    assert caller.salt("x") == "x"
    peers = {"ipv4:127.0.0.1:5": "127.0.0.1", "ipv6:%5B::1%5D:5": "::1", "unix:/tmp/x": None, "unix:": None}
    assert {peer: host_of(peer) for peer in peers} == peers
    with_token = Caller("alice", network="10.0.0.1/32")
    assert with_token.share == "alice"


async def test_live_requests_are_limited_by_caller(tokens):
    engine = FakeEngine()
    engine.gate.clear()
    async with serving(engine, token_file=tokens, max_requests_per_token=2) as server:
        running = [server.inference.GenerateStream(request(), metadata=bearer(ALICE)) for _ in range(2)]
        await until(lambda: len(server.app.driver.live()) == 2)
        async with http_client(server) as http:
            mine = {"Authorization": f"Bearer {ALICE}"}
            answer = await http.post("/generate", headers=mine, json={"prompt": "a"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "quota"
        error = await error_of(server.inference.Generate(request(), metadata=bearer(ALICE)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
        assert metric(server, "admission_rejected_total", reason="quota") == 2
        other = asyncio.ensure_future(collect(server.inference.GenerateStream(request(), metadata=bearer(BOB))))
        await until(lambda: len(server.app.driver.live()) == 3)
        running.pop().cancel()
        engine.gate.set()  # from here on the other two may end as well, at any moment
        await until(lambda: len(server.app.driver.live()) < 3)
        await asyncio.gather(other, collect(running[0]))
        for _ in range(5):  # each place is free again, whatever became of the request: done, refused or left
            await server.inference.Generate(request(), metadata=bearer(ALICE))
            await error_of(server.inference.Generate(pb.GenerateRequest(prompt=""), metadata=bearer(ALICE)))


# ------------------------------------------------------------------------------------------------------------- TLS


async def generate_over(server, credentials):
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.app.grpc_port}", credentials) as channel:
        stub = generation_pb2_grpc.InferenceServiceStub(channel)
        return await stub.Generate(request(), timeout=10)


async def get_health(server, context):
    async with httpx.AsyncClient(verify=context, base_url=f"https://127.0.0.1:{server.app.http_port}") as http:
        return (await http.get("/health")).status_code


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_over_both_doors(papers, mutual):
    """Where it is mutual, who has no certificate of the authority is not heard."""
    options = {"tls_client_ca": papers.authority} if mutual else {}
    authority, pair = papers.authority.read_bytes(), ()
    context = ssl.create_default_context(cafile=papers.authority)
    async with serving(tls_cert=papers.server_cert, tls_key=papers.server_key, **options) as server:
        await error_of(server.inference.Generate(request(), timeout=10))  # in the clear
        with pytest.raises(httpx.HTTPError):
            await get_health(server, context if mutual else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        if mutual:
            error = await error_of(generate_over(server, grpc.ssl_channel_credentials(authority)))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            pair = papers.client_key.read_bytes(), papers.client_cert.read_bytes()
            context.load_cert_chain(papers.client_cert, papers.client_key)
        assert (await generate_over(server, grpc.ssl_channel_credentials(authority, *pair))).outputs
        assert await get_health(server, context) == 200


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("host", "has_tokens", "warned"),
    [("0.0.0.0", False, "without authentication"), ("0.0.0.0", True, "without TLS"), ("127.0.0.1", False, None)],
)
async def test_being_reachable_and_open_is_warned_of(host, has_tokens, warned, caplog, tokens):
    async with serving(host=host, token_file=tokens if has_tokens else None):
        found = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == (warned is not None)
    assert all(warned in message for message in found)
