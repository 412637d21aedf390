"""The step's contract: what ends a request and when, what it reports, what a broken draft costs."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable

import pytest
import torch

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.constants import KEEP
from pilotfish.engine.errors import DuplicateRequest, InvalidRequest, Unsupported
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from pilotfish.engine.proposers.select import GIVE_UP_AFTER
from pilotfish.engine.types import FinishReason, Request, Sequence
from tests import fakes
from tests.scripted import ScriptedProposer

VOCAB = 11
LAW = fakes.hashed_law(VOCAB)
PROMPT = (1, 2, 3)
PLAIN = SamplingParams(max_tokens=20)


def request(name: str = "r", **fields: object) -> Request:
    return Request(**{"request_id": name, "token_ids": PROMPT, "sampling": PLAIN, **fields})


def plain_tokens() -> list[int]:
    return fakes.run(fakes.fake_engine(LAW, vocab_size=VOCAB, proposer="none"), [request()]).tokens["r"]


def right(k_most: int = 16) -> ScriptedProposer:
    whole = plain_tokens()
    return ScriptedProposer(lambda s, k: whole[s.num_generated :][: min(k, k_most)])


def engine_with(**config: object):
    return fakes.fake_engine(
        LAW, vocab_size=VOCAB, proposers={"right": right()}, **{"proposer": "right", "num_draft_tokens": 8, **config}
    )


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_cuts_inside_an_accepted_run(max_tokens: int) -> None:
    outputs = fakes.run(engine_with(), [request(sampling=SamplingParams(max_tokens=max_tokens))])
    assert outputs.tokens["r"] == plain_tokens()[:max_tokens]
    assert outputs.finished["r"].reason is FinishReason.LENGTH
    assert outputs.finished["r"].completion_tokens == max_tokens


@pytest.mark.parametrize(("asked", "limit", "want"), [(None, None, 64), (10**6, None, 64), (9, None, 12), (30, 20, 23)])
def test_an_output_that_fits_the_context_is_as_long_as_there_is_room(
    asked: int | None, limit: int | None, want: int
) -> None:
    fitting = request(sampling=SamplingParams(max_tokens=asked, fit_context=True))
    assert fitting.max_len(64, limit) == want
    fakes.fake_engine(LAW, vocab_size=VOCAB).check(fitting)


@pytest.mark.parametrize("own", [True, False], ids=["stop_token_ids", "eos"])
@pytest.mark.parametrize("stop", sorted(set(plain_tokens())))
def test_a_stop_token_cuts_inside_an_accepted_run(stop: int, own: bool) -> None:
    whole = plain_tokens()
    want = whole[: whole.index(stop) + 1]
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(stop,) if own else ())
    engine = engine_with(eos=frozenset() if own else frozenset({stop}))
    outputs = fakes.run(engine, [request(sampling=sampling)])
    assert outputs.tokens["r"] == want, "the stop token itself belongs to the output"
    ended = outputs.finished["r"]
    assert (ended.reason, ended.stop_token_id) == (FinishReason.STOP, stop)
    assert ended.completion_tokens == len(want)
    assert ended.stats.accepted <= len(want)


def test_the_end_of_text_may_be_ignored() -> None:
    whole = plain_tokens()
    going_on = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, eos=frozenset({whole[5]}))
    assert fakes.run(engine, [request(sampling=going_on)]).tokens["r"] == whole


def test_from_draft_flags_and_statistics_add_up() -> None:
    outputs = fakes.run(engine_with(num_draft_tokens=4), [request()])
    stats = outputs.finished["r"].stats
    assert outputs.from_draft["r"][:6] == [False, True, True, True, True, False]
    assert sum(outputs.from_draft["r"]) == stats.accepted == sum(stats.accepted_per_position)
    assert stats.acceptance_rate == 1.0
    assert stats.acceptance_length == 1 + stats.accepted / stats.rounds


def test_a_step_tells_how_many_sequences_had_how_many_drafts() -> None:
    engine = engine_with(num_draft_tokens=3)
    for name in ("a", "b"):
        engine.add(request(name))
    engine.add(request("plain", speculation=SpeculationParams(mode=SpeculationMode.OFF)))
    engine.step()
    stats = engine.step().stats
    assert stats.sequences_per_num_draft == (1, 0, 0, 2)
    assert stats.drafted == 6


def test_one_forward_serves_prefill_and_verification() -> None:
    engine = engine_with(num_draft_tokens=3, max_batch_tokens=12, max_batch_size=4)
    engine.add(request("old"))
    engine.step()
    engine.add(request("new", token_ids=tuple(range(10)) * 2))
    step = engine.step()
    kinds = {forward.kind: (forward.sequences, forward.tokens) for forward in step.stats.forwards}
    assert kinds == {"verify": (1, 1), "prefill": (1, 11)}, "prompts come before drafts"
    assert step.stats.sequences_per_num_draft == (1,), "who reads its prompt has no number of drafts"
    assert len(engine.runner.batches[-1]) == 2
    while engine.has_work:
        engine.step()


def falls_over(*_: object) -> list[int]:
    raise RuntimeError("draft fell over")


@pytest.mark.parametrize(
    ("propose", "said"),
    [
        (falls_over, "draft fell over"),
        *((lambda *_, made=made: made, "proposed") for made in ([1] * 30, [VOCAB], [-1])),
    ],
    ids=["fails", "too many", "no token", "negative"],
)
def test_a_broken_proposer_costs_speed_only(
    propose: Callable[..., list[int]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ScriptedProposer(propose)
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, proposers={"broken": broken}, proposer="broken")
    assert fakes.run(engine, [request()], failures=GIVE_UP_AFTER).tokens["r"] == plain_tokens()
    assert said in caplog.text
    assert "and is disabled" in caplog.text
    fakes.run(engine, [request()])


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_ends_its_own_request_alone(rule: Verification, temperature: float) -> None:
    def law(context: tuple[int, ...]) -> torch.Tensor:
        return LAW(context) * (math.nan if context[0] == 9 and len(context) > 6 else 1)

    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    engine = fakes.fake_engine(law, vocab_size=VOCAB, draft_law=LAW, verification=rule)
    outputs = fakes.run(
        engine, [request("sick", token_ids=(9, 2, 3), sampling=params), request("well", sampling=params)]
    )
    assert outputs.finished["sick"].reason is FinishReason.ERROR
    assert "not finite" in outputs.finished["sick"].error
    assert len(outputs.tokens["sick"]) <= 4, "tokens out of rows that were no numbers"
    assert outputs.finished["well"].reason is FinishReason.LENGTH


def test_nobody_finds_the_pages_of_a_request_that_failed() -> None:
    """What made its rows no numbers may be in their keys and values."""
    healthy_until = 20

    def law(context: tuple[int, ...]) -> torch.Tensor:
        return LAW(context) * (math.nan if len(context) > healthy_until else 1)

    engine = fakes.fake_engine(law, vocab_size=VOCAB, page_size=4)
    asked = [request(name, token_ids=PROMPT * 4) for name in ("sick", "first", "second")]
    assert fakes.run(engine, asked[:1]).finished["sick"].reason is FinishReason.ERROR
    healthy_until = 100
    assert fakes.run(engine, asked[1:2]).finished["first"].cached_prompt_tokens == 0
    assert fakes.run(engine, asked[2:]).finished["second"].cached_prompt_tokens == 8


@pytest.mark.parametrize("rule", list(Verification))
def test_a_draft_that_is_the_target_is_always_right(rule: Verification) -> None:
    """Only if it draws from the same law: temperature, filters and, under the coupled rule, noise."""
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=LAW, num_draft_tokens=4, verification=rule)
    laws = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 2.0}, {"top_k": 3, "temperature": 1.0}, {}]
    requests = [request(str(i), sampling=SamplingParams(seed=i, max_tokens=25, **law)) for i, law in enumerate(laws)]
    for ended in fakes.run(engine, requests).finished.values():
        assert ended.stats.acceptance_rate == 1.0


def test_a_plain_request_leaves_the_draft_budget_to_others() -> None:
    engine = fakes.fake_engine(
        LAW, vocab_size=VOCAB, draft_law=LAW, num_draft_tokens=4, max_batch_tokens=6, max_batch_size=2
    )
    plain = request("plain", speculation=SpeculationParams(proposer="none"))
    outputs = fakes.run(engine, [plain, request("fast")])
    assert outputs.finished["plain"].speculation.num_draft_tokens == 0
    assert outputs.finished["fast"].stats.acceptance_length > 4


def test_a_draft_model_that_fails_once_recovers() -> None:
    """Its K/V of the failed pass is unknown, so it is fed again from the start, and is right again."""
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=LAW, num_draft_tokens=3)
    draft = engine.proposers.by_name["model"].runner
    forward, calls = draft.forward, []

    def fail_third(feeds: object) -> torch.Tensor:
        calls.append(feeds)
        if len(calls) == 3:
            raise RuntimeError("once")
        return forward(feeds)

    draft.forward = fail_third
    outputs = fakes.run(engine, [request()], failures=1)
    assert outputs.tokens["r"] == plain_tokens()
    assert outputs.finished["r"].stats.acceptance_rate == 1.0


def test_keys_and_values_are_of_one_salt() -> None:
    """The target's and the draft model's: both begin behind what they find in the prefix cache."""
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=LAW, page_size=4)
    draft, found = engine.proposers.by_name["model"].runner, []
    for salt in ("one", "two", "one"):
        draft.batches.clear()
        done = fakes.run(engine, [request(token_ids=PROMPT * 4, cache_salt=salt)]).finished["r"]
        found.append((done.cached_prompt_tokens, draft.batches[0][0].start))
    assert found == [(0, 0), (0, 0), (8, 8)]


def test_draft_catches_up_within_the_token_budget() -> None:
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=LAW, max_batch_tokens=6, max_batch_size=2)
    outputs = fakes.run(engine, [request(token_ids=tuple(range(10)) * 3), request("b")])
    draft = engine.proposers.by_name["model"].runner
    assert max(sum(len(feed.tokens) for feed in feeds) for feeds in draft.batches) <= 6
    assert outputs.finished["r"].stats.accepted > 0


def test_own_seed_is_reported_and_replays() -> None:
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB)
    unseeded = SamplingParams(temperature=1.5, max_tokens=20)
    first = fakes.run(engine, [request("a", sampling=unseeded), request("b", sampling=unseeded)])
    assert first.tokens["a"] != first.tokens["b"]
    again = SamplingParams(temperature=1.5, max_tokens=20, seed=first.finished["a"].seed)
    assert fakes.run(engine, [request("c", sampling=again)]).tokens["c"] == first.tokens["a"]


def test_every_output_has_a_seed_of_its_own() -> None:
    sampling = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=20)
    found = fakes.run(fakes.fake_engine(LAW, vocab_size=VOCAB), [request(sampling=sampling)])
    assert len({end.seed for end in found.finished.values()}) == len(set(map(tuple, found.tokens.values()))) == 4


def test_log_probabilities_are_the_models_own_whatever_shapes_the_law() -> None:
    shaped = {"temperature": 0.5, "repetition_penalty": 1.5, "logit_bias": {3: 4.0}, "banned_token_ids": (5,)}
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=LAW)
    found = fakes.run(engine, [request(sampling=SamplingParams(max_tokens=20, seed=1, logprobs=2, **shaped))])
    tokens = found.tokens["r"]
    for i, told in enumerate(found.logprobs["r"]):
        law = LAW((*PROMPT, *tokens[:i])).double().log_softmax(-1)
        assert told.logprob == pytest.approx(law[tokens[i]].item())
        assert [top.token_id for top in told.top] == law.topk(2).indices.tolist()


def test_effective_speculation_is_clamped_and_echoed() -> None:
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB, num_draft_tokens=4)
    asked = {
        "more": SpeculationParams(num_draft_tokens=16, mode=SpeculationMode.FIXED),
        "less": SpeculationParams(num_draft_tokens=2, verification=Verification.REJECTION),
        "off": SpeculationParams(mode=SpeculationMode.OFF, num_draft_tokens=4),
    }
    outputs = fakes.run(engine, [request(name, speculation=wish) for name, wish in asked.items()])
    effective = {name: ended.speculation for name, ended in outputs.finished.items()}
    assert (effective["more"].num_draft_tokens, effective["more"].mode) == (4, SpeculationMode.FIXED)
    assert (effective["less"].num_draft_tokens, effective["less"].verification) == (2, Verification.REJECTION)
    assert (effective["off"].num_draft_tokens, effective["off"].proposer) == (0, "none")
    assert outputs.finished["off"].stats.drafted == 0


def test_bad_input_names_all_fields_at_once() -> None:
    """Also what no message of the protocol can hold; the others are in a table of tests/e2e."""
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB)
    bad = SamplingParams(temperature=math.nan, top_p=2, top_k=-3, seed=2**64, max_tokens=63)
    with pytest.raises(InvalidRequest) as caught:
        engine.check(request(sampling=bad, token_ids=(0, -1)))
    wrong = ("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.seed", "stopping.max_tokens")
    assert [violation.field for violation in caught.value.violations] == [*wrong, "token_ids[1]"]
    assert not engine.has_work
    assert fakes.run(engine, [request()]).tokens["r"] == plain_tokens()


def test_unknown_proposer_and_live_id() -> None:
    engine = fakes.fake_engine(LAW, vocab_size=VOCAB)
    with pytest.raises(Unsupported, match="'medusa'"):
        engine.check(request(speculation=SpeculationParams(proposer="medusa")))
    engine.add(request())
    with pytest.raises(DuplicateRequest, match="'r'"):
        engine.add(request())
    engine.finish_all(FinishReason.ABORTED)
    engine.add(request())
    assert len(engine.finish_all(FinishReason.ABORTED)) == 1


def test_an_engine_that_served_nobody_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby, which is always idle, must not overwrite what the engine beside it has learned."""
    saved: list[object] = []
    monkeypatch.setattr("pilotfish.engine.engine.learned.keep", lambda *_: saved.append(1))
    monkeypatch.setattr("pilotfish.engine.engine.learned.recall", lambda *_: True)
    engine = engine_with(clock=itertools.count(step=1000).__next__)
    engine.recall()
    engine.idle_tick()
    assert not saved
    fakes.run(engine, [request()])
    engine.idle_tick()
    engine.idle_tick()
    assert len(saved) == 1


