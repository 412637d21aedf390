"""`reproducible`: the logits behind every token of a request have the same bits, whatever else happens.

Stronger than equal tokens: each test compares the bits of every row of logits that decided a token.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch

from engine import engine as engine_module
from engine import sampling
from engine.batch import Feed
from engine.build import assemble, build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.noise import Stream
from engine.proposers.scripted import ScriptedProposer
from engine.runner import kv_layout
from engine.sampling import Row, RowParams
from engine.text import Codec
from engine.types import Request, SamplingParams, Sequence
from models import corpus, embedded_draft, embedded_target
from tests import fakes, zoo

FAMILIES = ["llama", "gpt2", "opt", "qwen3", "gemma2"]
DTYPES = [torch.float32, torch.bfloat16]
BATCH, NEW_TOKENS = 32, 12
WATCHED = (0, 5, 13, 31)  # requests that are held against themselves alone
LAWS = (
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=NEW_TOKENS, ignore_eos=True),
)

Bits = dict[tuple[str, int], bytes]  # (request, position) -> digest of the logits that decided the token there


@contextmanager
def watching() -> Iterator[Bits]:
    """Collect the bits of every row of logits that a token rests on."""
    seen: Bits = {}
    judge = engine_module.judge

    def watched(fed: list, logits: torch.Tensor, *others: object) -> list:
        outcomes = judge(fed, logits, *others)
        first = 0
        for f, outcome in zip(fed, outcomes, strict=True):
            for i in range(outcome.num_accepted + 1):
                row = logits[first + i].numpy().tobytes()
                seen[f.sequence.request_id, len(f.sequence.tokens) + i] = hashlib.sha256(row).digest()
            first += f.num_rows
        return outcomes

    engine_module.judge = watched
    try:
        yield seen
    finally:
        engine_module.judge = judge


def bits_of(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[bytes]]]:
    """Tokens and bits of each request; positions beyond its end were never emitted and do not count."""
    with watching() as seen:
        outputs = fakes.run(engine, requests)
    return {
        r.request_id: (tokens, [seen[r.request_id, len(r.token_ids) + i] for i in range(len(tokens))])
        for r in requests
        for tokens in [outputs.tokens[r.request_id]]
    }


def requests() -> list[Request]:
    prompts = enumerate(zoo.prompts(BATCH))
    return [Request(request_id=str(i), token_ids=tuple(p), sampling=LAWS[i % len(LAWS)]) for i, p in prompts]


@lru_cache
def pair(family: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = zoo.reference(family)
    return torch.nn.Module.to(zoo.ours(model), dtype), torch.nn.Module.to(zoo.near(model), dtype)


def engine_of(family: str, dtype: torch.dtype, *, reproducible: bool = True, **config: object) -> Engine:
    options = {"max_batch_size": BATCH, "proposer": "none", **config}
    settings = EngineConfig(target=family, draft="near", reproducible=reproducible, **options)
    scripts = {"right": 0, "wrong": 1}
    return assemble(
        settings,
        *pair(family, dtype),
        extra_proposers={name: ScriptedProposer(_script(family, dtype, off)) for name, off in scripts.items()},
    )


def _script(family: str, dtype: torch.dtype, off: int) -> Callable[[Sequence, int], list[int]]:
    """Drafts for the watched requests that are always right, or off by one."""

    def script(sequence: Sequence, k: int) -> list[int]:
        plain = alone(family, dtype).get(sequence.request_id)
        future = plain[0][sequence.num_generated :][:k] if plain else []
        return [(token + off) % zoo.VOCAB for token in future]

    return script


@lru_cache
def alone(family: str, dtype: torch.dtype) -> dict[str, tuple[list[int], list[bytes]]]:
    """Each watched request by itself, one token at a time."""
    found = {}
    for i in WATCHED:
        found |= bits_of(engine_of(family, dtype), [requests()[i]])
    return found


def watched(bits: dict[str, tuple[list[int], list[bytes]]]) -> dict[str, tuple[list[int], list[bytes]]]:
    return {str(i): bits[str(i)] for i in WATCHED}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_among_31_others(family: str, dtype: torch.dtype) -> None:
    assert watched(bits_of(engine_of(family, dtype), requests())) == alone(family, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("proposer", "num_draft"), [("ngram", 3), ("model", 4), ("right", 8), ("wrong", 5)])
def test_same_bits_whoever_drafts(proposer: str, num_draft: int, family: str, dtype: torch.dtype) -> None:
    engine = engine_of(family, dtype, proposer=proposer, num_draft_tokens=num_draft)
    assert watched(bits_of(engine, requests())) == alone(family, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proposer", ["ngram", "model", "right", "wrong"])
def test_same_bits_for_any_k(proposer: str, dtype: torch.dtype) -> None:
    for num_draft in range(9):
        engine = engine_of("llama", dtype, proposer=proposer, num_draft_tokens=num_draft)
        few = [requests()[i] for i in WATCHED]
        assert bits_of(engine, few) == alone("llama", dtype), f"K={num_draft}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [4, 16, None])
def test_same_bits_in_chunks_and_pages(page_size: int | None, family: str, dtype: torch.dtype) -> None:
    for max_batch_tokens in (4, 7, 37):
        engine = engine_of(
            family,
            dtype,
            page_size=page_size,
            max_batch_size=4,
            max_batch_tokens=max_batch_tokens,
            proposer="ngram",
        )
        assert bits_of(engine, [requests()[i] for i in WATCHED]) == alone(family, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_after_preemption(family: str, dtype: torch.dtype) -> None:
    """Sixteen requests in pages for a few: K/V is dropped and computed again, in other pages."""
    layout = kv_layout(zoo.configs()[family], dtype)
    memory = 26 * 4 * 2 * layout.bytes_per_token / 2**30
    engine = engine_of(family, dtype, page_size=4, kv_memory=memory, proposer="model", num_draft_tokens=3)
    preempted, step = [0], engine.step

    def counted() -> object:
        output = step()
        preempted[0] += output.stats.preempted
        return output

    engine.step = counted
    assert watched(bits_of(engine, requests())) == alone(family, dtype)
    assert preempted[0] > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("threads", [2, 3])
def test_same_bits_on_any_number_of_threads(threads: int, family: str, dtype: torch.dtype) -> None:
    want = alone(family, dtype)
    torch.set_num_threads(threads)
    try:
        few = [requests()[i] for i in WATCHED]
        assert bits_of(engine_of(family, dtype, proposer="model"), few) == want
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_keys_and_values_whoever_computed_them(family: str, dtype: torch.dtype) -> None:
    """What a prefix cache hands on: the K/V that a stranger's pass left is the K/V of one's own."""
    runner = engine_of(family, dtype, page_size=4)._target
    arena, prompt = runner._inner.arena, [(5 * i + 3) % zoo.VOCAB for i in range(20)]
    others = [Feed(zoo.prompts(BATCH)[i], 0, range(20 * i + 20, 20 * i + 40)) for i in range(3)]
    runner.forward([Feed(prompt, 0, [0, 1, 2, 3, 4])])
    runner.forward([*others, Feed([*prompt, 5, 6], 0, [9, 8, 12, 10, 11, 15])])
    theirs = [4 * page + slot for page in (9, 8, 12, 10, 11) for slot in range(4)]
    for layer in (*arena.k, *arena.v):
        assert torch.equal(layer[:20], layer[theirs])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_flag_bits_differ(dtype: torch.dtype) -> None:
    """The flag is what does it: the same comparison fails without."""
    request = requests()[13]
    by_itself = bits_of(engine_of("llama", dtype, reproducible=False), [request])
    company = bits_of(engine_of("llama", dtype, reproducible=False, proposer="model", num_draft_tokens=4), requests())
    assert company["13"][1] != by_itself["13"][1]


def test_the_sampler_gives_a_row_the_same_bits_alone() -> None:
    """Laws, draws and log-probabilities of one row do not depend on the rows beside it."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (97, 2048):
        logits = torch.randn(48, vocab, generator=generator) * 4
        sequences = [
            Sequence(r, seed=i, speculation=None, max_len=99, tokens=[1]) for i, r in enumerate(requests()[:24] * 2)
        ]
        rows = [Row(s, 7 + i, Stream.COUPLED) for i, s in enumerate(sequences)]
        together = _sampled(logits, rows)
        for i in range(48):
            for mine, all_rows in zip(_sampled(logits[i : i + 1], rows[i : i + 1]), together, strict=True):
                assert torch.equal(mine[0], all_rows[i])


