"""How a model is found to run: in ragged batches, alone, or not at all, and what it cannot have where it runs alone."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.startup.build import assemble
from tests import fakes, zoo
from tests.class_table import ALONE, RAGGED, WHOLE, way_of
from tests.classes import tiny
from tests.families import NEW_TOKENS, generate

pytestmark = pytest.mark.filterwarnings("ignore")


def model_of(kind: str) -> PreTrainedModel:
    return zoo.ours(zoo.with_large_weights(tiny(kind)))


def engine_of(kind: str, draft: PreTrainedModel | None = None, **config: object) -> Engine:
    settings = {"target": kind, "max_batch_size": 4, "max_model_len": 96, "kv_memory": 0.1, "threads": 1}
    return assemble(EngineConfig(**settings | config), model_of(kind), draft)


@pytest.mark.parametrize(("kind", "way"), [("llama", RAGGED), ("bloom", ALONE), ("rwkv", WHOLE)])
def test_each_runs_as_fast_as_its_code_allows(kind: str, way: str) -> None:
    assert way_of(engine_of(kind)) == way


def test_the_log_says_that_it_is_slower(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine.startup.runners"):
        engine_of("bloom")
    assert "BloomForCausalLM runs one sequence at a time, which is slower" in caplog.text


def test_a_refusal_names_both_reasons() -> None:
    with pytest.raises(ModelError, match=r"cannot run a ragged batch|attention interface") as refused:
        engine_of("xlnet")
    assert "one sequence at a time: XLNetLMHeadModel: its logits depend on how its text is cut" in str(refused.value)


def test_hashes_of_the_whole_text_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="layers of type lsh"):
        engine_of("reformer")


@pytest.mark.parametrize("asked", [{"reproducible": True}, {"self_layers": 1}, {"proposer": "self"}])
def test_what_needs_ragged_batches_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="not with"):
        engine_of("bloom", **asked)


PROMPTS = zoo.prompts(4)


def outputs_of(engine: Engine) -> fakes.Outputs:
    return fakes.run(engine, fakes.requests(PROMPTS, max_tokens=NEW_TOKENS))


def tokens_of(outputs: fakes.Outputs) -> list[list[int]]:
    return [outputs.tokens[str(i)] for i in range(len(PROMPTS))]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "proposer"),
    [
        ("bloom", "model"),
        ("rwkv", "suffix"),
        slow("rwkv", "model"),
    ],
)
def test_equals_generate_also_with_a_draft_that_runs_alone(kind: str, proposer: str) -> None:
    model, draft = zoo.with_large_weights(tiny(kind)), model_of(kind) if proposer == "model" else None
    outputs = outputs_of(engine_of(kind, draft, proposer=proposer, speculation="fixed", max_batch_tokens=13))
    assert tokens_of(outputs) == [generate(model, prompt) for prompt in PROMPTS]
    if proposer == "model":
        assert sum(ended.stats.accepted for ended in outputs.finished.values()) > 0


@pytest.mark.parametrize(("kind", "gib"), [("bloom", 6e-5), slow("rwkv", 5e-7)])
def test_preempted_and_cached(kind: str, gib: float) -> None:
    """Half the memory that all sequences need; the second time the prompts' beginnings are in the prefix cache."""
    model = zoo.with_large_weights(tiny(kind))
    expected = [generate(model, prompt) for prompt in PROMPTS]
    engine = engine_of(kind, proposer="ngram", page_size=4, kv_memory=gib)
    assert engine.total_pages * 4 < sum(len(prompt) + NEW_TOKENS for prompt in PROMPTS)
    assert tokens_of(outputs_of(engine)) == expected
    again = outputs_of(engine)
    assert tokens_of(again) == expected
    assert sum(ended.cached_prompt_tokens for ended in again.finished.values()) > 0
