"""K/V events: a router that hears them knows what the prefix cache holds, and for whom."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from hypothesis import settings
from hypothesis.stateful import invariant

from pilotfish.engine.stats import CacheChange
from pilotfish.server.telemetry.kv_events import CachedBlocks, ZmqKvEvents
from tests.engine.kv.test_pages import PAGE, Arena
from tests.engine.text.test_codec import VOCAB_SIZE
from tests.fakes import fake_engine
from tests.server.fake_engine import served
from tests.server.test_life import metric
from tests.server.worker.test_engine_process import apart
from tests.serving import http_client, serving, until

TOPIC = "kv@pod@pilotfish-embedded"
TEXT = "def double(values):\n    return [2 * value for value in values]\n\n\n" * 6
PAGE_SIZE = 32
SECONDS = 30  # to wait for what has to come


class Router:
    """Reads events as llm-d's router does: by position, with hashes that mean nothing to it but who follows whom."""

    def __init__(self):
        self.blocks = {}  # hash -> the salt and all tokens up to the end of the page
        self.numbers = []

    def hear(self, number, payload):
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self.numbers.append(number)
        for event in events:
            self.apply(*event)

    def apply(self, tag, *fields):
        if tag == "AllBlocksCleared":
            self.blocks = {}
        elif tag == "BlockRemoved":
            for name in fields[0]:
                del self.blocks[name]
        else:
            assert tag == "BlockStored"
            (name,), parent, tokens, size, lora, medium, *others = fields
            assert (lora, medium, len(tokens)) == (None, "GPU", size)
            salt, before = self.blocks[parent] if parent is not None else (None, ())
            if others:
                assert parent is None, "only the beginning has the salt"
                _, ((salt,),) = others
            assert name not in self.blocks
            self.blocks[name] = (salt, (*before, *tokens))

    def num_known(self, tokens, salt=None):
        """Tokens of a prompt for which the server has keys and values; its newest token is always fed."""
        known = set(self.blocks.values())
        size = min((len(text) for _, text in known), default=len(tokens))
        ends = range(size, len(tokens), size)
        return next((end - size for end in ends if (salt, tuple(tokens[:end])) not in known), len(ends) * size)


class Told(Arena):
    """What a router hears of the changes is what can be found in the pool, whatever is entered and removed."""

    def __init__(self):
        super().__init__()
        self.blocks, self.router = CachedBlocks("m"), Router()

    def heard(self, change):
        super().heard(change)
        event = self.blocks.apply(change._replace(salt=[change.salt, 0] if change.before is None else None))
        if event is not None:
            self.router.apply(*msgspec.msgpack.decode(event))

    @invariant()
    def the_router_knows_what_can_be_found(self):
        self.changes_tell_what_is_cached()
        found = set()
        for salt in (None, "a", "b"):
            beginnings = [()]
            while beginnings:
                text = beginnings.pop()
                for page in ((a, b) for a in (0, 1) for b in (0, 1)):
                    longer = (*text, *page)
                    if len(self.pool.find([*longer, 9], salt)) * PAGE == len(longer):
                        found.add((salt, longer))
                        beginnings.append(longer)
        assert set(self.router.blocks.values()) == found
        assert len(self.router.blocks) == len(found) == len(self.blocks)


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=10)


def entered(number, before=None, salt=None, tokens=(1, 2)):
    return CacheChange(number, before, None if before is not None else (salt, 0), tokens)


def name_of(blocks, *changes):
    *_, event = [blocks.apply(change) for change in changes]
    return msgspec.msgpack.decode(event)[1][0]


