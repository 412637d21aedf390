"""Defects that users of other engines reported, by project and number: each of these tests fails on an engine that
has the defect. What was said there is told in a sentence; the code here is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from scipy import stats

from engine.engine import Engine
from engine.errors import GrammarFault
from engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from engine.proposers.scripted import ScriptedProposer
from engine.types import FinishReason, Request
from tests import fakes

VOCAB = 23
LAW = fakes.hashed_law(VOCAB)
OTHER_LAW = fakes.hashed_law(VOCAB, salt=1)
PROMPT = (1, 2, 3, 1, 2, 3, 4, 5, 1, 2, 3, 4)
GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=7)


def engine(draft_law: fakes.Law = LAW, **options: object) -> Engine:
    """Table models; by default the draft is the target, so that every draft that is made well is kept."""
    options = {"num_draft_tokens": 4, "page_size": 4, "num_pages": 200, **options}
    return fakes.fake_engine(LAW, vocab_size=VOCAB, draft_law=draft_law, **options)


def request(name: str = "r", sampling: SamplingParams = GREEDY, prompt: Seq[int] = PROMPT, **rest: object) -> Request:
    return Request(request_id=name, token_ids=tuple(prompt), sampling=sampling, **rest)


def speculation(k: int = 4, proposer: str = "model", **rest: object) -> SpeculationParams:
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=k, proposer=proposer, **rest)


def tokens(sampling: SamplingParams = GREEDY, proposer: str = "none", k: int = 4, **options: object) -> list[int]:
    """One request alone."""
    asked = request(sampling=sampling, speculation=speculation(k, proposer))
    return fakes.run(engine(OTHER_LAW, **options), [asked]).tokens["r"]


def right(sampling: SamplingParams) -> ScriptedProposer:
    future = tokens(sampling)
    return ScriptedProposer(lambda s, k: future[s.num_generated :][:k])


# ---------------------------------------------------------------------------------- exactness and reproducibility


def test_vllm_41758_ngram_lookup_does_not_change_greedy_output() -> None:
    """20 of 20 comparable prompts diverged."""
    for i in range(20):
        prompt = tuple((i * j + j // 3) % VOCAB for j in range(1, 20)) * 2
        plain, drafted = (
            fakes.run(engine(), [request(prompt=prompt, speculation=speculation(4, name))]).tokens["r"]
            for name in ("none", "ngram")
        )
        assert drafted == plain


def test_vllm_22987_a_seeded_sample_is_the_same_with_and_without_speculation() -> None:
    """About 10 % of outputs drifted, and a seed did not help."""
    for seed in range(20):
        sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        assert tokens(sampling, "model") == tokens(sampling)


def test_vllm_47386_noise_of_the_draft_does_not_bias_the_output() -> None:
    """Draft noise used again for the resample: the first token came at 63.04 % where 60.00 % was meant."""
    law = torch.tensor([0.6, 0.3, 0.1]).log()
    draft = torch.tensor([0.3, 0.3, 0.4]).log()
    for rule in Verification:
        assert_first_token_follows([0.6, 0.3, 0.1], law, draft, rule)


def test_openvino_inverted_ratio_keeps_the_target_law() -> None:
    """By an inverted ratio (.6, .3, .1), drafted from (.3, .3, .4), came out as (.37, .29, .35)."""
    for rule in Verification:
        assert_first_token_follows(
            [0.6, 0.3, 0.1], *(torch.tensor(p).log() for p in ([0.6, 0.3, 0.1], [0.3, 0.3, 0.4])), rule, 600
        )


def assert_first_token_follows(
    law: list[float], target: torch.Tensor, draft: torch.Tensor, rule: Verification, draws: int = 3000
) -> None:
    """The second token of many two-token outputs: the first one to be drafted at a verified position."""
    llm = fakes.fake_engine(
        lambda _: target,
        vocab_size=3,
        draft_law=lambda _: draft,
        num_pages=draws,
        max_batch_size=500,
        max_batch_tokens=4000,
        page_size=8,
        max_model_len=8,
        num_draft_tokens=2,
        verification=rule,
    )
    requests = [
        Request(request_id=str(i), token_ids=(0,), sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=4))
        for i in range(draws)
    ]
    outputs = fakes.run(llm, requests)
    for position in (0, 1, 2):
        counts = [sum(t[position] == token for t in outputs.tokens.values()) for token in range(3)]
        assert stats.chisquare(counts, [p * draws for p in law]).pvalue > 1e-4, (rule, position, counts)


def test_vllm_6038_9441_seeded_and_unseeded_requests_share_a_batch() -> None:
    """Seeds were ignored, or outputs became gibberish, when only some requests of a batch had one."""
    others = [request(f"u{i}", SamplingParams(max_tokens=20, temperature=1.0)) for i in range(6)]
    mixed = [*others[:3], request("r", SAMPLED), *others[3:]]
    assert fakes.run(engine(OTHER_LAW), mixed).tokens["r"] == tokens(SAMPLED)


def test_tensorrt_llm_8285_the_same_seed_gives_the_same_output_with_a_drafter() -> None:
    """Drafted and standard decoding differed with the same seed, which was called no bug."""
    for verification_free in (SAMPLED, SamplingParams(max_tokens=20, temperature=1.4, top_p=0.8, seed=3)):
        assert tokens(verification_free, "model", 3) == tokens(verification_free)


def test_tensorrt_llm_19487_requests_without_a_seed_do_not_share_one() -> None:
    """Unseeded requests drew from one stream: identical samples at low concurrency."""
    sampling = SamplingParams(max_tokens=20, temperature=1.0)
    outputs = fakes.run(engine(), [request(str(i), sampling) for i in range(8)])
    assert len({tuple(t) for t in outputs.tokens.values()}) == 8
    assert len({f.seed for f in outputs.finished.values()}) == 8


def test_sglang_33395_a_changing_batch_does_not_change_a_seeded_output() -> None:
    """12 different outputs in 12 trials, because drafts were drawn from the process's generator."""
    seen = set()
    for trial in range(12):
        torch.manual_seed(trial)
        mates = [request(f"m{i}", SamplingParams(max_tokens=3 + i, temperature=1.2)) for i in range(trial)]
        seen.add(tuple(fakes.run(engine(OTHER_LAW), [*mates, request("r", SAMPLED)]).tokens["r"]))
    assert seen == {tuple(tokens(SAMPLED))}


