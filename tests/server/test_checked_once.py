"""A request is checked once on its way from a front end to the end of its output, in whichever process."""

from __future__ import annotations

from collections import Counter

import pytest

from pilotfish.engine.request import intake
from pilotfish.engine.request.intake import Intake
from pilotfish.v1 import generation_pb2 as pb
from tests.serving import http_client, serving_embedded


@pytest.fixture
def checks(monkeypatch):
    counted = Counter()
    right = intake.violations

    def counting(request, *bounds):
        counted[request.request_id] += 1
        return right(request, *bounds)

    monkeypatch.setattr(intake, "violations", counting)
    return counted


async def test_over_grpc_and_http(checks):
    async with serving_embedded() as server, http_client(server) as http:
        asked = pb.GenerateRequest(prompt="def f(", request_id="mine", stopping=pb.StoppingParams(max_tokens=4))
        await server.inference.Generate(asked)
        assert checks == {"mine": 1}
        body = {"prompt": "def f(", "max_tokens": 4, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert sorted(checks.values()) == [1, 1]


def test_nothing_else_checks_requests():
    """All that `check` finds is found by `violations`, which is counted above."""
    assert "violations" in Intake.check.__code__.co_names
