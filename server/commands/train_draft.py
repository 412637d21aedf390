"""`pilotfish train-draft`: trains an EAGLE-3 head on text that its target generates. Contains no tensor code.

Training is in `engine.training`. This command reads options and prompts, applies the chat template, and shows progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.engine.errors import InvalidRequest, ModelError
from pilotfish.engine.training.plan import Schedule, TextPlan
from pilotfish.server.commands.arguments import Tokens, at_least, read_prompts
from pilotfish.server.commands.progress import Progress, Stopped, stoppable
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.text.codec import Codec
    from pilotfish.engine.training.run import TrainingJob
    from pilotfish.engine.training.trainer import TrainingStep
    from pilotfish.server.chat import ChatTemplate

_SMOOTH = 0.03  # weight of the latest loss in the displayed mean
_PLAN, _SCHEDULE = TextPlan(), Schedule()
_PROMPTS = """one per line, or a .jsonl file with a string, {"prompt": text}, {"token_ids": [...]} or
{"messages": [...]} per line"""

ERRORS = (ModelError, InvalidRequest, OSError, ValueError)  # a ValidationError is a ValueError, too

_ABOUT = """Train an EAGLE-3 head on text that the target generates. Accepts the options of `pilotfish serve`.

A stopped run is resumed by the same command. docs/training.md has times and results.
"""

OPTIONS: dict[str, dict[str, Any]] = {
    "out": {"type": Path, "metavar": "DIR", "help": "output folder, and the state of a stopped run (required)"},
    "prompts": {
        "type": Path,
        "metavar": "FILE",
        "help": f"prompts that the target continues: {_PROMPTS} (default: the target generates its own)",
    },
    "held-out": {
        "type": Path,
        "metavar": "FILE",
        "help": "prompts for measuring acceptance, in the same form (default: a tenth of the prompts, or further ones)",
    },
    "texts": {"type": at_least(1), "default": _PLAN.texts, "help": "number of texts (default: %(default)s)"},
    "tokens": {"type": at_least(1), "default": _PLAN.tokens, "help": "new tokens of each text (default: %(default)s)"},
    "steps": {
        "type": at_least(1),
        "default": _SCHEDULE.steps,
        "help": "number of training steps (default: %(default)s)",
    },
    "batch-tokens": {
        "type": at_least(1),
        "default": _SCHEDULE.batch_tokens,
        "help": "tokens of a training step (default: %(default)s)",
    },
    "vocab": {
        "type": at_least(1),
        "help": "number of tokens that the head can draft, the target's most frequent ones (default: 32000, or all)",
    },
    "seed": {"type": at_least(0), "default": _PLAN.seed, "help": "seed of texts and training (default: %(default)s)"},
}


def run(arguments: Sequence[str], progress: Progress) -> tuple[str, bool]:
    """Train the head; return its folder, its acceptance and the command that serves it.

    The same command resumes an interrupted run. Intermediate files are removed at the end.
    """
    progress("reading options and prompts")
    job = job_of(arguments)

    from pilotfish.engine.training.run import disk_bytes, train_draft
    from pilotfish.engine.training.store import RunFolder

    folder = RunFolder(job.out, job.settings())
    weights, result = job.out / "model.safetensors", folder.result()
    if result is None or not weights.exists():
        size = f"about {disk_bytes(job) / 1e9:.1f} GB at most in {folder.folder}"
        shown = TrainingProgress(progress)
        try:
            progress.note(f"disk: {size}, removed at the end; stop with Ctrl-C, and the same command resumes the run")
            with stoppable():
                trainer = train_draft(job, shown)
        except Stopped as stop:
            stop.kept = f"texts and steps so far are kept in {folder.folder}: run the same command again to resume"
            raise
        result = {"steps": trainer.step, "acceptance": shown.acceptance}
    folder.finish(result)
    rate = "" if result["acceptance"] is None else f", held-out acceptance {result['acceptance']}"
    size = f"{weights.stat().st_size / 1e6:.1f} MB"
    report = f"EAGLE-3 head in {job.out} after {result['steps']} steps ({size}){rate}:\n"
    return f"{report}`pilotfish serve {job.engine.target} --draft {job.out}`", True


def job_of(arguments: Sequence[str]) -> TrainingJob:
    """Return the settings of the run.

    Raises ValidationError, ModelError for an unsupported target, or ValueError for invalid prompts.
    """
    asked, config = ServerConfig.load_with("train-draft", _ABOUT, OPTIONS, arguments)
    if asked.out is None:
        raise ValueError("--out DIR is required")

    from pilotfish.engine.text.codec import Codec
    from pilotfish.engine.training.run import TrainingJob
    from pilotfish.server.chat import ChatTemplate

    engine = config.engine().model_copy(update={"draft": (), "warm_up_seconds": 0.0})
    codec = Codec.load(engine.target, engine.revision)
    chat = ChatTemplate.load(engine.target, engine.revision, config.chat_template)
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
        text=TextPlan(texts=asked.texts, tokens=asked.tokens, seed=asked.seed, held_out=_held_out(asked.texts)),
        vocab=asked.vocab,
        schedule=Schedule(steps=asked.steps, batch_tokens=asked.batch_tokens, seed=asked.seed),
    )


class TrainingProgress:
    """Shows the progress of a run, and keeps the latest acceptance."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss: float | None = None
        self.acceptance: str | None = None

    def stage(self, what: str, total: int | None = None) -> None:
        self._progress.begin(what, total)

    def generated(self, done: int, tokens: int) -> None:
        self._progress.update(done, f"{tokens} tokens")

    def wrote(self, done: int, total: int, tokens: int) -> None:
        assert done <= total, "more texts than were asked for"
        self.generated(done, tokens)

    def trained(self, report: TrainingStep) -> None:
        """Show the mean loss of the first draft, and the acceptance if it was measured."""
        newest = report.losses[0]
        self._loss = newest if self._loss is None else (1 - _SMOOTH) * self._loss + _SMOOTH * newest
        if report.acceptance is not None:
            self.acceptance = str(report.acceptance)
            self._progress.note(f"step {report.step}, loss {self._loss:.3f}, held-out acceptance {self.acceptance}")
        rate = "" if self.acceptance is None else f", acceptance {self.acceptance.split()[0]}"
        self._progress.update(report.step, f"loss {self._loss:.3f}{rate}")


