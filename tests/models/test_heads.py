"""The embedded target's heads: small, worth drafting with as far as the card says, and taught by the target's law."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from pilotfish.engine import LLM, SamplingParams
from pilotfish.models import corpus, embedded_eagle, embedded_medusa, embedded_target, heads
from tests import zoo

MEGABYTE = 10**6
TINY = heads.HeadRecipe(num_heads=2, steps=20)


def test_size() -> None:
    files = [path for folder in (embedded_medusa(), embedded_eagle()) for path in folder.glob("*.safetensors")]
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) <= 4 * MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("eagle", 0.62), ("medusa", 0.08)])
def test_acceptance_on_held_out_functions(name: str, least: float) -> None:
    """At K=4, greedy; over 32 functions the card has 0.70 and 0.11. Medusa's heads are poor, and this says so too."""
    folder = {"eagle": embedded_eagle, "medusa": embedded_medusa}[name]()
    fixed = {"num_draft_tokens": 4, "speculation": "fixed"}
    llm = LLM(embedded_target(), proposer=name, threads=1, draft=str(folder), **fixed)
    done = llm.generate(corpus.held_out_prompts(8), SamplingParams(max_tokens=64))
    drafted, accepted = sum(c.stats.drafted for c in done), sum(c.stats.accepted for c in done)
    assert drafted > 400
    assert accepted / drafted >= least


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return zoo.with_large_weights(zoo.family_config("llama-tied")).requires_grad_(False)


def windows(steps: int) -> Iterator[tuple[int, torch.Tensor]]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        yield step, torch.randint(0, zoo.VOCAB, (8, 33), generator=generator)


def total_loss(target: LlamaForCausalLM, medusa: heads.Medusa) -> float:
    """Of all heads, on windows that were not trained on."""
    [(_, rows)] = [each for each in windows(1000) if each[0] == 999]
    seen, matrix = heads.TargetOutputs.of(target, rows), target.lm_head.weight
    return sum(map(float, medusa.losses(seen, matrix)))


def test_the_heads_learn_the_targets_law(target: LlamaForCausalLM) -> None:
    with torch.no_grad():
        before = total_loss(target, heads.Medusa(TINY, 32))
    medusa = heads.train(TINY, target, windows(TINY.steps))
    with torch.no_grad():
        after = total_loss(target, medusa)
    assert after < before, "what follows a token that it does not see is mostly chance here"


def test_what_is_exported_is_in_the_published_layout(tmp_path: Path) -> None:
    heads.export(heads.Medusa(TINY, 32), {}, tmp_path / "medusa")
    medusa = load_file(tmp_path / "medusa" / "model.safetensors")
    assert medusa.keys() == {f"{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias")}
    assert {t.dtype for t in medusa.values()} == {torch.bfloat16}
