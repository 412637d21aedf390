"""Runs a tiny model of one causal language model class as a server would, and says how it went."""

from __future__ import annotations

import tempfile

from transformers import AutoModelForCausalLM, GenerationConfig

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.one_by_one import OneByOneRunner
from engine.params import SamplingParams
from engine.startup.build import build_engine
from engine.types import Request
from tests import fakes, zoo
from tests.classes import tiny
from tests.families import generate

NEW_TOKENS = 16
RAGGED, ALONE, WHOLE = "ragged", "one at a time", "one at a time, whole text"


def outcome(kind: str) -> str:
    """How the class of a model type runs, or why it does not.

    Raises:
        AssertionError: it runs, and its tokens are not those of `generate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = zoo.with_large_weights(tiny(kind))
        model.save_pretrained(folder)
        if type(model.config) is not type(tiny(kind)):  # the class has only the part for text
            tiny(kind).save_pretrained(folder)
        return _served(kind, folder)


def _served(kind: str, folder: str) -> str:
    try:
        engine = build_engine(
            EngineConfig(
                target=folder,
                proposer="ngram",
                threads=1,
                max_batch_size=4,
                kv_memory=0.1,
                max_model_len=96,
                max_batch_tokens=13,
            )
        )
    except ModelError as error:
        return f"refused: {error}"
    prompts = zoo.prompts(3)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [Request(request_id=str(i), token_ids=tuple(p), sampling=params) for i, p in enumerate(prompts)]
    outputs = fakes.run(engine, requests)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(eos_token_id=zoo.END)  # without forced tokens, which no server has
    expected = [generate(model, p, NEW_TOKENS) for p in prompts]
    assert [outputs.tokens[str(i)] for i in range(len(prompts))] == expected, f"{kind}: not what generate gives"
    target = engine._target_pass._target
    if isinstance(target, OneByOneRunner):
        return WHOLE if target._keeps_tokens else ALONE
    return RAGGED
