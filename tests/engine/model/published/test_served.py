"""Quantised checkpoints of others, from a folder and from a GGUF file: exact for the model that is served.

Dequantised, tokens equal transformers' `generate` of the float model that the codes mean. With the codes on our integer
kernels, a prompt alone without drafts is the law.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from pilotfish.engine import LLM
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from tests import gguf_files, published, zoo
from tests.families import generate

PARAMS = SamplingParams(max_tokens=12)
OFF = SpeculationParams(mode=SpeculationMode.OFF)
DRAFTS = [
    SpeculationParams(mode=SpeculationMode.FIXED, proposer=proposer, num_draft_tokens=4)
    for proposer in ("ngram", "model")
]


Checkpoints = tuple[Path, Path, PreTrainedModel]  # a quantised target, a draft, and the floats that the codes mean


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """It has groups and zero points; the draft is near."""
    folder = tmp_path_factory.mktemp("awq")
    floats = published.publish(folder / "target", published.CONFIGS["qwen3"], published.FORMATS["awq"])
    zoo.disturbed(floats).save_pretrained(folder / "draft")
    return folder / "target", folder / "draft", floats


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Files of several types and of one."""
    folder = tmp_path_factory.mktemp("gguf")
    target = gguf_files.write(folder / "target.gguf", gguf_files.llama(), gguf_files.mixed)
    draft = gguf_files.write(folder / "draft.gguf", gguf_files.llama(), Type.Q4_0)
    return target.path, draft.path, target.model


@pytest.mark.parametrize(
    ("form", "weights", "dtype"),
    [("awq", "dequantised", "float32"), ("awq", "native", "bfloat16"), ("gguf", "native", "float32")],
)
def test_drafts_and_company_change_nothing(form: str, weights: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """In bfloat16 a row's place in a batch would show: its sums must have one order. Prompts are read in chunks."""
    target, draft, floats = request.getfixturevalue(form)
    prompts, small = zoo.prompts(4), {"threads": 1, "max_model_len": 96, "max_batch_size": 4, "max_batch_tokens": 13}
    llm = LLM(target, draft, weights=weights, dtype=dtype, prefix_cache=False, **small)
    if weights == "dequantised":
        expected = [generate(floats, prompt, PARAMS.max_tokens) for prompt in prompts]
    else:
        expected = [list(llm.generate(prompt, PARAMS, speculation=OFF)[0].token_ids) for prompt in prompts]
    for wish in DRAFTS:
        done = llm.generate(prompts, PARAMS, speculation=wish)
        assert [list(each.token_ids) for each in done] == expected, wish.proposer
    if target.is_dir():  # whose draft is the target, a little disturbed
        assert sum(each.stats.accepted for each in done) > 0
