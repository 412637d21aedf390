"""What is exported is what was trained: served, the head drafts as it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.training.loop import TrainingStep
from engine.training.recipe import Schedule, TextPlan
from engine.training.run import TrainingJob, train_draft
from engine.training.store import RunFolder
from tests import zoo

PROMPTS = [(1, 3 + i, 40 + i, 7 * i + 3) for i in range(8)]
TEXT = TextPlan(texts=8, tokens=40, held_out_tokens=40, together=8, greedy=1.0)
SCHEDULE = Schedule(steps=250, batch_tokens=256, window=40, unroll=3, warmup=10)


class Silent:
    """Is told of a run and says nothing."""

    def wrote(self, done: int, total: int, tokens: int) -> None:
        assert 0 < done <= total <= tokens

    def trained(self, report: TrainingStep) -> None:
        assert len(report.losses) in (1, 3)


@pytest.mark.slow
def test_a_served_head_keeps_as_many_drafts_as_it_was_measured_to(tmp_path: Path) -> None:
    zoo.reference("llama").to(torch.float32).save_pretrained(tmp_path / "target")
    options = {"target": str(tmp_path / "target"), "threads": 1, "warm_up_seconds": 0.0, "kv_memory": 0.01}
    out = tmp_path / "head"
    engine = EngineConfig.model_validate(options)
    # Learned by heart: what follows in a random model's text cannot be guessed.
    job = TrainingJob(engine=engine, out=out, prompts=PROMPTS, held_out=PROMPTS, text=TEXT, schedule=SCHEDULE)
    trainer = train_draft(job, Silent())
    texts = list(RunFolder(out, job.settings()).load_texts("held-out"))
    measured = trainer.acceptance(texts)
    assert measured.rate > 0.2, "else this test shows nothing"
    llm = LLM(**options, eagle=str(out), proposer="eagle", num_draft_tokens=3, speculation="fixed")
    drafted = kept = 0
    for text in texts:  # one by one: in a batch a head may catch up later than its sequence
        asked = SamplingParams(max_tokens=len(text.tokens) - text.prompt, ignore_eos=True)
        [done] = llm.generate([text.tokens[: text.prompt].tolist()], asked)
        assert list(done.token_ids) == text.tokens[text.prompt :].tolist()
        drafted, kept = drafted + done.stats.drafted, kept + done.stats.accepted
    assert drafted > 100
    assert kept / drafted == pytest.approx(measured.rate, abs=0.04)
