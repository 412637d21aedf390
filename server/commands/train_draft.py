"""`pilotfish train-draft`: makes an EAGLE-3 head for a target from what it writes itself. Contains no tensor code.

The work is in `engine.training`. This command reads its options and prompts, knows how a conversation is opened, and
shows how far the run is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.choices import HEADS
from engine.errors import InvalidRequest, ModelError
from engine.model.checkpoint import read_config
from engine.text.codec import Codec
from engine.training.recipe import HeadShape, Schedule, TextPlan
from server.chat import ChatTemplate
from server.config import ServerConfig

if TYPE_CHECKING:
    from engine.training.loop import TrainingStep
    from engine.training.run import TrainingJob
    from engine.training.text import Tokens

_SMOOTH = 0.03  # weight of the newest loss in the mean that is shown


ERRORS = (ValidationError, ModelError, InvalidRequest, OSError)


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Make an EAGLE-3 head for a model; a run that is stopped goes on with the same command."""
    return TrainDraft.of(arguments).run(), True


class TrainDraftConfig(ServerConfig):
    """Make an EAGLE-3 head for a target, from text that it writes itself. Takes the options of `pilotfish serve`.

    Besides: --out DIR is where the head is written, and where a stopped run of the same settings goes on.
    --prompts FILE has what the target continues: a prompt per line, or as .jsonl a string, {"prompt": text} or
    {"messages": [...]} per line; without it the target writes its own prompts. --held-out FILE has prompts that
    measure acceptance. --texts and --tokens: how many texts of how many new tokens. --steps and --batch-tokens: how
    long it learns. --vocab: how many tokens the head can draft. --seed: of texts
    and training.
    """

    model_config = SettingsConfigDict(cli_prog_name="pilotfish train-draft")


@dataclass(frozen=True, slots=True)
class TrainDraft:
    """The parsed command: the options of `pilotfish serve`, and those of the run."""

    config: TrainDraftConfig
    out: Path
    prompts: Path | None = None
    held_out: Path | None = None
    text: TextPlan = field(default_factory=TextPlan)
    shape: HeadShape = field(default_factory=HeadShape)
    schedule: Schedule = field(default_factory=Schedule)

    @classmethod
    def of(cls, arguments: Sequence[str]) -> TrainDraft:
        text, schedule = TextPlan(), Schedule()
        own = argparse.ArgumentParser(prog="pilotfish train-draft", add_help=False, allow_abbrev=False)
        asks_help = any(word in ("-h", "--help") for word in arguments)
        own.add_argument("--out", type=Path, required=not asks_help)
        own.add_argument("--prompts", type=Path)
        own.add_argument("--held-out", type=Path)
        own.add_argument("--texts", type=_at_least(1), default=text.texts)
        own.add_argument("--tokens", type=_at_least(1), default=text.tokens)
        own.add_argument("--steps", type=_at_least(1), default=schedule.steps)
        own.add_argument("--batch-tokens", type=_at_least(1), default=schedule.batch_tokens)
        own.add_argument("--vocab", type=_at_least(1))
        own.add_argument("--seed", type=_at_least(0), default=0)
        mine, others = own.parse_known_args(arguments)
        return cls(
            TrainDraftConfig.load(others),
            mine.out,
            mine.prompts,
            mine.held_out,
            TextPlan(texts=mine.texts, tokens=mine.tokens, seed=mine.seed),
            HeadShape(vocab=mine.vocab),
            Schedule(steps=mine.steps, batch_tokens=mine.batch_tokens, seed=mine.seed),
        )

    def job(self) -> TrainingJob:
        """What `engine.training` is asked for. Raises ModelError if the target or the prompts cannot be used."""
        from engine.training.run import TrainingJob
        from models import embedded_target

        target = self.config.target or str(embedded_target())
        alone = dict.fromkeys(("draft", *HEADS)) | {"target": target, "mtp": False, "warm_up_seconds": 0.0}
        engine = self.config.engine().model_copy(update=alone)
        codec, chat = Codec.load(target, engine.revision), ChatTemplate.load(target, engine.revision)
        given = [_prompts(path, codec, chat) if path else [] for path in (self.prompts, self.held_out)]
        own = self.prompts is None
        return TrainingJob(
            engine=engine,
            out=self.out,
            prompts=given[0],
            held_out=given[1],
            opening=_opening(target, engine.revision, codec, chat) if own else (),
            as_prompt=_answered(codec, chat) if own and codec and chat else None,
            text=self.text,
            shape=self.shape,
            schedule=self.schedule,
        )

    def run(self) -> str:
        """Make the head, and return a message: where it is, how good it is, and the command that serves it."""
        from engine.training.run import train_draft

        job = self.job()
        with TrainingBars(job.text.texts, job.schedule.steps) as bars:
            trainer = train_draft(job, bars)
        kept = "" if bars.acceptance is None else f", held-out acceptance {bars.acceptance}"
        size = (job.out / "model.safetensors").stat().st_size / 1e6
        return (
            f"{job.out} holds an EAGLE-3 head after {trainer.step} steps ({size:.1f} MB){kept}:\n"
            f"`pilotfish serve {job.engine.target} --eagle {job.out}`"
        )


