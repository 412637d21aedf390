"""Models whose law is known in closed form. They keep real K/V books: what they read back is what was written."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.control.controller import Control
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.params import (
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationSettings,
    Verification,
)
from pilotfish.engine.proposers import ModelProposer, NGramProposer, Proposer, Proposers
from pilotfish.engine.request.intake import Limits
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.stats import Clock, StepStats
from pilotfish.engine.types import FinishedOutput, Logprob, Request
from pilotfish.engine.types import Sequence as Output

Law = Callable[[tuple[int, ...]], Tensor]  # context -> logits [vocab]
STALE = -1


class TableModel:
    """A runner whose logits are a function of the context, which it reads back from its own arena of token ids.

    A row that was never written, was left stale, or belongs to another sequence changes the context and so the
    output: whoever gets equal tokens out of this kept the books right.
    """

    def __init__(self, law: Law, vocab_size: int, num_pages: int, page_size: int) -> None:
        self.vocab_size, self.page_size, self._law = vocab_size, page_size, law
        self.rows = [STALE] * (num_pages * page_size)
        self.batches: list[list[Feed]] = []

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        self.batches.append(list(feeds))
        for feed in feeds:
            for i, token in enumerate(feed.tokens):
                self.rows[self._row(feed, feed.start + i)] = token
        laws = [self._law(self._context(f, end)) for f in feeds for end in range(f.kv_len - f.num_logits, f.kv_len)]
        return torch.stack(laws) if laws else torch.zeros(0, self.vocab_size)

    def _row(self, feed: Feed, position: int) -> int:
        return feed.page_table[position // self.page_size] * self.page_size + position % self.page_size

    def _context(self, feed: Feed, last: int) -> tuple[int, ...]:
        context = tuple(self.rows[self._row(feed, position)] for position in range(last + 1))
        assert STALE not in context, "attention over a row that was never written"
        return context


def hashed_law(vocab_size: int, *, salt: int = 0, sharpness: float = 2.0) -> Law:
    """Logits that depend on every token of the context and its order."""

    @lru_cache(maxsize=100_000)
    def law(context: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(repr(context).encode(), salt)
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * sharpness

    return law


def markov_law(table: Tensor) -> Law:
    """Row `context[-1]` of a table of probabilities `[vocab, vocab]`."""
    return lambda context: table[context[-1]].log()


def fake_engine(
    law: Law,
    *,
    vocab_size: int,
    draft_law: Law | None = None,
    num_pages: int = 64,
    page_size: int = 16,
    max_model_len: int = 64,
    proposers: Mapping[str, Proposer] | None = None,
    proposer: str | None = None,
    eos: frozenset[int] = frozenset(),
    control: Control | None = None,
    clock: Clock = time.perf_counter,
    **config: object,
) -> Engine:
    """A whole engine around table models."""
    from pilotfish.engine.config import EngineConfig  # brings pydantic, which the machines of tests/cuda may lack

    unhurried = {"max_step_ms": 1e9}  # how fast this machine is decides in no test how much a step reads
    settings = EngineConfig(target="table", draft="table" if draft_law else None, **unhurried | config)
    settings = settings.model_copy(update={"proposer": proposer})  # may be one of the test's own
    prefill = PrefillBudget(settings.max_step_ms / 1000, settings.max_batch_tokens)
    by_name: dict[str, Proposer] = {"none": Proposer(), "ngram": NGramProposer(sizes=(2, 1))}
    if draft_law is not None:
        draft = TableModel(draft_law, vocab_size, num_pages, page_size)
        by_name["model"] = ModelProposer(draft, prefill, "model")
    chosen = Proposers({**by_name, **(proposers or {})}, vocab_size)
    make_pool = partial(PagePool, num_pages, page_size, prefix_cache=settings.prefix_cache)
    scheduler = Scheduler(
        make_pool(),
        settings.max_batch_size,
        settings.max_batch_tokens,
        {name: make_pool() for name in chosen.draft_kv_users},
        chosen.draft_kv_sharers,
        control,
        prefill=prefill,
        find_drafts=chosen.find_drafts,
    )
    limits = Limits(vocab_size, min(max_model_len, num_pages * page_size), eos)
    target = TableModel(law, vocab_size, num_pages, page_size)
    return Engine(settings, limits, target, chosen, scheduler, clock)


def request(
    token_ids: Sequence[int], *, name: str = "r", wish: SpeculationParams | None = None, **sampling: Any
) -> Request:
    """A request; `sampling` are fields of its `SamplingParams`."""
    wish = SpeculationParams() if wish is None else wish
    return Request(request_id=name, token_ids=tuple(token_ids), sampling=SamplingParams(**sampling), speculation=wish)


def requests(prompts: Sequence[Sequence[int]], ks: Sequence[int | None] = (), **sampling: Any) -> list[Request]:
    """One for each prompt, named by its place; `ks`: how many drafts they ask for, where they do."""
    wishes = [SpeculationParams(num_draft_tokens=k) for k in ks] or [None] * len(prompts)
    both = enumerate(zip(prompts, wishes, strict=True))
    return [request(prompt, name=str(i), wish=wish, **sampling) for i, (prompt, wish) in both]


def sequence(
    tokens: Sequence[int],
    *,
    name: str = "r",
    prompt_len: int | None = None,
    k: int = 4,
    mode: SpeculationMode = SpeculationMode.AUTO,
    proposer: str = "model",
    max_len: int = 999,
    seed: int = 0,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Output:
    """What an engine makes of a request, without one; `fields` are those of the request."""
    rule = SpeculationSettings(mode=mode, num_draft_tokens=k, proposer=proposer, verification=Verification.COUPLED)
    fields |= {"request_id": name, "token_ids": tuple(tokens[:prompt_len]), "sampling": sampling or SamplingParams()}
    return Output(Request(**fields), seed, rule, max_len, frozenset(), list(tokens))


def output_name(request_id: str, index: int) -> str:
    """Output 0 goes by the name of its request."""
    return f"{request_id}/{index}" if index else request_id


class Outputs:
    """Collects events and checks I6 on the way: one terminal event per request, nothing after it."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.from_draft: dict[str, list[bool]] = {}
        self.finished: dict[str, FinishedOutput] = {}
        self.preempted = 0
        self.logprobs: dict[str, list[Logprob]] = {}
        self.prompt_logprobs: dict[str, tuple[Logprob | None, ...]] = {}

    def take(self, events: Sequence[object]) -> None:
        for event in events:
            name = output_name(event.request_id, event.index)
            assert name not in self.finished, "an event after the last"
            assert len(event.token_ids) == len(event.from_draft)
            assert len(event.logprobs) in (0, len(event.token_ids))
            self.tokens.setdefault(name, []).extend(event.token_ids)
            self.from_draft.setdefault(name, []).extend(event.from_draft)
            self.logprobs.setdefault(name, []).extend(event.logprobs)
            if event.prompt_logprobs:
                assert name not in self.prompt_logprobs, "prompt logprobs twice"
                self.prompt_logprobs[name] = event.prompt_logprobs
            if event.finished is not None:
                self.finished[name] = event.finished


