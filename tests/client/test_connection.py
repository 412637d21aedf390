"""Tokens, retries and several servers, over real wires."""

from __future__ import annotations

import time

import pytest

from pilotfish import client
from pilotfish.client.connection import Retry, Tls
from tests.client import fake_server
from tests.client.blocking import blocking
from tests.client.fake_server import CLOSING, full


def test_the_token_goes_with_every_call(kind, fake):
    with blocking(kind, fake.address, token="a-token") as connection:
        connection.generate("x")
        list(connection.stream("x"))
        connection.load()
        connection.tokenize("x")
    assert [metadata["authorization"] for metadata in fake.metadata] == ["Bearer a-token"] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusals", [[full(0.01)] * 2, [CLOSING]], ids=["a full queue", "a closing door"])
def test_a_call_that_finds_no_room_is_made_again(fake, refusals, stream):
    fake.refusals = list(refusals)
    with client.Client(fake.address, retry=Retry(first_pause=0.01)) as connection:
        assert list(connection.stream("x")) if stream else connection.generate("x")
    assert len(fake.requests) == len(refusals) + 1


# Pauses of one's own that no test would survive, or that are over at once: it is the server's word that counts.
@pytest.mark.parametrize(("own", "told"), [(1000.0, 0.01), (0.001, 0.2)])
def test_a_server_that_says_when_to_come_again_is_obeyed(kind, fake, own, told):
    fake.refusals = [full(told)] * 2
    with blocking(kind, fake.address, retry=Retry(first_pause=own, longest_pause=own)) as connection:
        began = time.monotonic()
        assert list(connection.stream("x", deadline=60))
    assert time.monotonic() - began >= 2 * told


@pytest.mark.parametrize(
    ("retry", "calls"), [(Retry(attempts=3, first_pause=0.01), 3), (Retry(attempts=1), 1), (None, 1)]
)
def test_retries_have_an_end_and_the_error_says_when_to_come_again(fake, retry, calls):
    fake.refusals = [full(0.25)] * 9
    with client.Client(fake.address, retry=retry) as connection, pytest.raises(client.QueueFullError) as error:
        connection.generate("x")
    assert error.value.retry_seconds == 0.25
    assert len(fake.requests) == calls


def test_several_servers_take_turns_and_one_that_is_gone_costs_no_call():
    with fake_server.running() as one:
        with fake_server.running() as two:
            connection = client.Client([one.address, two.address])
            end = time.monotonic() + 10
            while not (one.requests and two.requests):  # the second connection may come a moment later
                connection.generate("x")
                assert time.monotonic() < end
            one.requests.clear()
            two.requests.clear()
            for _ in range(10):
                connection.generate("x")
            assert len(one.requests) == len(two.requests) == 5
        with connection:
            for _ in range(10):
                assert connection.generate("x")
        assert len(one.requests) == 15


def test_files_of_tls_that_are_not_there_are_said_plainly(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        client.Client("localhost:1", tls=Tls(authority=tmp_path / "none.pem"))
