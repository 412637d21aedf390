"""Training can be stopped and taken up again with the same result; its data never depends on where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pilotfish.models import train

STREAM = np.random.default_rng(0).integers(0, train.VOCAB, 5000).astype(np.int32)
TINY = train.Recipe(
    hidden=64, ffn=32, layers=1, heads=1, kv_heads=1, steps=6, batch_tokens=64, short=16, long=32, warmup=2
)


def weights(trainer: train.Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_a_stopped_run_continues_as_if_never_stopped_and_only_with_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "WORK", tmp_path)
    whole = train.Trainer("whole", TINY)
    whole.run(train.batches(STREAM, TINY, 0), train.next_token_loss)

    stopped = train.Trainer("stopped", TINY)
    for step, windows in list(train.batches(STREAM, TINY, 0))[:3]:
        stopped._one_step(step, windows, train.next_token_loss)
        stopped.step = step + 1
    stopped.save()
    resumed = train.Trainer("stopped", TINY)
    assert resumed.step == 3
    resumed.run(train.batches(STREAM, TINY, 3), train.next_token_loss)

    with pytest.raises(ValueError, match="another recipe"):
        train.Trainer("stopped", train.replace(TINY, steps=7))
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_draft_learns_the_target_not_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "WORK", tmp_path)
    torch.manual_seed(5)
    teacher = train.LlamaForCausalLM(TINY.config()).eval()
    loss = train.distillation_loss(teacher)
    assert loss(teacher, torch.arange(17)[None]).item() == pytest.approx(0.0, abs=1e-3)
    student = train.Trainer("student", train.replace(TINY, steps=10))
    before = loss(student.model, torch.arange(17)[None]).item()
    student.run(train.batches(STREAM, student.recipe, 0), loss)
    assert loss(student.model, torch.arange(17)[None]).item() < before


def test_schedule() -> None:
    recipe = train.replace(TINY, steps=100, warmup=10)
    scale = [recipe.lr_scale(step) for step in range(100)]
    assert scale[0] == 0.1
    assert max(scale) == 1.0
    assert scale[-1] < 0.02
    assert scale[39:] == sorted(scale[39:], reverse=True)
    assert recipe.length_at(79) == 16
    assert recipe.length_at(80) == 32
