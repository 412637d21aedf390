"""A draft of another vocabulary changes no token, and is of use."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.startup.build import build_engine
from pilotfish.models import corpus, embedded_draft, embedded_target
from tests import zoo
from tests.engine.proposers.test_vocab import TEXT, byte_level, sentence_piece
from tests.respell import shuffled

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, top_k=50, seed=2),
]


def run(draft: Path, **config: object) -> tuple[list[tuple[int, ...]], float]:
    """Tokens, and the share of drafts accepted."""
    llm = LLM(
        embedded_target(),
        draft=draft,
        dtype="float32",
        num_draft_tokens=4,
        threads=1,
        max_batch_size=8,
        max_step_ms=1e6,
        **config,
    )
    prompts = [llm.codec.encode(text)[-n:] for text, n in zip(corpus.held_out_prompts(3), (150, 7, 60), strict=True)]
    done = llm.generate(prompts, PARAMS)
    drafted = sum(completion.stats.drafted for completion in done)
    return [completion.token_ids for completion in done], sum(c.stats.accepted for c in done) / max(drafted, 1)


@lru_cache
def unmapped() -> tuple[list[tuple[int, ...]], float]:
    return run(embedded_draft())


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"without": 300, "padding": 300}])
def test_a_respelled_draft_drafts_as_before(how: dict[str, int], tmp_path: Path) -> None:
    """Other ids: exactly as good. Padded, or as many tokens of which 300 mean nothing: nearly as good."""
    shuffled(embedded_draft(), tmp_path, **how)
    tokens, rate = run(tmp_path)
    assert tokens == unmapped()[0]
    assert rate == pytest.approx(unmapped()[1], abs=0.1 if how.get("without") else 1e-9)
    assert unmapped()[1] > 0.4


@pytest.mark.slow
def test_one_vocabulary_padded_to_another_width(tmp_path: Path) -> None:
    """As Qwen's small and large models: one tokenizer, logits of unequal width, in both directions."""
    shutil.copytree(embedded_draft(), tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(embedded_draft(), dtype=torch.float32)
    model.resize_token_embeddings(2048 + 64, mean_resizing=False)
    model.save_pretrained(tmp_path / "draft")
    assert run(tmp_path / "draft") == unmapped()
    narrow = EngineConfig(target=str(tmp_path / "draft"), draft=str(embedded_target()), threads=1)
    assert build_engine(narrow).facts.limits.vocab_size == 2048 + 64


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_two_tokenizers_trained_on_different_text(verification: str, tmp_path: Path) -> None:
    pair = {"target": byte_level(TEXT, size=320), "draft": sentence_piece(["the hat and the mat", *TEXT[1:]], size=350)}
    for name, tokenizer in pair.items():
        width = tokenizer.get_vocab_size()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        zoo.with_large_weights(LlamaConfig(vocab_size=width, **sizes)).save_pretrained(tmp_path / name)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))

    def tokens(proposer: str, temperature: float) -> list[tuple[int, ...]]:
        llm = LLM(
            tmp_path / "target", draft=tmp_path / "draft", threads=1, proposer=proposer, verification=verification,
            max_model_len=128,
        )  # fmt: skip
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
        done = llm.generate(["the cat", "def add(", "naïve"], params)
        assert proposer == "none" or sum(completion.stats.drafted for completion in done) > 0
        return [completion.token_ids for completion in done]

    assert tokens("model", 0.0) == tokens("none", 0.0)
    if verification == "coupled":
        assert tokens("model", 0.9) == tokens("none", 0.9)


def test_other_sizes_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    shuffled(embedded_draft(), tmp_path, padding=5)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"2053 tokens .* 2048; mapping them requires a tokenizer\.json"):
        run(tmp_path)
