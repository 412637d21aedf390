"""More defects that users of other engines reported, told as in `test_defects.py`: at the context's end, of prefix
caches, of prompts in chunks, and of laws that are not what was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from engine.control.controller import FixedK
from engine.engine import Engine
from engine.params import SamplingParams, Verification
from engine.proposers.scripted import ScriptedProposer
from engine.types import FinishReason, Sequence
from tests import fakes
from tests.covering import covering
from tests.exactness.test_defects import (
    GREEDY,
    LAW,
    OTHER_LAW,
    PROMPT,
    SAMPLED,
    VOCAB,
    assert_first_token_follows,
    engine,
    request,
    right,
    speculation,
    tokens,
)

LONGEST = 64  # tokens of a sequence in these engines
DRAFTING = ("ngram", "model", "right")


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("page_size", [1, 4])
def test_sglang_33579_no_page_leaks_where_the_context_ends(page_size: int, k: int) -> None:
    """Room for drafts was reserved beyond the last position: it spilled into a neighbour's and never came back."""
    wanted = SamplingParams(max_tokens=None, seed=3, temperature=1.0)
    prompts = [PROMPT * 4 + PROMPT[:i] for i in range(12)]  # so that each K meets the end at every distance
    llm = engine(page_size=page_size, num_draft_tokens=16, num_pages=1000, max_batch_tokens=1000)
    asked = [request(str(i), wanted, prompt, speculation=speculation(k)) for i, prompt in enumerate(prompts)]
    outputs = fakes.run(llm, [*asked, request("neighbour", SAMPLED)])  # checks that all pages are free in the end
    assert outputs.tokens["neighbour"] == tokens(SAMPLED)
    for i, prompt in enumerate(prompts):
        plain = fakes.run(engine(), [request("r", wanted, prompt, speculation=speculation(0, "none"))])
        assert outputs.tokens[str(i)] == plain.tokens["r"]
        assert len(prompt) + len(outputs.tokens[str(i)]) == LONGEST
        assert outputs.finished[str(i)].reason is FinishReason.LENGTH


class NoneFrom(FixedK):
    """As many drafts as may be, and none from one step on."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        self._left -= 1
        drafts = super().choose(sequences, limits, budget, prompt_rows)
        return drafts if self._left >= 0 else [0] * len(drafts)


@pytest.mark.parametrize("step", [0, 3])
def test_vllm_51510_a_choice_of_no_drafts_costs_no_drafting(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K was 0, and the drafter ran all its steps for drafts that nobody could use."""
    llm, ran = engine(control=NoneFrom(step)), []
    forward = fakes.TableModel.forward
    monkeypatch.setattr(fakes.TableModel, "forward", lambda model, feeds: ran.append(model) or forward(model, feeds))
    for i in range(3):
        llm.add(request(str(i), SAMPLED))
    while llm.has_work:
        ran.clear()
        step -= 1
        drafted = llm.step().stats.drafted
        assert (len(set(map(id, ran))) > 1) == (drafted > 0)
        assert not drafted or step >= 0


def cached(llm: Engine, prompt: Seq[int], sampling: SamplingParams, proposer: str) -> tuple[int, list[int]]:
    """How much of a prompt was found cached, and what came."""
    outputs = fakes.run(llm, [request("r", sampling, prompt, speculation=speculation(4, proposer))])
    return outputs.finished["r"].cached_prompt_tokens, outputs.tokens["r"]


@pytest.mark.parametrize("proposer", ["none", *DRAFTING])
def test_sglang_32459_vllm_54360_drafts_cost_no_prefix_hits(proposer: str) -> None:
    """Reuse fell from 97 % to half or to nothing when drafts were turned on. Right: every whole page is found."""
    llm = engine(OTHER_LAW, max_model_len=200, proposers={"right": right(SAMPLED)})
    prompt = PROMPT
    for turn in range(4):
        found, came = cached(llm, prompt, SAMPLED, proposer)
        known = len(prompt) - 3 - 1 if turn else 0  # all but what this turn added, and but the last output's last token
        assert found == known // 4 * 4
        prompt = (*prompt, *came, 7, 8, 9)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("proposer", DRAFTING)
def test_vllm_53912_50188_repeats_with_a_warm_cache_are_the_same(proposer: str, sampling: SamplingParams) -> None:
    """With drafts and the prefix cache on, repeats of a prompt came out corrupted."""
    llm = engine(OTHER_LAW, proposers={"right": right(sampling)})
    for repeat in range(5):
        found, came = cached(llm, PROMPT, sampling, proposer)
        assert came == tokens(sampling)
        assert (found > 0) == (repeat > 0)


@pytest.mark.parametrize(("chunk", "proposer"), covering([1, 2, 5, 7, 64], ["none", *DRAFTING], every=4))
def test_vllm_53488_log_probabilities_of_a_prompt_in_chunks(chunk: int, proposer: str) -> None:
    """They were wrong when the prompt was read in several steps."""
    wanted = SamplingParams(max_tokens=6, prompt_logprobs=0, seed=3)
    llm = engine(OTHER_LAW, max_batch_tokens=chunk, max_batch_size=1, proposers={"right": right(wanted)})
    outputs = fakes.run(llm, [request("r", wanted, speculation=speculation(4, proposer))])
    first, *scores = outputs.prompt_logprobs["r"]
    assert first is None
    law = [float(LAW(PROMPT[:i]).log_softmax(-1)[PROMPT[i]]) for i in range(1, len(PROMPT))]
    assert [score.logprob for score in scores] == pytest.approx(law, abs=1e-5)


def test_vllm_ascend_17149_the_target_sees_no_refused_draft() -> None:
    """K/V of refused drafts stayed visible. A table model answers by all that it can see."""
    future = tokens(SAMPLED)
    for wrong_at in range(4):  # drafts up to there are kept, the others are refused
        wrong = ScriptedProposer(
            lambda s, k, at=wrong_at: [
                (token + (i >= at)) % VOCAB for i, token in enumerate(future[s.num_generated :][:k])
            ]
        )
        assert tokens(SAMPLED, "wrong", proposers={"wrong": wrong}) == future


@pytest.mark.parametrize("together", range(1, 9))
def test_1cat_vllm_656_sampled_drafts_of_several_sequences_are_their_own(together: int) -> None:
    """Sampled drafts corrupted the text as soon as more than two sequences ran."""
    laws = [SamplingParams(max_tokens=20, temperature=1.0 + i / 10, seed=i) for i in range(together)]
    outputs = fakes.run(engine(OTHER_LAW), [request(str(i), law, PROMPT[i:]) for i, law in enumerate(laws)])
    for i, law in enumerate(laws):
        alone = fakes.run(engine(), [request("r", law, PROMPT[i:], speculation=speculation(0, "none"))])
        assert outputs.tokens[str(i)] == alone.tokens["r"]


@pytest.mark.parametrize("rule", Verification)
def test_deepspec_31_drafts_are_judged_by_the_law_that_drew_them(rule: Verification) -> None:
    """Drafts were drawn from a law in bfloat16 and judged by the same in float32: here these two are far apart."""
    exact = torch.tensor([0.5, 0.3, 0.2]).log() + 200  # bfloat16 has steps of 1 there
    rounded = exact.bfloat16()
    assert not torch.allclose(rounded.float().softmax(-1), exact.softmax(-1), atol=0.05)
    assert_first_token_follows([0.6, 0.3, 0.1], torch.tensor([0.6, 0.3, 0.1]).log(), rounded, rule)