def test_the_length_of_every_output_is_learned_once() -> None:
    control = AdaptiveK()
    engine = engine_with(control=control, speculation=SpeculationMode.AUTO)
    asked = [request(name=str(i), sampling=SamplingParams(max_tokens=i)) for i in (3, 5, 7)]
    lengths = [len(fakes.run(engine, [one]).tokens[one.request_id]) for one in asked]
    expected = 0.0, 0.0
    for length in lengths:
        expected = KEEP * expected[0] + length, KEEP * expected[1] + 1
    assert control._ended == pytest.approx(expected)


@pytest.mark.parametrize("mode", SpeculationMode)
def test_a_sequence_that_is_over_is_not_kept_by_anybody(mode: SpeculationMode) -> None:
    before = live_sequences()
    engine = engine_with(control=AdaptiveK(), speculation=mode)
    fakes.run(engine, [request(f"r{i}") for i in range(9)])
    for _ in range(3):
        engine.add(request("cut"))
        engine.step()
        engine.finish("cut", FinishReason.CANCELLED)
    assert not engine.has_work
    assert live_sequences() - before <= 2, "a proposer knows who came last, and whom it tried last"


def live_sequences() -> int:
    gc.collect()
    return sum(type(thing) is Sequence for thing in gc.get_objects())