def _sampled(logits: torch.Tensor, rows: list[Row]) -> tuple[torch.Tensor, ...]:
    params = RowParams.of(rows, logits.shape[1], logits.device)
    return sampling.choose(logits, params), logits.log_softmax(-1), logits.double().log_softmax(-1)


EMBEDDED = {"target": str(embedded_target()), "draft": str(embedded_draft()), "reproducible": True}


def embedded_requests() -> list[Request]:
    codec = Codec.load(embedded_target())
    texts = enumerate(corpus.held_out_prompts(8))
    return [
        Request(request_id=str(i), token_ids=codec.encode(t)[-10 - 12 * i :], sampling=LAWS[i % 3]) for i, t in texts
    ]


@lru_cache
def embedded_alone(dtype: str) -> dict[str, tuple[list[int], list[bytes]]]:
    found = {}
    for request in embedded_requests()[5:7]:
        found |= bits_of(build_engine(EngineConfig(**EMBEDDED, dtype=dtype, threads=1, proposer="none")), [request])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("proposer", "num_draft"), [("none", 0), ("ngram", 4), ("model", 2), ("model", 8)])
def test_embedded_pair(proposer: str, num_draft: int, dtype: str) -> None:
    config = EngineConfig(**EMBEDDED, dtype=dtype, threads=1, proposer=proposer, num_draft_tokens=num_draft)
    bits = bits_of(build_engine(config), embedded_requests())
    assert {name: bits[name] for name in ("5", "6")} == embedded_alone(dtype)


def digest(threads: int) -> str:
    """One number for the tokens and bits of the embedded pair; the next test asks another process for it."""
    engine = build_engine(
        EngineConfig(**EMBEDDED, threads=threads, page_size=16, max_batch_tokens=64, max_batch_size=8)
    )
    bits = bits_of(engine, embedded_requests()[5:7])
    return hashlib.sha256(repr(sorted(bits.items())).encode()).hexdigest()


def test_same_bits_after_a_restart_with_more_threads() -> None:
    code = "from tests.exactness.test_reproducible import digest; print(digest(2))"
    path = os.pathsep.join(sys.path)
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert other.stdout.split()[-1] == digest(1)
    finally:
        torch.set_num_threads(1)
