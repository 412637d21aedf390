"""Every option, alone and in random company of others: speculation changes nothing that a caller can see.

What plain decoding gives is the law: tokens, text, finish reason, stop position, usage, seed and logprobs must be
the same with any proposer, any K, batch mates, preemption, and with the prefix cache warm, cold or off.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pilotfish.engine.control.controller import Control, within
from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.params import Guided, SamplingParams, SpeculationMode, ThinkingBudget
from pilotfish.engine.types import Sequence
from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.json_calls import HermesFormat
from pilotfish.server.formats.structure import Answer, structure_of
from tests.covering import covering, some
from tests.sameness import (
    PROMPTS,
    PROPOSERS,
    Pair,
    asking,
    assert_same,
    assert_speculation_changes_nothing,
    codec,
    embedded_of,
    random_of,
    random_pair,
    run,
)

MAX_TOKENS = 16
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
)
# Options alone. Values are chosen to bite: each changes what this model says, or cuts it.
ALONE = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.1, seed=1),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=2),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    "seed": SamplingParams(temperature=1.0, seed=2**64 - 1),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=1.2, logit_bias={7: 6.0, 9: 5.0}),
    "logit_bias": SamplingParams(logit_bias={7: 4.0, 11: 3.5, 300: -100.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=tuple(range(5, 400, 7))),
    "banned_token_ids": SamplingParams(banned_token_ids=tuple(range(0, 2048, 2))),
    "min_tokens": SamplingParams(min_tokens=9, stop_token_ids=tuple(range(100, 112)), logit_bias={105: 30.0}),
    "max_tokens": SamplingParams(max_tokens=5),
    "fit_context": SamplingParams(max_tokens=6, fit_context=True),
    "stop": SamplingParams(stop=("e", "zz")),
    "stop_token_ids": SamplingParams(temperature=1.0, seed=6, stop_token_ids=(5, 6, 7), logit_bias={6: 6.0}),
    "ignore_eos": SamplingParams(ignore_eos=True, logit_bias={0: 5.0}),
    "logprobs": SamplingParams(logprobs=3),
    "prompt_logprobs": SamplingParams(prompt_logprobs=2),
    "n": SamplingParams(n=3, temperature=1.0, seed=7),
    "json_schema": SamplingParams(guided=Guided(json_schema=SCHEMA), temperature=1.0, seed=8),
    "regex": SamplingParams(guided=Guided(regex="(ab|cd)+ [0-9]{3}"), temperature=1.0, seed=9),
    "grammar": SamplingParams(guided=Guided(grammar='start: "(" start ")" | /[xyz]+/'), temperature=1.0, seed=10),
    "choice": SamplingParams(guided=Guided(choice=("yes", "yesterday", "no", "not at all"))),
    "thinking": SamplingParams(guided=Guided(thinking=ThinkingBudget(max_tokens=4, end="</t>")), seed=11),
}


THINK, BUDGET = ReasoningMarks("<t>", "</t>"), 4
ARGUMENTS = (
    '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false}'
)
TOOLS = (Tool("f", parameters=ARGUMENTS, strict=True), Tool("g"))
ANSWERS = {
    "tools, required": Answer(tools=TOOLS[:1], must_call=True),
    "tools, one call": Answer(
        tools=TOOLS[:1], must_call=True, several=False, starts_in_reasoning=True, thinking_budget=2
    ),
    "tools, strict": Answer(tools=TOOLS),
    "reasoning": Answer(starts_in_reasoning=True, thinking_budget=BUDGET),
    "reasoning, then a schema": Answer(
        content=Guided(json_schema=SCHEMA), starts_in_reasoning=True, thinking_budget=BUDGET
    ),
    "reasoning or none, then a choice": Answer(content=Guided(choice=("yes", "no")), thinking_budget=BUDGET),
}
ANSWERING = {
    name: SamplingParams(
        guided=structure_of(answer, HermesFormat({}, THINK)), temperature=1.0, seed=12, max_tokens=30, logprobs=1
    )
    for name, answer in ANSWERS.items()
}


@pytest.mark.feature
@pytest.mark.parametrize(("option", "proposer"), covering(ALONE, PROPOSERS, every=1))
def test_each_option_alone(option: str, proposer: str) -> None:
    assert_row_is_plain("options", option, proposer)


@pytest.mark.feature
@pytest.mark.parametrize(("answer", "proposer"), covering(ANSWERS, PROPOSERS, every=15))
def test_each_answer_of_a_conversation(answer: str, proposer: str) -> None:
    """Tools and reasoning."""
    assert_row_is_plain("answers", answer, proposer)


TABLES: Mapping[str, Mapping[str, SamplingParams]] = {"options": ALONE, "answers": ANSWERING}


def assert_row_is_plain(table: str, row: str, proposer: str) -> None:
    starved, params = is_starved(table, row, proposer), complete(TABLES[table][row])
    want = [done for prompt in prompts_of(table, row) for done in random_of(proposer).plain(prompt, params)]
    for ours, theirs in zip(in_one_batch(table, proposer, starved=starved)[row], want, strict=True):
        assert_same(ours, theirs)


def is_starved(table: str, row: str, proposer: str) -> bool:
    """By turns: each row meets both ways, with one proposer or another, and each proposer too."""
    return (list(TABLES[table]).index(row) + PROPOSERS.index(proposer)) % 2 == 0


def prompts_of(table: str, row: str) -> Seq[str]:
    """One of two by turns, and both for a structure, whose state refused drafts disturb. They are the same for all
    proposers: so plain decoding is asked once.
    """
    if TABLES[table][row].guided is not None:
        return PROMPTS[::3]
    return [PROMPTS[0 if list(TABLES[table]).index(row) // 2 % 2 else 3]]


@cache
def in_one_batch(table: str, proposer: str, *, starved: bool) -> dict[str, list[CompletionOutput]]:
    """What half of the rows of a table give with a proposer, all in one ragged batch: so a cell costs little."""
    engine, asked = llm(proposer, plenty=not starved, prefix_cache=not starved), asking(proposer, 4 if starved else 8)
    rows = [row for row in TABLES[table] if is_starved(table, row, proposer) == starved]
    which = [(row, prompt) for row in rows for prompt in prompts_of(table, row)]
    requests = [engine._request(prompt, complete(TABLES[table][row]), asked, None) for row, prompt in which]
    said: dict[str, list[CompletionOutput]] = {row: [] for row in rows}
    for (row, _), done in zip(which, run(engine, requests, preempts=starved and table == "options"), strict=True):
        said[row] += done
    engine.engine.check_invariants()
    return said


def complete(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, max_tokens=sampling.max_tokens or MAX_TOKENS, seed=sampling.seed or 9)


def llm(proposer: str, *, plenty: bool, prefix_cache: bool, pair: Callable[[str], Pair] = random_of) -> LLM:
    """Without `plenty` there are few small pages, so that batch mates get preempted."""
    few = {} if plenty else {"pages": 30, "max_batch_tokens": 24}
    return pair(proposer).llm(proposer, prefix_cache=prefix_cache, **few)


REQUESTS = [
    (PROMPTS[0], SamplingParams(max_tokens=14, logprobs=1, seed=0)),
    (PROMPTS[1], SamplingParams(max_tokens=14, temperature=1.0, top_p=0.9, seed=1)),
    (PROMPTS[3], SamplingParams(max_tokens=14, temperature=0.8, frequency_penalty=0.7, seed=2)),
    (PROMPTS[0] * 2, SamplingParams(max_tokens=12, temperature=1.2, top_k=20, seed=3)),
]
CONDITIONS = {
    "alone": {"prefix_cache": False},
    "among 31 others": {"prefix_cache": False, "max_batch_size": 32},
    "chunked prefill": {"prefix_cache": False, "max_batch_tokens": 5, "max_batch_size": 4},
    "preemption": {"prefix_cache": False, "pages": 30},
    "prefix cache": {"prefix_cache": True},
    "prefix cache and preemption": {"prefix_cache": True, "pages": 22},
    "one page per sequence": {"prefix_cache": False, "page_size": 128},
    "as many drafts as pay": {"prefix_cache": True, "pages": 60},
}


@pytest.mark.feature
@pytest.mark.parametrize(("condition", "proposer"), covering(CONDITIONS, PROPOSERS, every=15))
def test_each_condition(condition: str, proposer: str) -> None:
    """The same four requests, greedy and sampled, with penalties and logprobs, wherever they find themselves."""
    engine, asked = random_of(proposer).llm(proposer, **CONDITIONS[condition]), asking(proposer, 4)
    if condition == "as many drafts as pay":
        asked = replace(asked, mode=SpeculationMode.AUTO, num_draft_tokens=8)
    others = [(PROMPTS[i % 4], replace(REQUESTS[i % 3][1], seed=100 + i, max_tokens=6)) for i in range(28)]
    crowd = REQUESTS + (others if condition == "among 31 others" else [])
    batches = [[one] for one in crowd] if condition == "alone" else [crowd]
    for _ in range(1 + engine.engine.config.prefix_cache):  # the second time, it is warm
        requests = [[engine._request(*one, asked, None) for one in batch] for batch in batches]
        got = [done for batch in requests for done in run(engine, batch, preempts="preemption" in condition)]
        for (ours,), (prompt, params) in zip(got, REQUESTS, strict=False):
            assert_same(ours, random_of(proposer).plain(prompt, params)[0])
    engine.engine.check_invariants()


def edited(tokens: Seq[int]) -> list[int]:
    return [*tokens[:5], 7, 8, *tokens[6:]]


PREDICTIONS: dict[str, Callable[[Seq[int]], Iterable[int]]] = {
    "right": list,
    "edited": edited,
    "wrong": lambda tokens: [(token + 1) % 2048 for token in tokens],
    "of something else": lambda tokens: range(500, 500 + len(tokens)),
}


@pytest.mark.feature
@pytest.mark.parametrize(("prediction", "proposer"), covering(PREDICTIONS, PROPOSERS, every=15))
def test_each_prediction(prediction: str, proposer: str) -> None:
    """The same requests with what the caller expects, greedy and sampled, with penalties and log-probabilities."""
    engine = llm(proposer, plenty=True, prefix_cache=True)
    want = [random_of(proposer).plain(prompt, params)[0] for prompt, params in REQUESTS]
    for how in (asking(proposer, 4), replace(asking(proposer, 8), mode=SpeculationMode.AUTO)):
        predicted = [tuple(PREDICTIONS[prediction](done.token_ids)) for done in want]
        requests = [engine._request(*r, how, None, p) for r, p in zip(REQUESTS, predicted, strict=True)]
        for (ours,), theirs in zip(run(engine, requests), want, strict=True):
            assert_same(ours, theirs)
            assert prediction != "right" or ours.accepted_prediction_tokens == len(theirs.token_ids)
    engine.engine.check_invariants()


WHOLE, CHUNKED = {"max_batch_tokens": 256}, {"max_batch_tokens": 5, "max_batch_size": 4}
CROSSED = {
    "whole prompt": WHOLE | {"prefix_cache": False},
    "whole prompt, cold cache": WHOLE,
    "whole prompt, warm cache": WHOLE,
    "chunked prefill": CHUNKED | {"prefix_cache": False},
    "chunked prefill, cold cache": CHUNKED,
    "chunked prefill, warm cache": CHUNKED,
    "chunked prefill, preemption": CHUNKED | {"prefix_cache": False, "pages": 16},
    "chunked prefill, preemption, warm cache": CHUNKED | {"pages": 16},
}


@pytest.mark.feature
@pytest.mark.parametrize(("crossing", "proposer"), covering(CROSSED, PROPOSERS, every=15, first=8))
def test_prompt_logprobs_crossed(crossing: str, proposer: str) -> None:
    """Those of one pass over the whole prompt by transformers, also of a request for several outputs."""
    engine, asked = random_of(proposer).llm(proposer, **CROSSED[crossing]), asking(proposer, 4)
    salt = f"{crossing} {proposer}"  # what the engine has cached for other tests is cold for this one
    if "warm" in crossing:
        engine.generate([p for p, _ in SCORED], SamplingParams(max_tokens=5), speculation=asked, cache_salt=salt)
    got = run(engine, [engine._request(*one, asked, salt) for one in SCORED], preempts="preemption" in crossing)
    for ours, (prompt, sampling) in zip(got, SCORED, strict=True):
        for one, law in zip(ours, random_of(proposer).plain(prompt, sampling), strict=True):
            assert_same(one, law)
        assert_scores_are_those_of_one_pass(ours[0], prompt, random_of(proposer, as_served=False))
    engine.engine.check_invariants()


SCORED = [
    (PROMPTS[0], SamplingParams(max_tokens=12, prompt_logprobs=2, logprobs=1, seed=0)),
    (PROMPTS[1], SamplingParams(max_tokens=12, prompt_logprobs=0, temperature=1.0, seed=1, n=3)),
    (PROMPTS[3], SamplingParams(max_tokens=12, prompt_logprobs=1, temperature=0.8, seed=2)),
    (PROMPTS[0] * 2, SamplingParams(max_tokens=12, prompt_logprobs=3, temperature=1.2, top_k=20, seed=3, n=2)),
]


def assert_scores_are_those_of_one_pass(done: CompletionOutput, prompt: str, pair: Pair) -> None:
    tokens, (first, *scores) = codec().encode(prompt), done.prompt_logprobs or [None]
    assert first is None
    for i, (score, law) in enumerate(zip(scores, one_pass(tokens, pair), strict=True), 1):
        assert score.logprob == pytest.approx(float(law[tokens[i]]), abs=1e-4)
        best = law.topk(len(score.top)).values.tolist()
        assert [candidate.logprob for candidate in score.top] == pytest.approx(best, abs=1e-4)


@cache
def one_pass(tokens: tuple[int, ...], pair: Pair) -> torch.Tensor:
    """What transformers says of each token but the first, from a pair whose weights are not packed."""
    target = pair.target
    model = AutoModelForCausalLM.from_config(target.config, attn_implementation="eager").eval()
    model.load_state_dict(target.plain.state_dict())
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


PREFILLS = {"whole prompt": WHOLE, "chunked prefill": CHUNKED}
TURNS = [f"{turn}, {prefill}" for turn in ("repeat", "next turn") for prefill in PREFILLS]


@pytest.mark.feature
@pytest.mark.parametrize(("turn", "proposer"), covering(TURNS, PROPOSERS, every=15, first=4))
def test_prefix_cache_crossed(turn: str, proposer: str) -> None:
    """Repeats of a prompt, and prompts that go on where an output ended: no draft changes them, or costs a hit."""
    again, prefill = turn.split(", ")
    engine = random_of(proposer).llm(proposer, **PREFILLS[prefill])
    hits: list[list[int]] = []
    for i, name in enumerate(("none", proposer)):
        hits.append([])
        for prompt in PROMPTS[::3]:
            for _ in range(2):
                done = random_of(proposer).plain(prompt, TURN)[0]
                salt = f"{turn} {proposer} {i}"
                [got] = engine.generate(prompt, TURN, speculation=asking(name, 4), cache_salt=salt)
                assert_same(got, done)
                hits[-1].append(got.cached_prompt_tokens)
                prompt += (done.text or "") if again == "next turn" else ""
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 0
    engine.engine.check_invariants()


TURN = SamplingParams(max_tokens=10, seed=5)


class AnyK(Control):
    """Any number of drafts in any step, and often none."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        return within([self._random.choice([0, self._random.randint(0, limit)]) for limit in limits], budget)


