"""`pilotfish train-draft`: what it asks of `engine.training`, how it reads prompts, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.text.codec import Codec
from pilotfish.engine.training.run import TrainingJob
from pilotfish.models import embedded_target
from pilotfish.server import cli
from pilotfish.server.commands import train_draft
from tests import zoo

SMALL = ["--texts", "4", "--tokens", "100", "--steps", "3", "--batch-tokens", "320", "--threads", "1"]
SMALL += ["--kv-memory", "0.1"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a tokenizer, and so without a chat template."""
    folder = tmp_path_factory.mktemp("target")
    zoo.reference("llama").to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.engine.training.run._FEWEST", 1)


def job_of(*arguments: str | Path) -> TrainingJob:
    return train_draft.job_of([str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_stopped_run_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a head for a model without a tokenizer."""
    out = tmp_path / "head"
    arguments = ["train-draft", str(target), "--out", str(out), *SMALL]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_draft.TrainingBars, "trained", stop)
        assert cli.main(arguments) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    assert not (out / "model.safetensors").exists()
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert f"`pilotfish serve {target} --draft {out}`" in said.out
    assert "after 3 steps" in said.out
    assert "held-out acceptance 0." in said.out
    assert "step 3, loss" in said.err
    assert load_file(out / "model.safetensors")["fc.weight"].shape == (32, 96)
    assert cli.main([*arguments, "--seed", "1"]) == 2
    assert "has a run with other settings: schedule" in capsys.readouterr().err


def test_options_are_those_of_serve_and_some_more(tmp_path: Path) -> None:
    job = job_of("--out", tmp_path / "head", "--weights", "int8", "--vocab", "50", "--steps", "7", "--seed", "4")
    assert (job.engine.weights, job.vocab, job.schedule.steps) == ("int8", 50, 7)
    assert (job.schedule.seed, job.text.seed) == (4, 4)
    with pytest.raises(SystemExit):
        job_of("--out", tmp_path / "head", "--steps", "0")


def test_other_drafts_stay_out(tmp_path: Path) -> None:
    job = job_of("--out", tmp_path / "head", "--draft", "other", "--draft", "mtp")
    assert job.engine.draft == ()
    assert job.engine.target == str(embedded_target()), "as `serve` has it"


def test_a_chat_model_writes_its_own_conversations(tmp_path: Path) -> None:
    """From the beginning of a user's turn; what it says there is then asked, and the answer is learned from."""
    job = job_of("--out", tmp_path / "head")
    codec = Codec.load(embedded_target())
    assert codec is not None
    assert job.prompts == []
    opening = codec.decode(job.opening, skip_special_tokens=False)
    assert job.as_prompt is not None
    asked = job.as_prompt(codec.encode(" say hello "))
    assert asked is not None
    text = codec.decode(asked, skip_special_tokens=False)
    assert text.startswith(opening)
    assert "say hello" in text
    assert len(text) > len(opening) + len("say hello"), "the answer's turn is open"
    assert job.as_prompt(codec.encode("  ")) is None


def test_prompts_of_a_file(tmp_path: Path) -> None:
    codec = Codec.load(embedded_target())
    assert codec is not None
    lines, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("def f(x):\n\nimport os\n", "utf-8")
    turn = {"messages": [{"role": "user", "content": "say hello"}]}
    records.write_text("\n".join(map(json.dumps, ["a\nb", {"prompt": "c"}, turn])), "utf-8")
    job = job_of("--out", tmp_path / "head", "--prompts", lines, "--held-out", records)
    assert [codec.decode(prompt) for prompt in job.prompts] == ["def f(x):", "import os"]
    assert [codec.decode(prompt) for prompt in job.held_out[:2]] == ["a\nb", "c"]
    assert "say hello" in codec.decode(job.held_out[2])
    assert (job.opening, job.as_prompt) == ((), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"messages": [{"role": "user"}]}', "prompt 1: messages[0] needs a role and a content"),
        ('{"messages": [{"role": "user", "content": "a"}, 3]}', "prompt 1: messages[1] needs a role and a content"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "prompt 1: messages[0] needs a role"),
    ],
)
def test_invalid_messages_are_reported(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="prompts") as refused:
        job_of("--out", tmp_path / "head", "--prompts", file)
    assert told in str(refused.value)


def test_prompts_need_a_tokenizer(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n", "utf-8")
    with pytest.raises(ValueError, match="no tokenizer"):
        job_of(target, "--out", tmp_path / "head", "--prompts", file)
