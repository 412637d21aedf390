"""`reproducible`: the logits behind every token of a request have the same bits, whatever else happens.

Stronger than equal tokens: the log-probabilities that a request asked for are equal, of the token and of the 20
likeliest. They are float64, and every logit of the row is in their normaliser.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from pilotfish.engine.config import Bounds, EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.sampling import distribution
from pilotfish.engine.sampling.logprobs import token_logprobs
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from pilotfish.engine.sampling.processors import process
from pilotfish.engine.types import Logprob, Request, Sequence
from tests import fakes, heads, zoo
from tests.scripted import ScriptedProposer

# Each family in one type: layers and types are prepared apart from each other.
DTYPES = {"llama": torch.bfloat16, "gpt2": torch.float32, "gemma2": torch.float32, "phi3-longrope": torch.bfloat16}
BATCH, NEW_TOKENS = 32, 8
PROMPTS = zoo.prompts(BATCH)
WATCHED = (0, 5, 14, 31)  # held against themselves alone: 20, 3, 26 and 40 tokens of prompt, and a law each
LAWS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(
        temperature=1.2,
        top_k=20,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={5: 1.5},
    ),
)

Bits = tuple[list[int], list[Logprob]]


def families(fast: str | None, *slow: str) -> pytest.MarkDecorator:
    """The one that `make test` has, and those that are slow."""
    names = [*([fast] if fast else []), *slow]
    cases = [pytest.param(name, DTYPES[name], marks=[] if name == fast else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize(("family", "dtype"), cases, ids=str)


def request(i: int, label: str = "", **speculation: object) -> Request:
    """Number i of 32; the watched ones tell what their tokens rest on."""
    logprobs = Bounds().max_logprobs if i in WATCHED else None
    return Request(
        request_id=f"{i}{label}",
        token_ids=tuple(PROMPTS[i]),
        sampling=replace(LAWS[i % len(LAWS)], max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=logprobs),
        speculation=SpeculationParams(**speculation),
    )


def bits_of(engine: Engine, requests: Iterable[Request]) -> dict[str, Bits]:
    outputs = fakes.run(engine, list(requests))
    return {name: (tokens, outputs.logprobs[name]) for name, tokens in outputs.tokens.items()}


@lru_cache
def pair(family: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = zoo.reference(family)
    return zoo.ours(model, dtype), zoo.near(model, dtype=dtype)


def engine_of(family: str, dtype: torch.dtype, *, reproducible: bool = True, **config: object) -> Engine:
    options = {"max_batch_size": BATCH, "proposer": "none", "num_draft_tokens": 8, **config}
    settings = EngineConfig(target=family, reproducible=reproducible, **options)
    scripts = {"right": 0, "wrong": 1}
    return heads.assembled(
        settings,
        *pair(family, dtype),
        extra_proposers={name: ScriptedProposer(_script(family, dtype, off)) for name, off in scripts.items()},
    )


def _script(family: str, dtype: torch.dtype, off: int) -> Callable[[Sequence, int], list[int]]:
    """Drafts for the watched requests that are always right, or off by one."""

    def script(sequence: Sequence, k: int) -> list[int]:
        tokens, _ = alone(family, dtype)[int(sequence.request_id.partition("/")[0])]
        return [(token + off) % zoo.VOCAB for token in tokens[sequence.num_generated :][:k]]

    return script


@lru_cache
def alone(family: str, dtype: torch.dtype) -> dict[int, Bits]:
    """Each watched request by itself, one token at a time, in an engine that nobody used before."""
    return {i: bits_of(engine_of(family, dtype, prefix_cache=False), [request(i)])[str(i)] for i in WATCHED}


def assert_as_alone(bits: dict[str, Bits], family: str, dtype: torch.dtype, labels: Iterable[str] = ("",)) -> None:
    for name, i in [(f"{i}{label}", i) for label in labels for i in WATCHED]:
        assert bits[name] == alone(family, dtype)[i], f"request {name}"


@families("llama", "gpt2", "gemma2", "phi3-longrope")
def test_same_bits_among_31_others(family: str, dtype: torch.dtype) -> None:
    assert_as_alone(bits_of(engine_of(family, dtype), map(request, range(BATCH))), family, dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@families("gemma2", "phi3-longrope")
def test_same_bits_whoever_drafts(folder: Path, family: str, dtype: torch.dtype) -> None:
    """All proposers in one batch, and speculation off."""
    engine = engine_of(family, dtype, draft=["self:1", heads.medusa(folder), heads.eagle(folder)])
    asked = {f"/{name}": {"proposer": name, "num_draft_tokens": 5} for name in engine.facts.proposer_names}
    asked["/off"] = {"mode": SpeculationMode.OFF}
    assert len(asked) == 11
    bits = bits_of(engine, [request(i, label, **asked[label]) for label in asked for i in WATCHED])
    assert_as_alone(bits, family, dtype, asked)


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "dtype"), [("model", torch.bfloat16), ("right", torch.float32)])
def test_same_bits_for_any_k(proposer: str, dtype: torch.dtype) -> None:
    asked = {f"/{k}": {"proposer": proposer, "num_draft_tokens": k} for k in range(9)}
    engine = engine_of("llama", dtype, prefix_cache=False)
    bits = bits_of(engine, [request(i, label, **asked[label]) for label in asked for i in WATCHED])
    assert_as_alone(bits, "llama", dtype, asked)


@families(None, "gpt2", "phi3-longrope")
def test_same_bits_in_chunks_and_pages(family: str, dtype: torch.dtype) -> None:
    sizes = {"max_batch_size": 4, "proposer": "ngram", "prefix_cache": False}
    for page_size, chunk in ((4, 7), (16, 37), (128, 4)):
        engine = engine_of(family, dtype, page_size=page_size, max_batch_tokens=chunk, **sizes)
        assert_as_alone(bits_of(engine, map(request, WATCHED)), family, dtype)


@families("gpt2", "phi3-longrope")
@pytest.mark.parametrize("prefix_cache", [pytest.param(False, marks=pytest.mark.slow), True])
def test_same_bits_after_preemption(prefix_cache: bool, family: str, dtype: torch.dtype) -> None:
    """Pages for a few of 32: K/V is dropped, and computed again in other pages or found in the prefix cache."""
    layout = kv_layout(zoo.family_config(family), dtype)
    few = {"page_size": 4, "kv_memory": 22 * 4 * 2 * layout.bytes_per_token / 2**30, "prefix_cache": prefix_cache}
    engine = engine_of(family, dtype, proposer="model", num_draft_tokens=3, **few)
    preempted, step = [0], engine.step

    def counted() -> object:
        output = step()
        preempted[0] += output.stats.preempted
        return output

    engine.step = counted
    assert_as_alone(bits_of(engine, map(request, range(BATCH))), family, dtype)
    assert preempted[0] > 0


# --------------------------------------------------------------------------------------------------- the prefix cache


@families("gpt2", "phi3-longrope")
def test_same_bits_over_a_cached_prefix(family: str, dtype: torch.dtype) -> None:
    """A prompt that strangers sent before, in one batch, with drafts in between and outputs of their own."""
    engine = engine_of(family, dtype, page_size=4, proposer="model", num_draft_tokens=4)
    strange = SamplingParams(temperature=1.0, seed=99, max_tokens=NEW_TOKENS, ignore_eos=True)
    fakes.run(engine, [replace(request(i, " of a stranger"), sampling=strange) for i in range(BATCH)])
    outputs = fakes.run(engine, list(map(request, WATCHED)))
    assert [outputs.finished[str(i)].cached_prompt_tokens for i in WATCHED] == [16, 0, 24, 36]
    bits = {name: (tokens, outputs.logprobs[name]) for name, tokens in outputs.tokens.items()}
    assert_as_alone(bits, family, dtype)


@families("gpt2", "llama")
def test_same_bits_over_a_cached_answer(family: str, dtype: torch.dtype) -> None:
    """A conversation goes on: part of its K/V was written by verification, over drafts that fell."""
    engine = engine_of(family, dtype, page_size=4, proposer="model", num_draft_tokens=4)
    first = request(31)
    answer = fakes.run(engine, [first]).tokens["31"]
    second = replace(first, token_ids=(*first.token_ids, *answer, 7, 8))
    outputs = fakes.run(engine, [second])
    assert outputs.finished["31"].cached_prompt_tokens > len(first.token_ids)
    want = bits_of(engine_of(family, dtype, prefix_cache=False), [second])
    assert want == {"31": (outputs.tokens["31"], outputs.logprobs["31"])}


@families("llama", "gemma2")
def test_same_keys_and_values_whoever_computed_them(family: str, dtype: torch.dtype) -> None:
    """What a prefix cache hands on: the K/V that a stranger's pass left is the K/V of one's own."""
    runner = engine_of(family, dtype, page_size=4).runner
    arena, prompt = runner.arena, [(5 * i + 3) % zoo.VOCAB for i in range(20)]
    others = [Feed(PROMPTS[i], 0, range(20 * i + 20, 20 * i + 40)) for i in range(3)]
    runner.forward([Feed(prompt, 0, [0, 1, 2, 3, 4])])
    runner.forward([*others, Feed([*prompt, 5, 6], 0, [9, 8, 12, 10, 11, 15])])
    theirs = [4 * page + slot for page in (9, 8, 12, 10, 11) for slot in range(4)]
    for layer in (*arena.k, *arena.v):
        assert torch.equal(layer[:20], layer[theirs])


# ------------------------------------------------------------------------------------------------- what else is asked


@families(None, "gemma2")
def test_prompt_logprobs_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """In one piece and alone, or in chunks among the others."""
    asking = [replace(r, sampling=replace(r.sampling, prompt_logprobs=3)) for r in map(request, WATCHED)]
    in_chunks = engine_of(family, dtype, max_batch_tokens=37, proposer="ngram")
    together = fakes.run(in_chunks, [*asking, *(request(i) for i in range(BATCH) if i not in WATCHED)])
    by_itself = engine_of(family, dtype)
    for mine in asking:
        want = fakes.run(by_itself, [mine]).prompt_logprobs[mine.request_id]
        assert len(want) == len(mine.token_ids)
        assert together.prompt_logprobs[mine.request_id] == want


@pytest.mark.slow
def test_each_of_several_outputs_has_the_same_bits_alone() -> None:
    """Output i of n, or a request with its seed: they share the prompt's K/V, or have their own."""
    dtype = torch.bfloat16
    three = replace(request(5), sampling=replace(request(5).sampling, n=3))
    outputs = fakes.run(engine_of("llama", dtype, proposer="model"), [three, request(14)])
    for name in ("5", "5/1", "5/2"):
        seeded = replace(request(5), sampling=replace(request(5).sampling, seed=outputs.finished[name].seed))
        want = bits_of(engine_of("llama", dtype, prefix_cache=False), [seeded])["5"]
        assert (outputs.tokens[name], outputs.logprobs[name]) == want


