"""Tokens, retries and several servers, over real wires."""

from __future__ import annotations

import time

import pytest

import client
from client.connection import Connection, Retry, Tls
from tests.client import fake_server


def test_the_token_goes_with_every_call(fake):
    with client.Client(fake.address, token="a-token") as connection:
        connection.generate("x")
        list(connection.stream("x"))
        connection.load()
        connection.tokenize("x")
    assert [metadata["authorization"] for metadata in fake.metadata] == ["Bearer a-token"] * 4


async def test_the_async_client_has_one_too(fake):
    async with client.AsyncClient(fake.address, token="a-token") as connection:
        await connection.generate("x")
        assert [event async for event in connection.stream("x")]
        await connection.load()
    assert [metadata["authorization"] for metadata in fake.metadata] == ["Bearer a-token"] * 3


def test_no_token_is_no_metadata(fake):
    with client.Client(fake.address) as connection:
        connection.generate("x")
    assert "authorization" not in fake.metadata[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_tried_again(fake, stream):
    fake.refusals = [fake_server.full(0.01)] * 2
    with client.Client(fake.address, retry=Retry(first_pause=0.01)) as connection:
        assert list(connection.stream("x")) if stream else connection.generate("x")
    assert len(fake.requests) == 3


# Pauses of one's own that no test would survive, or that are over at once: it is the server's word that counts.
@pytest.mark.parametrize(("own", "told"), [(1000.0, 0.01), (0.001, 0.5)])
def test_a_server_that_says_when_to_come_again_is_obeyed(fake, own, told):
    fake.refusals = [fake_server.full(told)] * 2
    with client.Client(fake.address, retry=Retry(first_pause=own, longest_pause=own)) as connection:
        began = time.monotonic()
        assert connection.generate("x", deadline=60)
    assert time.monotonic() - began >= 2 * told


@pytest.mark.parametrize(("own", "told"), [(1000.0, 0.01), (0.001, 0.5)])
async def test_the_async_client_obeys_it_too(fake, own, told):
    fake.refusals = [fake_server.full(told)] * 2
    async with client.AsyncClient(fake.address, retry=Retry(first_pause=own, longest_pause=own)) as connection:
        began = time.monotonic()
        assert [event async for event in connection.stream("x", deadline=60)]
    assert time.monotonic() - began >= 2 * told


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_meets_a_closing_door_is_tried_again(fake, stream):
    fake.refusals = [fake_server.closing()]
    with client.Client(fake.address, retry=Retry(first_pause=0.01)) as connection:
        assert list(connection.stream("x")) if stream else connection.generate("x")
    assert len(fake.requests) == 2


def test_retries_have_an_end_and_the_error_says_when_to_come_again(fake):
    fake.refusals = [fake_server.full(2.5)] * 9
    with client.Client(fake.address, retry=Retry(attempts=3, first_pause=0.01)) as connection:
        with pytest.raises(client.QueueFullError) as error:
            connection.generate("x")
        assert error.value.retry_seconds == 2.5
    assert len(fake.requests) == 3


def test_a_single_attempt_is_one(fake):
    fake.refusals = [fake_server.full(0.01)] * 9
    with client.Client(fake.address, retry=Retry(attempts=1)) as connection, pytest.raises(client.QueueFullError):
        connection.generate("x")
    assert len(fake.requests) == 1


def test_retry_none_tries_once(fake):
    fake.refusals = [fake_server.full(0.01)]
    with client.Client(fake.address, retry=None) as connection:
        with pytest.raises(client.QueueFullError):
            connection.generate("x")
        assert connection.generate("x")


def test_what_is_wrong_is_not_tried_again(fake):
    fake.refusals = [fake_server.invalid(prompt="is empty")]
    with client.Client(fake.address) as connection, pytest.raises(client.InvalidRequestError) as error:
        connection.generate("")
    assert error.value.retry_seconds is None
    assert len(fake.requests) == 1


def test_several_servers_take_turns():
    with fake_server.running() as one, fake_server.running() as two:
        with client.Client([one.address, two.address]) as connection:
            end = time.monotonic() + 10
            while not (one.requests and two.requests):  # the second connection may come a moment later
                connection.generate("x")
                assert time.monotonic() < end
            one.requests.clear()
            two.requests.clear()
            for _ in range(10):
                connection.generate("x")
        assert len(one.requests) == len(two.requests) == 5


def test_a_server_that_is_gone_costs_no_call():
    with fake_server.running() as one:
        with fake_server.running() as two:
            connection = client.Client([one.address, two.address])
            connection.generate("x")
        with connection:
            for _ in range(10):
                assert connection.generate("x")
        assert len(one.requests) >= 10


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("host:1", "host:1"),
        ("dns:///host:1", "dns:///host:1"),
        (["1.2.3.4:1", "5.6.7.8:2"], "ipv4:1.2.3.4:1,5.6.7.8:2"),
    ],
)
def test_addresses_as_grpc_has_them(address, target):
    assert Connection(address=address).target == target


def test_files_of_tls_that_are_not_there_are_said_plainly(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        client.Client("localhost:1", tls=Tls(authority=tmp_path / "none.pem"))
