"""`pilotfish train-draft`: trains an EAGLE-3 head on text that its target generates. Contains no tensor code.

Training is in `engine.training`. This command reads options and prompts, applies the chat template, and shows progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pilotfish.engine.errors import InvalidRequest, ModelError
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.training.store import Schedule, TextPlan
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.commands.arguments import Tokens, at_least, read_prompts
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.training.run import TrainingJob
    from pilotfish.engine.training.trainer import TrainingStep

_SMOOTH = 0.03  # weight of the latest loss in the displayed mean


ERRORS = (ModelError, InvalidRequest, OSError, ValueError)  # a ValidationError is a ValueError, too


def run(arguments: Sequence[str], _: Callable[[str], None]) -> tuple[str, bool]:
    """Train the head; return its directory, its acceptance and the command that serves it.

    The same command resumes an interrupted run.
    """
    from pilotfish.engine.training.run import train_draft

    job = job_of(arguments)
    with TrainingBars(job.text.texts, job.schedule.steps) as bars:
        trainer = train_draft(job, bars)
    rate = "" if bars.acceptance is None else f", held-out acceptance {bars.acceptance}"
    size = (job.out / "model.safetensors").stat().st_size / 1e6
    report = f"EAGLE-3 head in {job.out} after {trainer.step} steps ({size:.1f} MB){rate}:\n"
    return f"{report}`pilotfish serve {job.engine.target} --draft {job.out}`", True


_ABOUT = """Train an EAGLE-3 head on text that the target generates. Accepts the options of `pilotfish serve`.

Also: --out DIR (output; an interrupted run with the same settings is resumed from it). --prompts FILE (prompts that the
target continues: one per line, or a .jsonl file with a string, {"prompt": text}, {"token_ids": [...]} or
{"messages": [...]} per line; default: the target generates its own). --held-out FILE (prompts for measuring
acceptance). --texts, --tokens (number of texts, and new tokens of each). --steps, --batch-tokens (training steps, and
tokens of each). --vocab (number of tokens that the head can draft). --seed (of texts and training).
"""


def job_of(arguments: Sequence[str]) -> TrainingJob:
    """Return the settings of the run.

    Raises ValidationError, ModelError for an unsupported target, or ValueError for invalid prompts.
    """
    from pilotfish.engine.training.run import TrainingJob

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
        as_prompt=partial(_answered, codec, chat) if own_prompts and codec and chat else None,
        text=TextPlan(texts=asked.texts, tokens=asked.tokens, seed=asked.seed),
        vocab=asked.vocab,
        schedule=Schedule(steps=asked.steps, batch_tokens=asked.batch_tokens, seed=asked.seed),
    )


class TrainingBars(Progress):
    """Progress bars of texts and steps, and a line for each measurement of acceptance."""

    def __init__(self, texts: int, steps: int) -> None:
        name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
        times = TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(name, BarColumn(), MofNCompleteColumn(), status, *times, console=Console(stderr=True))
        self._texts = self.add_task("texts", total=texts, status="")
        self._steps = self.add_task("steps", total=steps, status="", start=False)
        self._loss: float | None = None
        self.acceptance: str | None = None

    def wrote(self, done: int, total: int, tokens: int) -> None:
        self.update(self._texts, completed=done, total=total, status=f"{tokens} tokens")

    def trained(self, report: TrainingStep) -> None:
        """Show the mean loss of the first draft, and the acceptance if it was measured."""
        self.start_task(self._steps)
        newest = report.losses[0]
        self._loss = newest if self._loss is None else (1 - _SMOOTH) * self._loss + _SMOOTH * newest
        self.update(self._steps, completed=report.step, status=f"loss {self._loss:.3f}")
        if report.acceptance is not None:
            self.acceptance = str(report.acceptance)
            self.console.print(f"step {report.step}, loss {self._loss:.3f}, held-out acceptance {self.acceptance}")


def _rendered(codec: Codec, chat: ChatTemplate, turns: list[dict[str, Any]]) -> Tokens:
    return codec.encode(chat.render(turns), bare=True)


def _opening(target: str, revision: str | None, codec: Codec | None, chat: ChatTemplate | None) -> Tokens:
    """Return the first tokens of generated prompts: the opening of a user's turn, or of any text."""
    if codec is not None:
        turn = [{"role": "user", "content": ""}]
        opening = "" if chat is None else chat.render(turn, opens_turn=False, continues=True)
        if tokens := codec.encode(opening, bare=True) or codec.encode(""):
            return tokens
    text = read_config(target, revision).get_text_config()
    begins = [token for name in ("bos_token_id", "eos_token_id") if isinstance(token := getattr(text, name, None), int)]
    if not begins:
        raise ModelError("the target has no beginning-of-text token, so --prompts is required")
    return (begins[0],)


def _answered(codec: Codec, chat: ChatTemplate, turn: Tokens) -> Tokens | None:
    """Return a prompt from the tokens of a user's turn; None if the turn is empty."""
    text = codec.decode(turn).strip()
    return _rendered(codec, chat, [{"role": "user", "content": text}]) if text else None