class TrainingBars:
    """Two bars, of texts and of steps, and a line for each measurement of acceptance."""

    def __init__(self, texts: int, steps: int) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._texts = self._progress.add_task("texts", total=texts, told="", start=False)
        self._steps = self._progress.add_task("steps", total=steps, told="", start=False)
        self._loss: float | None = None
        self.acceptance: str | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        self._progress.start_task(self._texts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def wrote(self, done: int, total: int, tokens: int) -> None:
        self._progress.update(self._texts, completed=done, total=total, told=f"{tokens} tokens")

    def trained(self, report: TrainingStep) -> None:
        """Show the mean of the first draft's loss, and the acceptance where it was measured."""
        self._progress.start_task(self._steps)
        newest = report.losses[0]
        self._loss = newest if self._loss is None else (1 - _SMOOTH) * self._loss + _SMOOTH * newest
        self._progress.update(self._steps, completed=report.step, told=f"loss {self._loss:.3f}")
        if report.acceptance is not None:
            self.acceptance = str(report.acceptance)
            self._console.print(f"step {report.step}, loss {self._loss:.3f}, held-out acceptance {self.acceptance}")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def _prompts(path: Path, codec: Codec | None, chat: ChatTemplate | None) -> list[Tokens]:
    if codec is None:
        raise ModelError("the target has no tokenizer, so it takes no prompts of text")
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the prompts: {error}") from error
    is_json = path.suffix == ".jsonl"
    prompts = [
        _of_json(path, i, line, codec, chat) if is_json else codec.encode(line) for i, line in enumerate(lines, 1)
    ]
    if not prompts:
        raise ModelError(f"{path} has no prompts")
    return prompts


def _of_json(path: Path, number: int, line: str, codec: Codec, chat: ChatTemplate | None) -> Tokens:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{path}, line {number}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("messages"), list):
        return codec.encode(_rendered(path, number, found["messages"], chat), bare=True)
    text = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(text, str):
        raise ModelError(f'{path}, line {number}: expected a string, {{"prompt": text}} or {{"messages": [...]}}')
    return codec.encode(text)


def _rendered(path: Path, number: int, messages: list[object], chat: ChatTemplate | None) -> str:
    if chat is None:
        raise ModelError(f"{path}, line {number}: has messages; the target has no chat template")
    turns = list[dict[str, str]]()
    for i, turn in enumerate(messages):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ModelError(f"{path}, line {number}: messages[{i}] needs a role and a content that are strings")
        turns.append({"role": role, "content": content})
    return chat.render(turns)


def _opening(target: str, revision: str | None, codec: Codec | None, chat: ChatTemplate | None) -> Tokens:
    """What the target's own prompts begin with: the start of a user's turn, or of any text."""
    if codec is not None and chat is not None:
        tokens = codec.encode(chat.render([_said("")], opens_turn=False, continues=True), bare=True)
        if tokens:
            return tokens
    tokens = () if codec is None else codec.encode("")
    if tokens:
        return tokens
    text = read_config(target, revision).get_text_config()
    begins = [token for name in ("bos_token_id", "eos_token_id") if isinstance(token := getattr(text, name, None), int)]
    if not begins:
        raise ModelError("the target has no token that begins a text: give it prompts to continue")
    return (begins[0],)


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answered(codec: Codec, chat: ChatTemplate) -> Callable[[Tokens], Tokens | None]:
    """A function: tokens of a user's turn -> a prompt that the answer to it continues; None if the turn is empty."""

    def as_prompt(said: Tokens) -> Tokens | None:
        text = codec.decode(said).strip()
        return codec.encode(chat.render([_said(text)]), bare=True) if text else None

    return as_prompt