def test_a_name_is_the_same_on_every_server_of_a_model_and_covers_salt_adapter_and_beginning():
    """Of another adapter, of the same name with other weights, and of none: a router must not take one for another."""
    of_adapters = [
        CacheChange(0, None, (None, 0, adapter), (1, 2)) for adapter in (("a", "f1"), ("a", "f2"), ("b", "f1"))
    ]
    texts = {
        "plain": [entered(0)],
        "salted": [entered(0, salt="a")],
        "otherwise salted": [entered(0, salt="b")],
        "the long rotary table": [CacheChange(0, None, (None, 1), (1, 2))],
        "other tokens": [entered(0, tokens=(1, 3))],
        "second": [entered(0), entered(1, 0)],
        "second of the salted": [entered(0, salt="a"), entered(1, 0)],
        **{f"{change.salt}": [change] for change in of_adapters},
        **{f"second of {change.salt}": [change, entered(1, 0)] for change in of_adapters},
    }
    names = {text: name_of(CachedBlocks("m"), *changes) for text, changes in texts.items()}
    assert len(set(names.values())) == len(texts)
    renumbered = [entered(70), entered(71, 70)]
    assert name_of(CachedBlocks("m"), *renumbered) == names["second"]
    assert name_of(CachedBlocks("other"), *renumbered) != names["second"]
    over_the_wire = [change._replace(salt=change.salt and list(change.salt)) for change in texts["salted"]]
    assert name_of(CachedBlocks("m"), *over_the_wire) == names["salted"]
    assert all(0 <= name < 1 << 64 for name in names.values())
    blocks = CachedBlocks("m")
    told = [msgspec.msgpack.decode(blocks.apply(change))[7:] for change in (of_adapters[0], entered(1, 0))]
    assert told == [["a", None]] * 2, "the adapter"


# ------------------------------------------------------------------------------------------------- over ZeroMQ


@asynccontextmanager
async def listening(events, endpoint, replays):
    """A socket that hears the events from now on, and one that asks for earlier ones."""
    context = zmq.asyncio.Context()
    reader, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    reader.subscribe(b"kv@")
    reader.connect(endpoint)
    asking.connect(replays)
    try:
        async with asyncio.timeout(SECONDS):
            while not await reader.poll(20):
                events.clear()  # nothing is cached yet; it is heard once the subscription has arrived
        yield reader, asking
    finally:
        context.destroy(linger=0)


async def hear(reader, router):
    """Let the router hear the next batch."""
    async with asyncio.timeout(SECONDS):
        topic, number, payload = await reader.recv_multipart()
    assert topic == TOPIC.encode()
    router.hear(int.from_bytes(number, "big"), payload)


async def hear_until(condition, reader, router):
    while not condition():
        await hear(reader, router)


