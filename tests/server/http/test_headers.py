"""Headers of a request: the type of its body, and its id."""

from __future__ import annotations

import json
import logging

import pytest

from tests.server.http.interfaces import INTERFACES, on_the_shared_server, talking
from tests.server.test_security import ALICE
from tests.serving import until

pytestmark = on_the_shared_server
BODY = json.dumps({"prompt": "ab", "max_new_tokens": 2})
FORM = "application/x-www-form-urlencoded"
WORSE = ["text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=x", "nonsense", "(" * 9000, "json"]


def sending(server, kind: str | None, **headers: str):
    """A body of this type, with exactly these headers."""
    given = headers if kind is None else {"content-type": kind, **headers}
    return server.http.post("/generate", content=BODY, headers=given)


@pytest.mark.parametrize(
    "kind", [None, "", FORM, f"{FORM}; charset=utf-8", "application/json; charset=utf-8", "application/vnd.api+json"]
)
async def test_a_body_of_json_needs_no_type(server, kind):
    assert (await sending(server, kind)).json()["completion_tokens"] == 2


async def test_a_body_that_is_no_json_is_refused_whatever_its_type(server):
    for kind in (None, FORM, "application/json"):
        headers = {} if kind is None else {"content-type": kind}
        answer = await server.http.post("/generate", content=b"prompt=ab", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("body is not valid JSON")


@pytest.mark.parametrize("kind", WORSE)
async def test_another_type_is_named(server, kind):
    answer = await sending(server, kind)
    assert answer.status_code == 415
    message = answer.json()["error"]["message"]
    assert message.startswith(f"the header Content-Type is '{kind[:30]}")
    assert message.endswith("expected application/json")
    assert len(message) < 300


@pytest.mark.parametrize("kind", [None, "", FORM, *WORSE])
async def test_what_a_page_can_send_to_another_site_without_asking_is_refused(server, kind):
    answer = await sending(server, kind, origin="http://elsewhere.example")
    assert answer.status_code == 415
    assert "expected application/json" in answer.json()["error"]["message"]
    assert not server.engine.requests
    assert (await sending(server, "application/json", origin="http://elsewhere.example")).status_code == 200


async def test_an_answer_has_the_id_that_its_client_reads(server):
    whole = await server.client.with_raw_response.completions.create(model="fake", prompt="ab", max_tokens=2)
    made = whole.http_response.headers["x-request-id"]
    assert whole.parse()._request_id == made
    assert (whole.parse().id, server.engine.requests[-1].request_id) == (f"cmpl-{made}", made)
    for name, about in INTERFACES.items():
        for fields in ({}, {"stream": True}, {"temperature": "hot"}, {"model": "other"}):
            for given in (None, "a-1:b.c_=+", "~" * 128):
                headers = {} if given is None else {"X-Request-Id": given}
                answer = await server.http.post(about.path, json=about.asking(2) | fields, headers=headers)
                found = answer.headers["x-request-id"]
                assert found == (given or found)
                assert answer.headers.get("request-id") == (found if name == "messages" else None)
                if answer.status_code == 200:
                    own = server.engine.requests[-1].request_id
                    assert own == found if given is None else own.startswith(f"{given}-")
                elif name == "messages":
                    assert answer.json()["request_id"] == found
    ids = {(await server.http.get(path)).headers["x-request-id"] for path in ("/health", "/v1/models", "/nowhere")}
    assert len(ids) == 3


async def test_requests_of_one_id_do_not_meet(server):
    body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
    for _ in range(2):
        answer = await server.http.post("/v1/completions", json=body, headers={"x-request-id": "same"})
        assert answer.json()["id"].startswith("cmpl-same-")
    found = [request.request_id for request in server.engine.requests]
    assert len(set(found)) == 6
    assert all(own.startswith("same-") for own in found)


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "alice/a", "é", "a\tb"])
async def test_an_id_that_cannot_be_used_is_refused(server, given):
    answer = await server.http.post("/generate", content=BODY, headers={"x-request-id": given.encode()})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the header X-Request-Id is ")
    assert answer.headers["x-request-id"] != given


async def test_the_log_names_the_id_and_a_refused_caller_gets_one(caplog, tokens):
    caplog.set_level(logging.INFO)
    async with talking(token_file=tokens) as server:
        asked = INTERFACES["generate"].asking(3000, stream=True)
        assert (await server.http.post("/generate", json=asked)).headers["x-request-id"]
        headers = {"authorization": f"Bearer {ALICE}", "x-request-id": "find-me"}
        async with server.http.stream("POST", "/generate", json=asked, headers=headers) as answer:
            assert answer.headers["x-request-id"] == "find-me"
            await anext(answer.aiter_raw())
        await until(lambda: any("alice/find-me-" in line for line in caplog.messages))