# ----------------------------------------------------------------------------------------------- what is not promised


@pytest.mark.slow
def test_without_the_flag_bits_differ() -> None:
    """The flag is what does it: the same comparison fails without."""
    dtype = torch.float32
    by_itself = bits_of(engine_of("llama", dtype, reproducible=False), [request(14)])
    company = engine_of("llama", dtype, reproducible=False, proposer="model", num_draft_tokens=4)
    _, logprobs = bits_of(company, map(request, range(BATCH)))["14"]
    assert logprobs != by_itself["14"][1]


def test_under_rejection_tokens_hang_on_k() -> None:
    """Why a reproducible server has no rejection: seed and prompt do not settle the tokens."""
    engine = engine_of("llama", torch.float32, reproducible=False, verification="rejection", proposer="model")
    labels = [f"/{k}" for k in range(9)]
    outputs = fakes.run(engine, [request(5, f"/{k}", num_draft_tokens=k) for k in range(9)])
    assert len({tuple(outputs.tokens[f"5{label}"]) for label in labels}) > 1


def test_the_sampler_gives_a_row_the_same_bits_alone() -> None:
    """Penalties, laws, draws and log-probabilities of one row do not depend on the rows beside it."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (97, 2048):
        logits = torch.randn(48, vocab, generator=generator) * 4
        sequences = [
            Sequence(request(i), seed=i, speculation=None, max_len=99, end_token_ids=frozenset(), tokens=PROMPTS[i])
            for i in range(24)
        ]
        rows = [LogitsRow(s, drafts, Stream.COUPLED) for s in sequences for drafts in ((), (7, 8))]
        together = _sampled(logits, rows)
        for i in range(48):
            for mine, all_rows in zip(_sampled(logits[i : i + 1], rows[i : i + 1]), together, strict=True):
                assert mine[0].tolist() == all_rows[i].tolist()


def _sampled(logits: torch.Tensor, rows: list[LogitsRow]) -> tuple[torch.Tensor, ...]:
    samplers, processed = distribution.samplers_of(rows, logits.shape[1]), process(logits, rows)
    tokens = distribution.choose(processed, samplers).token
    logprobs = token_logprobs(logits, tokens.tolist(), Bounds().max_logprobs)
    numbers = [[of.logprob, *(candidate.logprob for candidate in of.top)] for of in logprobs]
    return (
        processed,
        tokens,
        torch.tensor(numbers, dtype=torch.float64),
        distribution.probabilities(processed, samplers),
    )


# --------------------------------------------------------------------------------------- another process, more threads

THREADED = {2: ("llama", torch.bfloat16), 3: ("gpt2", torch.float32)}


def digest(bits: object) -> str:
    return hashlib.sha256(repr(bits).encode()).hexdigest()


def print_digests() -> None:
    """What the other process does."""
    found = {}
    for threads, (family, dtype) in THREADED.items():
        with exactly(threads):
            bits = bits_of(engine_of(family, dtype, proposer="model"), map(request, WATCHED))
        found[family] = digest([bits[str(i)] for i in WATCHED])
    print(json.dumps(found))


@pytest.mark.slow
def test_same_bits_after_a_restart_on_any_number_of_threads() -> None:
    """In another process, whose threads wait without spinning: it may have fewer cores than they are."""
    code = "from tests.exactness.test_reproducible import print_digests; print_digests()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=env)
    here = {family: digest([alone(family, dtype)[i] for i in WATCHED]) for family, dtype in THREADED.values()}
    assert json.loads(done.stdout.splitlines()[-1]) == here
