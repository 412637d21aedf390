"""A run of `train_draft` on a tiny target: what it keeps, what it writes, and that stopping it changes nothing."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine import LLM
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.proposers.heads.eagle import load_eagle
from pilotfish.engine.training import trainer
from pilotfish.engine.training.run import TrainingJob, train_draft
from pilotfish.engine.training.store import RunFolder, Schedule, TextPlan, WrittenText
from pilotfish.engine.training.text import Writer, places_of
from tests import zoo

TEXT = TextPlan(texts=6, tokens=12, prompt_tokens=16, held_out=2, held_out_tokens=12, together=3)
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SCHEDULE = Schedule(steps=6, batch_tokens=32, window=8, unroll=3, warmup=2)


class Interrupting:
    """Keeps what it is told, and interrupts the run where it is asked to."""

    def __init__(self, after_texts: int | None = None, after_step: int | None = None, of: int = TEXT.texts) -> None:
        self.after_texts, self.after_step, self.of = after_texts, after_step, of
        self.texts: list[int] = []
        self.reports: list[trainer.TrainingStep] = []

    def wrote(self, done: int, total: int, tokens: int) -> None:
        assert tokens > 0
        assert done <= total == self.of
        self.texts.append(done)
        if done == self.after_texts:
            raise KeyboardInterrupt

    def trained(self, report: trainer.TrainingStep) -> None:
        assert not any(map(math.isnan, report.losses))
        self.reports.append(report)
        if report.step == self.after_step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    zoo.reference("llama").to(torch.float32).save_pretrained(folder)
    return folder


def job_in(target: Path, out: Path) -> TrainingJob:
    engine = EngineConfig(target=str(target), threads=1, max_batch_size=4, kv_memory=0.01, warm_up_seconds=0)
    return TrainingJob(engine=engine, out=out, opening=(1,), text=TEXT, vocab=50, schedule=SCHEDULE)


@pytest.fixture
def job(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    monkeypatch.setattr(trainer, "SAVE_EVERY", 2)
    return job_in(target, tmp_path / "head")


@pytest.fixture(scope="module")
def told() -> Interrupting:
    return Interrupting()


@pytest.fixture(scope="module")
def whole(target: Path, told: Interrupting, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """One that was run to its end."""
    job = job_in(target, tmp_path_factory.mktemp("whole") / "head")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SAVE_EVERY", 2)
        train_draft(job, told)
    return job


def made(job: TrainingJob) -> bytes:
    return (job.out / "model.safetensors").read_bytes()


def test_the_folder_is_in_the_published_layout(whole: TrainingJob, told: Interrupting) -> None:
    job = whole
    assert told.texts == [3, 6]
    assert [report.step for report in told.reports] == [1, 2, 3, 4, 5, 6]
    assert [report.acceptance is not None for report in told.reports] == [False, True] * 3
    config = json.loads((job.out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]) == (32, zoo.VOCAB, 50)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    named = {name.split(".")[0] for name in load_file(job.out / "model.safetensors")}
    assert named == {"fc", "fc_norm", "midlayer", "norm", "lm_head", "d2t", "t2d"}
    assert load_eagle(str(job.out), None, zoo.ours(zoo.reference("llama"))), (
        "all of them have the shapes that they need"
    )


def test_the_vocabulary_has_what_the_target_writes_most(whole: TrainingJob) -> None:
    tensors = load_file(whole.out / "model.safetensors")
    kept = (tensors["d2t"] + torch.arange(50)).tolist()
    assert kept == sorted(set(kept)) == tensors["t2d"].nonzero().flatten().tolist()
    folder = RunFolder(whole.out, whole.settings())
    texts = [text for name in ("00000", "00001") for text in folder.load_texts(name)]
    written = torch.cat([text.tokens[text.prompt :] for text in texts])
    assert set(written.tolist()) <= set(kept), "fewer different tokens than it can draft were written"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [Interrupting(after_texts=3), Interrupting(after_step=5)])
def test_a_stopped_run_ends_with_the_same_bytes(job: TrainingJob, whole: TrainingJob, stop: Interrupting) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_draft(job, stop)
    rest = Interrupting()
    train_draft(job, rest)
    assert made(job) == made(whole)
    assert rest.texts == ([6] if stop.after_texts else [])
    assert rest.reports[0].step == (1 if stop.after_texts else 5), "it goes on from the last checkpoint"


def test_another_seed_makes_another_head(job: TrainingJob, told: Interrupting, whole: TrainingJob) -> None:
    other = Interrupting(after_step=1)
    with pytest.raises(KeyboardInterrupt):
        train_draft(replace(job, schedule=replace(SCHEDULE, seed=1)), other)
    assert other.reports[0].losses != told.reports[0].losses


def test_the_recorded_rows_are_the_targets_hidden_states(job: TrainingJob) -> None:
    """Also where prompts are read in chunks, beside others that decode, and where sequences are preempted."""
    config = job.engine.model_copy(update={"max_batch_tokens": 5, "kv_memory": 1.2e-5, "page_size": 4})
    writer = Writer(config)
    prompts = [(1, *range(3, 3 + n)) for n in (20, 7, 12, 1, 15)]
    texts = writer.write(prompts, [GREEDY] * len(prompts))
    model = zoo.reference("llama")
    for prompt, text in zip(prompts, texts, strict=True):
        assert tuple(text.tokens[: text.prompt].tolist()) == prompt
        with torch.no_grad():
            states = model(text.tokens[None, :-1], output_hidden_states=True).hidden_states
        # Those of transformers: before layers 0 and 1, and after the final norm.
        expected = torch.cat([states[0], states[1], states[1], states[-1]], -1)[0]
        torch.testing.assert_close(text.rows.float(), expected, rtol=0.02, atol=0.02)


def test_laws_are_made_of_what_was_recorded(job: TrainingJob) -> None:
    writer = Writer(job.engine)
    model = zoo.reference("llama")
    [text] = writer.write([(1, 5, 9, 4)], [GREEDY])
    with torch.no_grad():
        logits = model(text.tokens[None, :-1]).logits[0]
    parts = writer.parts()
    made = parts.logits(text.rows[:, -32:].float(), parts.output.float())
    assert float((made - logits).abs().max()) < 0.02 * float(logits.abs().max())
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(parts.embedding.float(), table, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("family", "law"),
    [
        ("gemma2", {"factor": 1.0, "cap": zoo.family_config("gemma2").final_logit_softcapping}),  # a scaled embedding
        # And layers with a state.
        pytest.param(
            "granite-4", {"factor": 1 / zoo.family_config("granite-4").logits_scaling, "cap": None},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_family_is_learned_from(family: str, law: dict[str, object], job: TrainingJob, tmp_path: Path) -> None:
    zoo.reference(family).to(torch.float32).save_pretrained(tmp_path / "target")
    engine = job.engine.model_copy(update={"target": str(tmp_path / "target")})
    told = Interrupting()
    learning = replace(job, engine=engine)
    train_draft(learning, told)
    _, notes = RunFolder(job.out, learning.settings()).load("target")
    assert json.loads(notes["law"]) == law
    assert len(told.reports) == SCHEDULE.steps
    assert made(job)


def test_a_target_that_no_head_can_read_is_said(job: TrainingJob, tmp_path: Path) -> None:
    """It runs one sequence at a time, and what it leaves behind is of the last one."""
    zoo.reference("falcon").to(torch.float32).save_pretrained(tmp_path / "target")
    engine = job.engine.model_copy(update={"target": str(tmp_path / "target")})
    with pytest.raises(ModelError, match="falcon is not in the table of architectures"):
        train_draft(replace(job, engine=engine), Interrupting())


def test_rounded_weights_are_learned_from_as_they_are_served(job: TrainingJob, whole: TrainingJob) -> None:
    rounded = replace(job, engine=job.engine.model_copy(update={"weights": "int8"}))
    with pytest.raises(KeyboardInterrupt):
        train_draft(rounded, Interrupting(after_texts=3))
    rows = [next(RunFolder(each.out, each.settings()).load_texts("00000")).rows for each in (whole, rounded)]
    assert not torch.equal(rows[0][:1], rows[1][:1])


def test_it_learns_the_targets_law(job: TrainingJob) -> None:
    long = replace(job, schedule=replace(SCHEDULE, steps=60, batch_tokens=64))
    told = Interrupting()
    train_draft(long, told)
    first, last = (sum(sum(r.losses) for r in told.reports[part]) for part in (slice(0, 5), slice(-5, None)))
    assert last < 0.8 * first


@pytest.mark.slow
def test_a_served_head_keeps_as_many_drafts_as_it_was_measured_to(job: TrainingJob) -> None:
    # Learned by heart: what follows in a random model's text cannot be guessed.
    prompts = [(1, 3 + i, 40 + i, 7 * i + 3) for i in range(8)]
    text = TextPlan(texts=8, tokens=40, held_out_tokens=40, together=8, greedy=1.0)
    schedule = Schedule(steps=150, batch_tokens=256, window=40, unroll=3, warmup=10)
    learning = replace(job, prompts=prompts, held_out=prompts, text=text, vocab=None, schedule=schedule)
    trainer = train_draft(learning, Interrupting(of=8))
    texts = list(RunFolder(job.out, learning.settings()).load_texts("held-out"))
    measured = trainer.acceptance(texts)
    assert measured.rate > 0.2, "else this test shows nothing"
    served = {"draft": str(job.out), "proposer": "eagle", "num_draft_tokens": 3, "speculation": "fixed"}
    llm = LLM(job.engine.target, threads=1, warm_up_seconds=0, kv_memory=0.01, **served)
    drafted = kept = 0
    for text in texts:  # one by one: in a batch a head may catch up later than its sequence
        asked = SamplingParams(max_tokens=len(text.tokens) - text.prompt, ignore_eos=True)
        [done] = llm.generate([text.tokens[: text.prompt].tolist()], asked)
        assert list(done.token_ids) == text.tokens[text.prompt :].tolist()
        drafted, kept = drafted + done.stats.drafted, kept + done.stats.accepted
    assert drafted > 100
    assert kept / drafted == pytest.approx(measured.rate, abs=0.04)


def test_it_writes_into_no_folder_of_something_else(job: TrainingJob) -> None:
    job.out.mkdir()
    (job.out / "model.safetensors").write_bytes(b"a head of somebody else")
    with pytest.raises(ModelError, match="is not the folder of a training run"):
        train_draft(job, Interrupting())
    assert [path.name for path in job.out.iterdir()] == ["model.safetensors"]


@pytest.fixture(scope="module")
def begun(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """One that was stopped while it wrote; before it, another was stopped before it had written its settings."""
    job = job_in(target, tmp_path_factory.mktemp("begun") / "head")
    (job.out / ".training").mkdir(parents=True)
    for name in ("lock", "run.unfinished"):
        (job.out / ".training" / name).write_text("{", "utf-8")
    with pytest.raises(KeyboardInterrupt):
        train_draft(job, Interrupting(after_texts=3))
    return job


def test_it_continues_no_run_of_other_settings(begun: TrainingJob, tmp_path: Path) -> None:
    other = replace(begun, schedule=replace(SCHEDULE, steps=7))
    with pytest.raises(ModelError, match=r"other settings: schedule\.steps 6, not 7;"):
        train_draft(other, Interrupting())
    with pytest.raises(ModelError, match="other settings: prompts"):
        train_draft(replace(begun, opening=(3,)), Interrupting())
    damaged = shutil.copytree(begun.out, tmp_path / "damaged")
    (damaged / ".training" / "run.json").write_text("{", "utf-8")
    with pytest.raises(ModelError, match=r"cannot read .*run\.json"):
        train_draft(replace(begun, out=damaged), Interrupting())


def test_two_runs_do_not_share_a_folder(begun: TrainingJob) -> None:
    with RunFolder(begun.out, begun.settings()).locked(), pytest.raises(ModelError, match="another run is using"):
        train_draft(begun, Interrupting())
    with RunFolder(begun.out, begun.settings()).locked():
        assert begun.out.exists()


def test_as_many_texts_are_written_as_are_asked_for(job: TrainingJob) -> None:
    """Of prompts of its own, too, which are written a file at a time."""
    whole = replace(job, text=replace(TEXT, together=4))
    with pytest.raises(KeyboardInterrupt):
        train_draft(whole, Interrupting(after_texts=TEXT.texts))
    folder = RunFolder(whole.out, whole.settings())
    assert [len(list(folder.load_texts(name))) for name in ("00000", "00001")] == [4, TEXT.texts - 4]


def test_too_little_text_is_said(job: TrainingJob) -> None:
    with pytest.raises(ModelError, match=r"generated \d+ tokens; training requires at least 4000"):
        train_draft(replace(job, schedule=replace(SCHEDULE, window=1000)), Interrupting())
    few = [(1, 2, 3)] * 9
    with pytest.raises(ModelError, match="there are 9 prompts; expected at least 10"):
        train_draft(replace(job, out=job.out.with_name("few"), prompts=few), Interrupting())


def test_given_prompts_are_continued_and_some_are_held_out(job: TrainingJob) -> None:
    prompts = [(1, 3 + i, 4 + i) for i in range(20)]
    given = replace(job, prompts=prompts, text=replace(TEXT, texts=15))
    with pytest.raises(KeyboardInterrupt):
        train_draft(given, Interrupting(after_step=1, of=15))
    folder = RunFolder(given.out, given.settings())
    apart = [starts(text) for text in folder.load_texts("held-out")]
    trained = [starts(text) for number in range(5) for text in folder.load_texts(f"{number:05}")]
    assert apart == prompts[-2:]
    assert set(trained) <= set(prompts[:-2])
    assert len(trained) >= 13


def starts(text: WrittenText) -> tuple[int, ...]:
    return tuple(text.tokens[: text.prompt].tolist())


@pytest.mark.parametrize(
    ("depth", "places"), [(1, (0, 0, 0)), (2, (0, 1, 1)), (4, (1, 2, 3)), (6, (2, 3, 3)), (32, (2, 16, 29))]
)
def test_places(depth: int, places: tuple[int, int, int]) -> None:
    assert places_of(depth) == places