def run(engine: Engine, requests: Sequence[Request], *, most_steps: int = 10_000, failures: int = 0) -> Outputs:
    """Add all, step until idle, check the invariants after each step, and the statistics in the end.

    A proposer's fault shows in no token, so it is counted: exactly `failures` are expected.
    """
    outputs, total = Outputs(), [0] * 5
    for request in requests:
        engine.add(request)
    for _ in range(most_steps):
        if not engine.has_work:
            break
        step = engine.step()
        outputs.take(step.events)
        outputs.preempted += step.stats.preempted
        total = [have + new for have, new in zip(total, _counts(step.stats), strict=True)]
        engine.check_invariants()
    assert total == [*_sums(outputs), failures], "what the steps counted is not what the requests say"
    assert not engine.has_work, "the engine makes no progress"
    assert engine.load.free_pages == engine.facts.total_pages
    return outputs


def _counts(stats: StepStats) -> tuple[int, ...]:
    return stats.rounds, stats.drafted, stats.accepted, stats.generated_tokens, stats.draft_failures


def _sums(outputs: Outputs) -> tuple[int, ...]:
    ended = outputs.finished.values()
    sums = [sum(getattr(f.stats, name) for f in ended) for name in ("rounds", "drafted", "accepted")]
    return (*sums, sum(f.completion_tokens for f in ended))