@pytest.mark.parametrize("proposer", some(PROPOSERS, ["model", "uno"]))
def test_any_number_of_drafts_in_any_step(proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What control could ever choose, and more: drafts that fall behind, catch up, and are not asked for long."""
    engine = llm(proposer, plenty=False, prefix_cache=True)
    monkeypatch.setattr(engine.engine.scheduler, "control", AnyK())
    for _ in range(2):
        got = engine.generate(
            [p for p, _ in REQUESTS], [params for _, params in REQUESTS], speculation=asking(proposer, 8)
        )
        for ours, (prompt, params) in zip(got, REQUESTS, strict=True):
            assert_same(ours, random_of(proposer).plain(prompt, params)[0])
    engine.engine.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("option", sorted(ALONE.keys() - {"greedy", "fit_context"}))
def test_each_option_bites(option: str) -> None:
    """A test of an option that changes nothing would pass for an option that does nothing.

    What `fit_context` changes is tested with the engine (`tests/engine/test_engine.py`).
    """
    sampling, default = complete(ALONE[option]), {"max_tokens": MAX_TOKENS, "seed": 1}
    field = option if hasattr(sampling, option) else "guided"
    without = replace(sampling, **{field: default.get(field, getattr(SamplingParams(), field))})
    seen = [[_visible(done) for done in random_pair().plain(prompt, sampling)] for prompt in PROMPTS[::3]]
    assert seen != [[_visible(done) for done in random_pair().plain(prompt, without)] for prompt in PROMPTS[::3]]


def _visible(done: CompletionOutput) -> tuple[object, ...]:
    return done.token_ids, done.text, done.finish_reason, done.logprobs, done.prompt_logprobs


def test_every_field_of_sampling_params_is_tried() -> None:
    assert {field.name for field in fields(SamplingParams)} - {"guided"} <= ALONE.keys()
    assert {field.name for field in fields(Guided)} <= ALONE.keys()


TOKENS = st.integers(0, 2047)
COMBINATIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.4]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.6]),
    logit_bias=st.one_of(st.just({}), st.dictionaries(TOKENS, st.floats(-4, 4, width=16), max_size=5)),
    allowed_token_ids=st.one_of(st.none(), st.just(tuple(range(3, 2048, 3)))),
    banned_token_ids=st.lists(TOKENS, max_size=5).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.integers(1, 14),
    stop=st.lists(st.sampled_from(["e", "  ", "\n", "self", "th"]), max_size=2).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=16).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 1]),
    guided=st.sampled_from([None] * 8 + [ALONE[kind].guided for kind in ("json_schema", "regex", "grammar", "choice")]),
).flatmap(lambda params: st.integers(0, params.max_tokens).map(lambda least: completed(params, least)))


def completed(params: SamplingParams, least: int) -> SamplingParams:
    """Structured output and `ignore_eos` exclude each other."""
    return replace(params, min_tokens=least, ignore_eos=params.ignore_eos and params.guided is None)


BOLD = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SITUATIONS = {
    "sampling": COMBINATIONS,
    "proposer": st.sampled_from(PROPOSERS),
    "num_draft": st.integers(0, 8),
    "plenty": st.booleans(),
    "prefix_cache": st.booleans(),
    "prompts": st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5),
}


@settings(BOLD, max_examples=15)
@given(**SITUATIONS)
def test_random_combinations(
    sampling: SamplingParams, proposer: str, num_draft: int, plenty: bool, prefix_cache: bool, prompts: list[str]
) -> None:
    engine = llm(proposer, plenty=plenty, prefix_cache=prefix_cache)
    assert_speculation_changes_nothing(random_of(proposer), engine, sampling, proposer, num_draft, prompts)


@pytest.mark.slow
@settings(BOLD, max_examples=6)
@given(**SITUATIONS)
def test_random_combinations_with_trained_drafters(
    sampling: SamplingParams, proposer: str, num_draft: int, plenty: bool, prefix_cache: bool, prompts: list[str]
) -> None:
    """Whose drafts are kept as often as not, where those of random heads are mostly wrong."""
    engine = llm(proposer, plenty=plenty, prefix_cache=prefix_cache, pair=embedded_of)
    assert_speculation_changes_nothing(embedded_of(proposer), engine, sampling, proposer, num_draft, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", sorted(set(PROPOSERS) - {"none", "wrong"}))
def test_drafts_are_kept(proposer: str) -> None:
    """What the test above rests on."""
    sampling = SamplingParams(max_tokens=60, seed=0)
    engine = llm(proposer, plenty=True, prefix_cache=True, pair=embedded_of)
    done = assert_speculation_changes_nothing(embedded_of(proposer), engine, sampling, proposer, 4)
    assert sum(completion.stats.accepted for completion in done) > 0