def test_mlx_lm_1423_greedy_output_is_the_same_with_a_draft_model() -> None:
    assert tokens(GREEDY, "model") == tokens(GREEDY)


@pytest.mark.parametrize("k", range(9))
def test_llama_cpp_23302_sglang_32038_34959_no_number_of_drafts_changes_greedy_tokens(k: int) -> None:
    """At most two drafts left the tokens as they were, three changed them; identifiers changed at some K only."""
    assert tokens(GREEDY, "model", k, num_draft_tokens=8) == tokens(GREEDY)


def test_arctic_inference_143_equal_prompts_in_one_batch_get_equal_answers() -> None:
    outputs = fakes.run(engine(OTHER_LAW), [request(str(i)) for i in range(16)])
    assert len({tuple(t) for t in outputs.tokens.values()}) == 1


def test_tgi_randomness_does_not_depend_on_how_many_drafts_were_tried() -> None:
    """Each step drew K + 1 samples from a request's generator, accepted or not, so the text hung on K."""
    assert len({tuple(tokens(SAMPLED, "model", k, num_draft_tokens=8)) for k in range(9)}) == 1


# ------------------------------------------------------------------------------------------ the draft's own state


def acceptance(outputs: fakes.Outputs, name: str = "r") -> float:
    return outputs.finished[name].stats.acceptance_rate


def test_tensorrt_llm_16888_drafting_resumes_after_a_time_without() -> None:
    """The draft's K/V was not written while K was 0, and acceptance collapsed in silence afterwards."""
    llm = engine()
    llm.add(request(sampling=SamplingParams(max_tokens=40), speculation=speculation(4)))
    sequence = llm._live["r"][0]
    events = []
    for step in range(60):
        if not llm.has_work:
            break
        k = 0 if 3 <= step < 12 else 4
        sequence.speculation = type(sequence.speculation)(
            mode=SpeculationMode.FIXED, num_draft_tokens=k, proposer="model", verification=Verification.COUPLED
        )
        events += llm.step().events
    assert sequence.stats.acceptance_rate == 1.0, "the draft is the target: whatever it saw right, it says right"
    assert [t for event in events for t in event.token_ids] == tokens(SamplingParams(max_tokens=40))


