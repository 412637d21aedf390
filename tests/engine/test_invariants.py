"""Requests come, run, are cancelled and starve at random: no page is lost, no token is wrong, nobody is forgotten."""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pilotfish.engine.params import SamplingParams, SpeculationParams, Verification
from pilotfish.engine.types import FinishReason, Request
from tests import fakes
from tests.scripted import ScriptedProposer

VOCAB = 11
LAW = fakes.hashed_law(VOCAB)
DRAFT_LAW = fakes.hashed_law(VOCAB, salt=1)
PROMPTS = [tuple((i * j) % VOCAB for j in range(1, length)) for i, length in enumerate((2, 3, 9, 17, 30), 3)]
SAMPLINGS = [
    SamplingParams(max_tokens=12, stop_token_ids=(7,)),
    SamplingParams(max_tokens=20, temperature=0.9, seed=5),
    SamplingParams(max_tokens=1, temperature=1.5, seed=6, top_k=4),
    SamplingParams(max_tokens=25, temperature=0.7, seed=7, top_p=0.8),
    SamplingParams(max_tokens=20, repetition_penalty=1.5, frequency_penalty=0.5, banned_token_ids=(3,)),
    SamplingParams(max_tokens=15, n=3, temperature=0.8, seed=8, logit_bias={2: 3.0}, logprobs=2, prompt_logprobs=0),
]


@cache
def plain(prompt: tuple[int, ...], sampling: SamplingParams, index: int = 0) -> list[int]:
    """The request alone in an engine with pages to spare, one token at a time."""
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, proposer="none", prefix_cache=False)
    outputs = fakes.run(engine, [Request(request_id="plain", token_ids=prompt, sampling=sampling)])
    return outputs.tokens[fakes.output_name("plain", index)]


class Life(RuleBasedStateMachine):
    """One engine with too few pages, for all of its life."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.requests, self.count, self.cut = fakes.Outputs(), {}, 0, set()

    @initialize(
        num_pages=st.integers(14, 30),
        page_size=st.sampled_from([4, 5]),
        max_batch_tokens=st.integers(4, 40),
        num_draft=st.integers(0, 5),
        prefix_cache=st.booleans(),
    )
    def start(self, num_pages: int, page_size: int, max_batch_tokens: int, num_draft: int, prefix_cache: bool) -> None:
        right = ScriptedProposer(
            lambda s, k: plain(s.request.token_ids, s.request.sampling, s.index)[s.num_generated :][:k]
        )
        self.engine = fakes.fake_engine(
            LAW,
            vocab_size=VOCAB,
            draft_law=DRAFT_LAW,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=4,
            max_batch_tokens=max_batch_tokens,
            num_draft_tokens=num_draft,
            prefix_cache=prefix_cache,
            proposers={"right": right},
        )

    @rule(
        prompt=st.sampled_from(PROMPTS),
        sampling=st.sampled_from(SAMPLINGS),
        proposer=st.sampled_from(["none", "ngram", "model", "right"]),
        salt=st.sampled_from([None, "tenant"]),
    )
    def add(self, prompt: tuple[int, ...], sampling: SamplingParams, proposer: str, salt: str | None) -> None:
        request = Request(
            request_id=str(self.count),
            cache_salt=salt,
            token_ids=prompt,
            sampling=sampling,
            # Both rules meet in one batch; greedy, even rejection gives what plain decoding gives.
            speculation=SpeculationParams(
                proposer=proposer,
                verification=Verification.COUPLED if sampling.temperature else Verification.REJECTION,
            ),
        )
        self.requests[request.request_id] = request
        self.count += 1
        self.engine.add(request)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.outputs.take(self.engine.step().events)
            self.engine.check_invariants()

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        """The caller goes away, or the text layer finds a stop string a few tokens back."""
        live = sorted(self.names() - self.outputs.finished.keys())
        if live:
            name, held = data.draw(st.sampled_from(live)), self.engine.load.free_pages
            who, index = name.partition("/")[0], int(name.partition("/")[2] or 0)
            keep = len(self.outputs.tokens.get(name, ())) // 2 if reason is FinishReason.STOP else None
            (event,) = self.engine.finish(who, reason, index=index, keep=keep)
            self.outputs.take([event])
            assert keep in (None, event.finished.completion_tokens)
            assert self.engine.load.free_pages >= held
            assert self.engine.finish(who, reason, index=index) == ()
            self.cut.add(name)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """The caller of all outputs of a request goes away."""
        if self.requests:
            who = data.draw(st.sampled_from(sorted(self.requests)))
            mine = {name for name in self.names() if name.partition("/")[0] == who} - self.outputs.finished.keys()
            events = self.engine.finish(who, FinishReason.CANCELLED)
            self.outputs.take(events)
            assert {fakes.output_name(who, event.index) for event in events} == mine
            self.cut |= mine

    def names(self) -> set[str]:
        return {fakes.output_name(r.request_id, i) for r in self.requests.values() for i in range(r.sampling.n)}

    @invariant()
    def books_are_right(self) -> None:
        if self.count:
            self.engine.check_invariants()
        for name, tokens in self.outputs.tokens.items():
            who, _, index = name.partition("/")
            request = self.requests[who]
            want = plain(request.token_ids, request.sampling, int(index or 0))
            assert tokens == want[: len(tokens)], "a token differs from plain decoding"
            if name in self.outputs.finished and name not in self.cut:
                assert tokens == want

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.count or not self.engine.has_work:
                break
            self.outputs.take(self.engine.step().events)
        if self.count:
            assert self.engine.load.free_pages == self.engine.facts.total_pages
            assert self.outputs.finished.keys() == self.names(), "a request was forgotten"
            self.books_are_right()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=12, stateful_step_count=25)
