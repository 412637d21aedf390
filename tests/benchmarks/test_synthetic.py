"""Synthetic pairs say what is planted in them, and drafts are right as often as was asked."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from benchmarks.harness.replay import NAME, ReplayModels, Script
from benchmarks.harness.synthetic import LOOP, Rule, SyntheticPair, agreement, int8_of, matrix_bytes
from benchmarks.harness.timing import AUTO, run_turn, way
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.startup.build import build_engine
from pilotfish.engine.text.codec import Codec

TOKENS, BATCH = 48, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return SyntheticPair.make(tmp_path_factory.mktemp("models"), "tiny", "tinier", 0.75)


@pytest.fixture(scope="module")
def config(pair):
    settings = {
        "target": str(int8_of(pair.target)),
        "draft": str(int8_of(pair.draft)),
        "max_model_len": 256,
        "max_batch_size": BATCH,
        "num_draft_tokens": 8,
        "warm_up_seconds": 0.0,
        "threads": 1,
    }
    return EngineConfig.model_validate(settings)


@pytest.fixture(scope="module")
def engine(config):
    return build_engine(config)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_agreement_is_as_asked_in_every_stretch_and_by_chance_within_it(rate):
    found, other = agreement(3200, rate, seed=5), agreement(3200, rate, seed=6)
    per_block = found.reshape(-1, 32).sum(1)
    assert abs(found.mean() - rate) < 0.002
    assert per_block.max() - per_block.min() <= 1
    assert (found == other).mean() == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.05)
    assert (found == agreement(3200, rate, seed=5)).all(), "the same each time"


@pytest.mark.parametrize("vocab_size", [512, 1000])
def test_the_rule_is_a_circle_and_loops(vocab_size):
    rule = Rule(vocab_size, seed=3)
    assert sorted(rule.successor) == list(range(vocab_size))
    circle = rule.text(int(rule.order[0]), rule.circle)
    assert len(set(circle)) == rule.circle
    for start in rule.order[rule.circle :: LOOP]:
        text = rule.text(int(start), 2 * LOOP)
        assert text[:LOOP] == text[LOOP:]
        assert len(set(text)) == LOOP


def test_another_rule_agrees_at_the_rate_and_continuations_of_prompts_do_not_meet():
    rule = Rule(4096)
    for rate in (0.0, 0.6, 1.0):
        other = rule.agreeing(rate)
        assert sorted(other) == list(range(4096))
        assert (other == rule.successor).mean() == pytest.approx(rate, abs=0.001)
    texts = [rule.text(prompt[-1], 64) for prompt in rule.prompts(8, 16)]
    assert len({token for text in texts for token in text}) == 8 * 64


@pytest.mark.parametrize("k", [0, 1, AUTO])
def test_the_models_say_what_is_planted(engine, pair, k):
    prompts = pair.rule.prompts(BATCH, 16)
    turn = run_turn(engine, prompts, TOKENS, way(k, "model" if k else None))
    assert turn.tokens == [pair.rule.text(prompt[-1], TOKENS) for prompt in prompts]
    assert 0 < turn.decode_seconds < turn.seconds
    assert BATCH <= BATCH * TOKENS - turn.decode_tokens <= 9 * BATCH, "all but what came before everybody had a token"
    if k == 1:  # one draft a round: what is kept of those is the rate that the pair was made with
        assert turn.acceptance_rate == pytest.approx(0.75, abs=0.1)


def test_a_replayed_draft_is_right_as_often_as_it_is_told_to_be(config, pair):
    script = Script()
    engine = ReplayModels(config, script).engine(BATCH, 256)
    prompts = pair.rule.prompts(BATCH, 16)
    for prompt in prompts:
        script.record(prompt, pair.rule.text(prompt[-1], TOKENS))
    kept = {}
    for script.rate in (0.0, 0.6, 0.6, 1.0):
        turn = run_turn(engine, prompts, TOKENS, way(3, NAME))
        assert turn.tokens == [pair.rule.text(prompt[-1], TOKENS) for prompt in prompts]
        length = 1 + turn.accepted / turn.rounds
        assert kept.setdefault(script.rate, length) == length, "the same each time"
    expected = {rate: sum(rate**i for i in range(4)) for rate in kept}
    assert kept == {rate: pytest.approx(length, rel=0.12) for rate, length in expected.items()}


def test_both_precisions_hold_the_same_weights(pair):
    whole, rounded = (load_file(folder / "model.safetensors") for folder in (pair.target, int8_of(pair.target)))
    name = "model.layers.0.mlp.down_proj"
    codes, scale = (rounded[f"{name}.weight_{part}"].float() for part in ("codes", "scale"))
    steps = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    assert ((codes * steps - whole[f"{name}.weight"].float()).abs() <= 0.51 * steps + 1e-6).all()
    matrices = [t for key, t in whole.items() if t.ndim == 2 and "embed" not in key]
    assert matrix_bytes(int8_of(pair.target)) == sum(t.numel() * 34 // 32 for t in matrices), "float16 for each 32"


def test_its_tokens_are_text(pair):
    codec = Codec.load(str(pair.target))
    words = [codec.tokenizer.decode([i]) for i in range(256, 511)]
    assert len(set(words)) == 255
    assert codec.encode("plain text")