def test_vllm_47930_a_warm_prefix_cache_keeps_the_draft_right() -> None:
    """With prefix caching on, acceptance fell below one percent: restored pages held nothing of the draft's."""
    llm = engine()
    cold = fakes.run(llm, [request()])
    warm = fakes.run(llm, [request()])
    assert warm.finished["r"].cached_prompt_tokens == 8
    assert warm.tokens == cold.tokens
    assert acceptance(warm) == acceptance(cold) == 1.0


def test_mlxcel_994_the_draft_is_rewound_by_exactly_what_was_refused() -> None:
    """Off by two, and the draft starves. Right: it keeps what it had been fed of what stayed."""
    llm = engine(OTHER_LAW)
    llm.add(request(sampling=SAMPLED))
    sequence = llm._live["r"][0]
    while True:
        before, fed = len(sequence.tokens), sequence.stats.drafted
        llm.step()
        if not llm.has_work:
            break
        if sequence.stats.drafted > fed:  # the draft was fed the newest token and all its drafts but the last
            assert sequence.draft.kv_len == min(before + sequence.stats.drafted - fed - 1, len(sequence.tokens) - 1)
        assert sequence.target.kv_len == len(sequence.tokens) - 1


def test_vllm_41838_acceptance_does_not_fall_over_time() -> None:
    """Acceptance length fell over hours of serving."""
    llm = engine()
    rates = [acceptance(fakes.run(llm, [request(prompt=(i % VOCAB, 2, i // VOCAB, 5))])) for i in range(150)]
    assert set(rates) == {1.0}


# ------------------------------------------------------------------------------------------------- request features


def with_logprobs(proposer: str, **sampling: object) -> fakes.Outputs:
    wanted = SamplingParams(max_tokens=20, logprobs=3, **sampling)
    llm = engine(OTHER_LAW, proposers={"right": right(wanted)})
    return fakes.run(llm, [request(sampling=wanted, speculation=speculation(4, proposer))])


def test_vllm_34497_sglang_10660_every_token_has_its_logprob_under_speculation() -> None:
    for proposer in ("none", "ngram", "model", "right"):
        outputs = with_logprobs(proposer)
        assert len(outputs.logprobs["r"]) == len(outputs.tokens["r"]) == 20
        assert outputs.logprobs == with_logprobs("none").logprobs


def test_llama_cpp_27972_logprobs_of_accepted_drafts_are_not_zero() -> None:
    outputs = with_logprobs("right")
    assert any(outputs.from_draft["r"])
    for logprob, is_draft in zip(outputs.logprobs["r"], outputs.from_draft["r"], strict=True):
        assert logprob.logprob < 0 or not is_draft
        assert logprob.top[0].logprob >= logprob.logprob


def test_tensorrt_llm_18401_logprobs_are_served_and_not_refused_under_speculation() -> None:
    outputs = with_logprobs("model", temperature=1.0, seed=4)
    assert outputs.finished["r"].reason is FinishReason.LENGTH
    assert all(math.isfinite(entry.logprob) for entry in outputs.logprobs["r"])


def test_vllm_18908_prompt_logprobs_are_whole_with_a_warm_prefix_cache() -> None:
    wanted = SamplingParams(max_tokens=4, prompt_logprobs=1)
    llm = engine()
    first = fakes.run(llm, [request(sampling=wanted)])
    again = fakes.run(llm, [request(sampling=wanted)])
    assert len(first.prompt_logprobs["r"]) == len(PROMPT)
    assert first.prompt_logprobs == again.prompt_logprobs
    assert first.prompt_logprobs["r"][0] is None
    assert None not in first.prompt_logprobs["r"][1:]


@pytest.mark.parametrize("proposer", ["none", "ngram", "model", "right"])
@pytest.mark.parametrize("option", [{"min_p": 0.2}, {"logit_bias": {3: 5.0, 4: -100.0}}], ids=["min_p", "logit_bias"])
def test_vllm_42744_38202_min_p_and_logit_bias_hold_at_verified_positions(option: dict, proposer: str) -> None:
    """Refused with speculation, and not applied there when forced."""
    sampling = SamplingParams(max_tokens=20, temperature=1.2, seed=5, **option)
    assert tokens(sampling, proposer, proposers={"right": right(sampling)}) == tokens(sampling)
    assert tokens(sampling) != tokens(SamplingParams(max_tokens=20, temperature=1.2, seed=5))


def test_sglang_26330_bans_are_not_bypassed_by_accepted_drafts() -> None:
    """A custom processor was not asked about drafts. Here drafts of banned tokens come on purpose."""
    unbanned = tokens(GREEDY)
    sampling = SamplingParams(max_tokens=20, banned_token_ids=tuple(set(unbanned[::2])))
    eager = ScriptedProposer(lambda s, k: unbanned[s.num_generated :][:k])
    got = fakes.run(
        engine(proposers={"eager": eager}), [request(sampling=sampling, speculation=speculation(4, "eager"))]
    )
    assert not set(got.tokens["r"]) & set(sampling.banned_token_ids)
    assert got.tokens["r"] == tokens(sampling)


def test_tgi_penalties_count_the_drafts_before_a_position() -> None:
    """Processors saw the text without the drafts, at every drafted position."""
    sampling = SamplingParams(max_tokens=20, frequency_penalty=2.0, repetition_penalty=1.5)
    assert tokens(sampling, "right", 8, num_draft_tokens=8, proposers={"right": right(sampling)}) == tokens(sampling)


class Alternating:
    """A structure for tests: even and odd tokens by turns, at most `length`, then end token 0."""

    def __init__(self, length: int = 9, fault_at: int | None = None) -> None:
        self.length, self.fault_at, self.taken = length, fault_at, []

    def start(self) -> Alternating:
        return Alternating(self.length, self.fault_at)

    def fits(self, token: int) -> bool:
        if self.taken and self.taken[-1] == 0:
            return False
        return token == 0 if len(self.taken) == self.length else token != 0 and token % 2 == len(self.taken) % 2

    def fill(self, mask: torch.Tensor) -> None:
        if self.fault_at is not None and len(self.taken) >= self.fault_at:
            raise GrammarFault("the structure became too costly")
        mask.copy_(torch.tensor([self.fits(token) for token in range(VOCAB)]))

    def advance(self, tokens: Seq[int]) -> int:
        for i, token in enumerate(tokens):
            if not self.fits(token):
                return i
            self.taken.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.taken)
        del self.taken[len(self.taken) - num_tokens :]


def structured(name: str, proposer: str, sampling: SamplingParams, grammar: Alternating) -> Request:
    return request(name, sampling, grammar=grammar, speculation=speculation(4, proposer))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_vllm_27969_sglang_9187_structure_and_speculation_together(sampling: SamplingParams) -> None:
    """Crashes, and structures left in a state of refused drafts."""

    def run(proposer: str, others: int) -> list[int]:
        llm = engine(OTHER_LAW, eos=frozenset({0}))
        mates = [request(f"m{i}", SAMPLED) for i in range(others)]
        return fakes.run(llm, [*mates, structured("r", proposer, sampling, Alternating())]).tokens["r"]

    want = run("none", 0)
    assert [t % 2 for t in want[:-1]] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert want[-1] == 0
    for proposer in ("none", "ngram", "model"):
        assert run(proposer, 3) == want


def test_openvino_4081_a_structure_steers_its_drafts() -> None:
    """Drafts that the structure forbids are work for nothing: the draft is the target here, so all must be kept."""
    llm = engine(eos=frozenset({0}))
    outputs = fakes.run(llm, [structured("r", "model", SAMPLED, Alternating())])
    assert acceptance(outputs) == 1.0


def test_sglang_20148_a_structure_that_fails_ends_its_own_request_alone() -> None:
    llm = engine(OTHER_LAW)
    bad = structured("bad", "model", GREEDY, Alternating(fault_at=5))
    outputs = fakes.run(llm, [request("a", SAMPLED), bad, request("b")])
    assert outputs.finished["bad"].reason is FinishReason.ERROR
    assert outputs.finished["bad"].error == "the structure became too costly"
    assert len(outputs.tokens["bad"]) == 5
    assert outputs.tokens["a"] == tokens(SAMPLED)
    assert outputs.tokens["b"] == tokens(GREEDY)


# ------------------------------------------------------------------------------------- batching, cancelling, counting


def test_transformers_32165_mlx_engine_269_speculation_in_a_ragged_batch() -> None:
    """Assisted generation takes one sequence at a time; others refuse it in batches."""
    prompts = [PROMPT[: 1 + i % 12] for i in range(16)]
    alone = [fakes.run(engine(OTHER_LAW), [request(prompt=p)]).tokens["r"] for p in prompts]
    together = fakes.run(engine(OTHER_LAW), [request(str(i), prompt=p) for i, p in enumerate(prompts)])
    assert [together.tokens[str(i)] for i in range(16)] == alone


def test_sglang_10090_1500_requests_at_50_in_parallel() -> None:
    """A crash on merging batches after one or two thousand requests."""
    llm = engine(max_batch_size=50, max_batch_tokens=200)
    outputs, want, next_one = fakes.Outputs(), {}, 0
    while next_one < 1500 or llm.has_work:
        while next_one < 1500 and llm.num_running + llm.num_waiting < 50:
            sampling = SamplingParams(max_tokens=1 + next_one % 5)
            want[str(next_one)] = sampling.max_tokens
            llm.add(request(str(next_one), sampling, prompt=PROMPT[: 1 + next_one % 7]))
            next_one += 1
        outputs.take(llm.step().events)
    assert {name: len(t) for name, t in outputs.tokens.items()} == want
    assert llm.free_pages == llm.total_pages


def test_sglang_39216_35255_a_caller_who_leaves_costs_the_others_nothing_and_decodes_no_further() -> None:
    """A disconnect crashed the engine; zombies decoded to their limit."""
    llm = engine(OTHER_LAW)
    for name in ("stays", "leaves"):
        llm.add(request(name, SAMPLED))
    outputs = fakes.Outputs()
    outputs.take(llm.step().events)
    outputs.take(llm.finish("leaves", FinishReason.CANCELLED))
    held = len(outputs.tokens["leaves"])
    while llm.has_work:
        outputs.take(llm.step().events)
    assert outputs.tokens["stays"] == tokens(SAMPLED)
    assert len(outputs.tokens["leaves"]) == held


def test_vllm_46283_pages_of_an_ended_request_come_back_at_once() -> None:
    """K/V blocks of an aborted request were never reclaimed."""
    for steps in range(6):
        llm = engine(OTHER_LAW, max_batch_tokens=64)
        llm.add(request(sampling=SAMPLED, prompt=PROMPT * 3))
        for _ in range(steps):
            llm.step()
        llm.finish("r", FinishReason.CANCELLED)
        llm.check_invariants()
        assert llm.free_pages == llm.total_pages


def test_vllm_6993_7569_speculation_is_turned_off_and_on_per_request() -> None:
    llm = engine()
    off = SpeculationParams(mode=SpeculationMode.OFF)
    outputs = fakes.run(llm, [request("off", speculation=off), request("on")])
    assert outputs.finished["off"].stats.drafted == 0
    assert outputs.finished["off"].speculation.mode is SpeculationMode.OFF
    assert outputs.finished["on"].stats.drafted > 0
    assert outputs.tokens["off"] == outputs.tokens["on"]


def test_vllm_44487_each_request_has_its_own_acceptance_by_position() -> None:
    outputs = fakes.run(engine(), [request("all"), request("none", speculation=speculation(0, "none"))])
    told = outputs.finished["all"].stats
    assert told.accepted_per_position[0] == told.rounds
    assert sum(told.accepted_per_position) == told.accepted
    assert outputs.finished["none"].stats.accepted_per_position == ()


def test_openvino_and_tensorrt_llm_mix_drafters_in_one_batch() -> None:
    """One method per engine, or mutually exclusive ones: here each sequence has its own."""
    names = ("none", "ngram", "model", "right")
    llm = engine(OTHER_LAW, proposers={"right": right(SAMPLED)})
    outputs = fakes.run(llm, [request(name, SAMPLED, speculation=speculation(4, name)) for name in names])
    assert {tuple(outputs.tokens[name]) for name in names} == {tuple(tokens(SAMPLED))}
    assert [outputs.finished[name].speculation.proposer for name in names] == list(names)