def _held_out(texts: int) -> int:
    """Fewer prompts for a short trial, which would otherwise mostly generate held-out texts."""
    return min(_PLAN.held_out, max(4, texts // 8))


def _rendered(codec: Codec, chat: ChatTemplate, turns: list[dict[str, Any]]) -> Tokens:
    return codec.encode(chat.render(turns), bare=True)


def _opening(target: str, revision: str | None, codec: Codec | None, chat: ChatTemplate | None) -> Tokens:
    """Return the first tokens of generated prompts: the opening of a user's turn, or of any text."""
    if codec is not None:
        turn = [{"role": "user", "content": ""}]
        opening = "" if chat is None else chat.render(turn, opens_turn=False, continues=True)
        if tokens := codec.encode(opening, bare=True) or codec.encode(""):
            return tokens
    from pilotfish.engine.model.checkpoint import read_config

    text = read_config(target, revision).get_text_config()
    begins = [token for name in ("bos_token_id", "eos_token_id") if isinstance(token := getattr(text, name, None), int)]
    if not begins:
        raise ModelError("the target has no beginning-of-text token, so --prompts is required")
    return (begins[0],)


def _answered(codec: Codec, chat: ChatTemplate, turn: Tokens) -> Tokens | None:
    """Return a prompt from the tokens of a user's turn; None if the turn is empty."""
    text = codec.decode(turn).strip()
    return _rendered(codec, chat, [{"role": "user", "content": text}]) if text else None
