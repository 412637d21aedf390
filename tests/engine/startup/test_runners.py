"""How a model is found to run: in ragged batches, alone, or not at all, and what it cannot have where it runs alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.startup.build import build_engine
from tests import fakes, heads, zoo
from tests.class_table import ALONE, RAGGED, WHOLE, way_of
from tests.classes import tiny
from tests.families import NEW_TOKENS, generate

pytestmark = pytest.mark.filterwarnings("ignore")


def model_of(kind: str) -> PreTrainedModel:
    return zoo.in_transformers(zoo.with_large_weights(tiny(kind)))


def engine_of(kind: str, drafter: PreTrainedModel | None = None, **config: object) -> Engine:
    settings = {"target": kind, "max_batch_size": 4, "max_model_len": 96, "kv_memory": 0.1, "threads": 1}
    return heads.assembled(EngineConfig(**settings | config), model_of(kind), drafter)


@pytest.mark.parametrize(("kind", "way"), [("llama", RAGGED), ("bloom", ALONE), ("rwkv", WHOLE)])
def test_each_runs_as_fast_as_its_code_allows(kind: str, way: str) -> None:
    assert way_of(engine_of(kind)) == way


def test_the_log_reports_that_it_is_slower(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pilotfish.engine.startup.runners"):
        engine_of("bloom")
    assert "BloomForCausalLM runs one sequence at a time (slower)" in caplog.text


@pytest.mark.parametrize(
    ("kind", "asked", "reason"),
    [
        (
            "xlnet",
            {},
            "(ragged batch|attention interface).*one sequence at a time: XLNetLMHeadModel: its logits depend on",
        ),
        ("reformer", {}, "layers of type lsh"),  # hashes of the whole text
        *(
            ("bloom", asked, "is not supported for")
            for asked in ({"reproducible": True}, {"draft": "self"}, {"draft": "self:1"})
        ),
    ],
)
def test_a_refusal_names_every_reason(kind: str, asked: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){reason}"):
        engine_of(kind, **asked)


PROMPTS = zoo.prompts(4)


def outputs_of(engine: Engine) -> fakes.Outputs:
    return fakes.run(engine, fakes.requests(PROMPTS, max_tokens=NEW_TOKENS))


def tokens_of(outputs: fakes.Outputs) -> list[list[int]]:
    return [outputs.tokens[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", ["bloom", "rwkv"])
def test_equals_generate_also_with_a_draft_that_runs_alone(kind: str) -> None:
    model = zoo.with_large_weights(tiny(kind))
    engine = engine_of(kind, model_of(kind), proposer="model", speculation="fixed", max_batch_tokens=13)
    outputs = outputs_of(engine)
    assert tokens_of(outputs) == [generate(model, prompt) for prompt in PROMPTS]
    assert sum(ended.stats.accepted for ended in outputs.finished.values()) > 0


@pytest.mark.parametrize(("kind", "gib"), [("bloom", 6e-5), pytest.param("rwkv", 5e-7, marks=pytest.mark.slow)])
def test_preempted_and_cached(kind: str, gib: float) -> None:
    """Half the memory that all sequences need; the second time the prompts' beginnings are in the prefix cache."""
    model = zoo.with_large_weights(tiny(kind))
    expected = [generate(model, prompt) for prompt in PROMPTS]
    engine = engine_of(kind, proposer="ngram", page_size=4, kv_memory=gib)
    assert engine.facts.total_pages * 4 < sum(len(prompt) + NEW_TOKENS for prompt in PROMPTS)
    assert tokens_of(outputs_of(engine)) == expected
    again = outputs_of(engine)
    assert tokens_of(again) == expected
    assert sum(ended.cached_prompt_tokens for ended in again.finished.values()) > 0


def test_a_checkpoint_in_bfloat16_is_held_in_float32_unless_bfloat16_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What runs alone is multiplied by torch, which rounds bfloat16 by the shape of a pass."""
    model = zoo.with_large_weights(tiny("bloom")).bfloat16()
    model.save_pretrained(tmp_path)
    small = {"target": str(tmp_path), "threads": 1, "max_batch_size": 4, "max_model_len": 96, "speculation": "fixed"}
    engine = build_engine(EngineConfig(draft=str(tmp_path), max_batch_tokens=13, **small))
    assert (engine.facts.dtype, way_of(engine)) == ("float32", ALONE)
    model.float()
    assert tokens_of(outputs_of(engine)) == [generate(model, prompt) for prompt in PROMPTS]
    with caplog.at_level(logging.WARNING, "pilotfish.engine.startup"):
        engine = build_engine(EngineConfig(dtype="bfloat16", **small))
    assert engine.facts.dtype == "bfloat16"
    assert "drafts, chunked prefill and the prefix cache may change its tokens" in caplog.text