async def hear_of(tokens, reader, router, salt=None):
    """Let the router hear until it knows all pages of a prompt that can be found."""
    await hear_until(
        lambda: router.num_known(tokens, salt) >= (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE, reader, router
    )


async def replay(asking, router, first=0):
    """Let the router hear the log from this number on."""
    await asking.send_multipart((b"", first.to_bytes(8, "big")))
    async with asyncio.timeout(SECONDS):
        while True:
            delimiter, topic, number, payload = await asking.recv_multipart()
            assert delimiter == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            assert topic == TOPIC.encode()
            router.hear(int.from_bytes(number, "big"), payload)


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"


@asynccontextmanager
async def publishing(endpoints, **options):
    """A publisher that answers who asks for the log."""
    events = ZmqKvEvents(*endpoints, TOPIC, "m", **options)
    answering = asyncio.create_task(events.answer_replays())
    try:
        yield events
    finally:
        answering.cancel()
        await asyncio.wait([answering])
        events.close()


async def test_a_router_that_comes_late_asks_for_the_log(endpoints):
    async with publishing(endpoints) as events, listening(events, *endpoints) as (reader, asking):
        for wrong in ((b"",), (b"", b"1"), (b"", b"12345678", b""), (b"12345678",)):
            await asking.send_multipart(wrong)  # is not answered and does no harm
        router = Router()
        await replay(asking, router)
        begun = router.numbers[-1] + 1
        assert router.numbers == list(range(begun)), "the first batch clears what was known of an earlier server"
        events.publish([entered(0), entered(1, 0), entered(2, salt="a")])
        events.publish([])
        events.publish([CacheChange(1)])
        await replay(asking, router, first=begun)
        assert router.numbers == list(range(begun + 2)), "nothing to tell is no batch"
        assert sorted(router.blocks.values(), key=str) == [("a", (1, 2)), (None, (1, 2))]
        nothing = Router()
        await replay(asking, nothing, first=begun + 2)
        assert not nothing.numbers
        events.publish([entered(3, 0)])
        heard, late = Router(), Router()
        await hear_until(lambda: begun + 2 in heard.numbers, reader, heard)
        await replay(asking, late)
        assert late.blocks == heard.blocks
        assert (None, (1, 2, 1, 2)) in heard.blocks.values()


async def test_a_long_log_begins_anew_with_all_that_is_cached(endpoints):
    async with publishing(endpoints, max_events=60) as events, listening(events, *endpoints) as (reader, asking):
        for number in range(100):
            events.publish([entered(number, tokens=(number, 0)), *([CacheChange(number - 3)] if number > 2 else [])])
        router, late = Router(), Router()
        await hear_until(lambda: (None, (99, 0)) in router.blocks.values(), reader, router)
        await replay(asking, late)
        assert late.numbers == list(range(len(late.numbers)))
        assert router.numbers.count(0) > 1
        assert len(late.numbers) < 60
        assert late.blocks == router.blocks
        assert {tokens for _, tokens in late.blocks.values()} == {(97, 0), (98, 0), (99, 0)}


def test_what_cannot_be_listened_on_is_named(tmp_path):
    taken = f"ipc://{tmp_path}/no/such/folder"
    with pytest.raises(OSError, match=r"cannot listen on kv_events_endpoint 'ipc://.*/no/such/folder'"):
        ZmqKvEvents(taken, None, TOPIC, "m")
    with pytest.raises(OSError, match="cannot listen on kv_events_replay_endpoint 'nonsense'"):
        ZmqKvEvents(f"ipc://{tmp_path}/events", "nonsense", TOPIC, "m")


# -------------------------------------------------------------------------------------------------- of a server


async def complete(http, prompt, **fields):
    """The tokens that a router is told of the prompt, and how many of them the server had cached."""
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}
    [rendered] = (await http.post("/v1/completions/render", json=body)).json()
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == len(rendered["token_ids"])
    return rendered["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


def table_model(*_):
    """A whole engine with a prefix cache, which repeats one token."""
    logits = torch.zeros(VOCAB_SIZE)
    logits[5] = 9.0
    return served(fake_engine(lambda _: logits, vocab_size=VOCAB_SIZE, max_model_len=1024, page_size=PAGE_SIZE))


on_a_thread = partial(serving, load=table_model)


@asynccontextmanager
async def hearing_server(endpoints, start):
    """A server, its HTTP client, and who hears its events."""
    events, replays = endpoints
    names = {"kv_events_endpoint": events, "kv_events_replay_endpoint": replays, "kv_events_topic": TOPIC}
    async with (
        start(**names) as server,
        http_client(server) as http,
        listening(server.app.kv_events, *endpoints) as (reader, asking),
    ):
        yield server, http, reader, asking


async def test_a_router_predicts_cached_tokens(endpoints):
    async with hearing_server(endpoints, on_a_thread) as (_, http, reader, _):
        router = Router()
        asked = [(TEXT, None), (TEXT, "a"), (TEXT[: len(TEXT) // 2], None), (TEXT + "x = 1", "a"), (TEXT, "b")]
        for prompt, salt in asked:
            [rendered] = (await http.post("/v1/completions/render", json={"prompt": prompt})).json()
            expected = router.num_known(rendered["token_ids"], salt)
            tokens, cached = await complete(http, prompt, cache_salt=salt)
            assert cached == expected, (prompt, salt)
            await hear_of(tokens, reader, router, salt)
        assert expected == 0, "nobody has had this salt"
        assert {salt for salt, _ in router.blocks.values()} == {None, "a", "b"}


async def test_with_the_engines_process_all_that_was_cached_is_gone(endpoints):
    async with hearing_server(endpoints, apart) as (server, http, reader, asking):
        router = Router()
        await complete(http, TEXT)
        await hear_until(lambda: router.blocks, reader, router)
        server.kill()
        await hear_until(lambda: not router.blocks, reader, router)
        await until(lambda: metric(server, "engine_restarts_total") == 1)
        await complete(http, TEXT)
        await hear_until(lambda: router.blocks, reader, router)
        late = Router()
        await replay(asking, late)
        await hear_until(lambda: late.numbers[-1] <= router.numbers[-1], reader, router)
        assert late.blocks == router.blocks


async def test_a_recovered_engine_publishes_its_cache_again(endpoints):
    async with hearing_server(endpoints, on_a_thread) as (server, http, reader, _):
        router = Router()
        await complete(http, TEXT)
        await hear_until(lambda: router.blocks, reader, router)
        engine = server.app.host.engine
        step = engine.step

        def fails_once():
            engine.step = step
            raise RuntimeError("the step failed")

        engine.step = fails_once
        await complete(http, "x = ")
        await hear_until(lambda: not router.blocks, reader, router)
        [rendered] = (await http.post("/v1/completions/render", json={"prompt": TEXT})).json()
        await hear_of(rendered["token_ids"], reader, router)
        assert (await complete(http, TEXT))[1] == router.num_known(rendered["token_ids"]) > 0
