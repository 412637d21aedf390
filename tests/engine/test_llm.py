"""The offline API: text and token ids in, completions out, stop strings included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pilotfish.engine import LLM, FinishReason, InvalidRequest, ModelError, SamplingParams
from pilotfish.engine.params import Guided, SpeculationMode, SpeculationParams, ThinkingBudget
from pilotfish.models import embedded_draft, embedded_target
from tests import zoo


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(embedded_target(), embedded_draft(), threads=1, max_batch_size=16)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(embedded_target(), speculation="off", threads=1, max_batch_size=16)


def test_text_is_the_decoded_tokens(llm: LLM, plain: LLM) -> None:
    prompts = ["def add(a, b):\n", "class Stack:\n", "import os\n"]
    drafting = SpeculationParams(mode=SpeculationMode.FIXED)  # AUTO would try one round and find it dear
    got = llm.generate(prompts, SamplingParams(max_tokens=24), speculation=drafting)
    want = plain.generate(prompts, SamplingParams(max_tokens=24))
    assert [c.text for c in got] == [c.text for c in want]
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert [c.text for c in got] == [llm.codec.decode(c.token_ids) for c in got]
    assert sum(c.stats.accepted for c in got) > 0
    assert all(sum(c.from_draft) == c.stats.accepted for c in got)


def test_one_prompt_many_and_token_ids(llm: LLM) -> None:
    text = "def add(a, b):\n"
    ids = list(llm.codec.encode(text))
    params = SamplingParams(max_tokens=8)
    alone = llm.generate(text, params)
    assert len(alone) == 1
    assert [c.token_ids for c in llm.generate([text, ids], params)] == [alone[0].token_ids] * 2
    assert llm.generate(ids, params)[0].token_ids == alone[0].token_ids
    assert llm.generate([], params) == []
    assert llm.generate(np.array(ids), params)[0].token_ids == alone[0].token_ids
    for mixed in (["a", 5], [5, "a"], [5, 6.0]):
        with pytest.raises(InvalidRequest, match=r"integer|mixes"):
            llm.generate(mixed, params)


@pytest.mark.parametrize("stop", ["return", "\n    ", "self."])
def test_a_stop_string_cuts_as_one_by_one_decoding_would(llm: LLM, plain: LLM, stop: str) -> None:
    prompt, params = "class Stack:\n    def push(self, item):\n", SamplingParams(max_tokens=30)
    [got], [want] = (x.generate(prompt, replace(params, stop=(stop, "never there"))) for x in (llm, plain))
    assert (got.text, got.token_ids, got.matched_stop) == (want.text, want.token_ids, want.matched_stop)
    [whole] = plain.generate(prompt, params)
    if stop in whole.text:
        assert got.text == whole.text[: whole.text.index(stop)]
        assert (got.finish_reason, got.matched_stop) == (FinishReason.STOP, stop)
    assert llm.engine.load.free_pages == llm.engine.facts.total_pages


def test_a_stop_string_wins_over_what_fails_behind_it(llm: LLM, plain: LLM) -> None:
    """After six tokens the reasoning must end, by a token that is not allowed; the stop string is in these six."""
    tokens = {token: llm.codec.decode([token]) for token in range(llm.engine.facts.limits.vocab_size)}
    params = SamplingParams(
        max_tokens=20,
        guided=Guided(thinking=ThinkingBudget(max_tokens=6, end="</t>")),
        allowed_token_ids=tuple(token for token, text in tokens.items() if "<" not in text),
    )
    drafting = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=8)
    prompts = ["class Stack:\n    def push(self, item):\n", "import os\n", "def add(a, b):\n"]
    cut = plain.generate(prompts, params)
    assert all(c.error is not None for c in cut)
    stopped = [replace(params, stop=(tokens[c.token_ids[-1]],)) for c in cut]
    for proposer in ("model", "ngram"):
        for got in llm.generate(prompts, stopped, speculation=replace(drafting, proposer=proposer)):
            assert (got.finish_reason, got.error) == (FinishReason.STOP, None)


def test_params_one_for_each(llm: LLM) -> None:
    done = llm.generate(["a = ", "b = "], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(c.token_ids) for c in done] == [2, 5]
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="1 prompts and 0 params"):
        llm.generate("a", [])


def test_a_bad_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.generate(["fine", ""])
    assert not llm.engine.has_work
    with pytest.raises(InvalidRequest, match="prompt has 1500 tokens"):
        llm.generate([[5] * 1500])


def test_a_checkpoint_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    zoo.reference("llama").save_pretrained(tmp_path)
    bare = LLM(tmp_path, threads=1, max_batch_size=2)
    [done] = bare.generate([[5, 6, 7]], SamplingParams(max_tokens=6))
    assert done.text is None
    assert len(done.token_ids) == 6
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        bare.generate("text")
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        bare.generate([[5]], SamplingParams(stop=("x",)))


def test_pairs_that_cannot_work_are_refused_at_load(tmp_path: Path) -> None:
    zoo.reference("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"97 tokens .* requires a tokenizer\.json"):
        LLM(embedded_target(), tmp_path)
    with pytest.raises(ModelError, match="cannot load model"):
        LLM(tmp_path / "nothing")
    for wrong in ({"proposer": "model"}, {"max_model_len": 5000}, {"kv_memory": 1e-9}):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            LLM(tmp_path, **wrong)
    with pytest.raises(ValueError, match="max_batch_tokens is 8"):
        LLM(embedded_target(), max_batch_tokens=8)
