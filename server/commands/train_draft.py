"""`pilotfish train-draft`: makes an EAGLE-3 head for a target from what it writes itself. Contains no tensor code.

The work is in `engine.training`. This command reads its options and prompts, knows how a conversation is opened, and
shows how far the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.errors import InvalidRequest, ModelError
from engine.model.checkpoint import read_config
from engine.text.codec import Codec
from engine.training.recipe import Schedule, TextPlan
from server.chat import ChatTemplate
from server.commands.arguments import Tokens, at_least, read_prompts
from server.config import ServerConfig

if TYPE_CHECKING:
    from engine.training.loop import TrainingStep
    from engine.training.run import TrainingJob

_SMOOTH = 0.03  # weight of the newest loss in the mean that is shown


ERRORS = (ModelError, InvalidRequest, OSError, ValueError)  # a ValidationError is a ValueError, too


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Make an EAGLE-3 head; return where it is, how good it is, and the command that serves it.

    A run that is stopped goes on with the same command.
    """
    from engine.training.run import train_draft

    job = job_of(arguments)
    with TrainingBars(job.text.texts, job.schedule.steps) as bars:
        trainer = train_draft(job, bars)
    kept = "" if bars.acceptance is None else f", held-out acceptance {bars.acceptance}"
    size = (job.out / "model.safetensors").stat().st_size / 1e6
    told = f"{job.out} holds an EAGLE-3 head after {trainer.step} steps ({size:.1f} MB){kept}:\n"
    return f"{told}`pilotfish serve {job.engine.target} --draft {job.out}`", True


_ABOUT = """Make an EAGLE-3 head for a target, from text that it writes itself. Takes the options of `pilotfish serve`.

Besides: --out DIR is where the head is written, and where a stopped run of the same settings goes on.
--prompts FILE has what the target continues: a prompt per line, or as .jsonl a string, {"prompt": text},
{"token_ids": [...]} or {"messages": [...]} per line; without it the target writes its own prompts. --held-out FILE
has prompts that measure acceptance. --texts and --tokens: how many texts of how many new tokens. --steps and
--batch-tokens: how long it learns. --vocab: how many tokens the head can draft. --seed: of texts and training.
"""


def job_of(arguments: Sequence[str]) -> TrainingJob:
    """What `engine.training` is asked for.

    Raises ValidationError, ModelError if the target cannot be used, or ValueError if the prompts cannot.
    """
    from engine.training.run import TrainingJob

    text, schedule, number = TextPlan(), Schedule(), at_least(1)
    own: dict[str, dict[str, Any]] = {
        "out": {"type": Path, "required": not {"-h", "--help"} & set(arguments)},
        "prompts": {"type": Path},
        "held-out": {"type": Path},
        "texts": {"type": number, "default": text.texts},
        "tokens": {"type": number, "default": text.tokens},
        "steps": {"type": number, "default": schedule.steps},
        "batch-tokens": {"type": number, "default": schedule.batch_tokens},
        "vocab": {"type": number},
        "seed": {"type": at_least(0), "default": 0},
    }
    asked, config = ServerConfig.load_with("train-draft", _ABOUT, own, arguments)
    engine = config.engine().model_copy(update={"draft": (), "warm_up_seconds": 0.0})
    codec, chat = Codec.load(engine.target, engine.revision), ChatTemplate.load(engine.target, engine.revision)
    encode = None if codec is None else codec.encode
    render = None if codec is None or chat is None else partial(_rendered, codec, chat)
    given = [[] if path is None else read_prompts(path, encode, render) for path in (asked.prompts, asked.held_out)]
    own_prompts = asked.prompts is None
    return TrainingJob(
        engine=engine,
        out=asked.out,
        prompts=given[0],
        held_out=given[1],
        opening=_opening(engine.target, engine.revision, codec, chat) if own_prompts else (),
        as_prompt=_answered(codec, chat) if own_prompts and codec and chat else None,
        text=TextPlan(texts=asked.texts, tokens=asked.tokens, seed=asked.seed),
        vocab=asked.vocab,
        schedule=Schedule(steps=asked.steps, batch_tokens=asked.batch_tokens, seed=asked.seed),
    )


class TrainingBars(Progress):
    """Two bars, of texts and of steps, and a line for each measurement of acceptance."""

    def __init__(self, texts: int, steps: int) -> None:
        about, told = TextColumn("{task.description}"), TextColumn("{task.fields[told]}")
        times = TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(about, BarColumn(), MofNCompleteColumn(), told, *times, console=Console(stderr=True))
        self._texts = self.add_task("texts", total=texts, told="")
        self._steps = self.add_task("steps", total=steps, told="", start=False)
        self._loss: float | None = None
        self.acceptance: str | None = None

    def wrote(self, done: int, total: int, tokens: int) -> None:
        self.update(self._texts, completed=done, total=total, told=f"{tokens} tokens")

    def trained(self, report: TrainingStep) -> None:
        """Show the mean of the first draft's loss, and the acceptance where it was measured."""
        self.start_task(self._steps)
        newest = report.losses[0]
        self._loss = newest if self._loss is None else (1 - _SMOOTH) * self._loss + _SMOOTH * newest
        self.update(self._steps, completed=report.step, told=f"loss {self._loss:.3f}")
        if report.acceptance is not None:
            self.acceptance = str(report.acceptance)
            self.console.print(f"step {report.step}, loss {self._loss:.3f}, held-out acceptance {self.acceptance}")


def _rendered(codec: Codec, chat: ChatTemplate, turns: list[dict[str, Any]]) -> Tokens:
    return codec.encode(chat.render(turns), bare=True)


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
