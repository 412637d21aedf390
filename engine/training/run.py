"""A training run: the target generates texts, the head is trained and exported. Each part can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.threads import cores
from pilotfish.engine.model.checkpoint import positions, read_config
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.startup.build import pick_device
from pilotfish.engine.training.eagle3 import NUM_PLACES, Eagle3Shape, TrainedEagle3, config_of, export_head
from pilotfish.engine.training.plan import Schedule, TextPlan
from pilotfish.engine.training.store import RunFolder, TargetParts, WrittenText
from pilotfish.engine.training.text import Tokens, Writer, continued, own_prompts
from pilotfish.engine.training.trainer import HeadTrainer, TrainingStep

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HELD_OUT = "held-out"
_LARGEST_VOCAB = 32000  # default draft vocabulary, as of published heads
_FEWEST = 4  # minimum windows of text of a run


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def stage(self, what: str, total: int | None = None) -> None:
        """A stage of `total` texts or steps begins."""

    def generated(self, done: int, tokens: int) -> None:
        """`done` texts of the stage are complete; `tokens` were generated since this process began."""

    def wrote(self, done: int, total: int, tokens: int) -> None:
        """`done` of `total` texts are saved."""

    def trained(self, report: TrainingStep) -> None:
        """A step is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The settings of `train_draft`: a target, its prompts, the schedule, and a folder.

    Attributes:
        engine: config of the target for generation.
        out: the folder of the run and of the head.
        prompts: to be continued; if empty the target generates its own prompts from `opening`.
        held_out: prompts for measuring acceptance; if empty the last tenth of `prompts`, or further generated ones.
        opening: first tokens of generated prompts.
        as_prompt: makes a prompt of a text generated from `opening`, or None; default: opening plus text.
        vocab: number of draftable tokens; None: 32,000, or all if the target has fewer.
    """

    engine: EngineConfig
    out: Path
    prompts: Seq[Tokens] = ()
    held_out: Seq[Tokens] = ()
    opening: Tokens = ()
    as_prompt: Callable[[Tokens], Tokens | None] | None = None
    text: TextPlan = field(default_factory=TextPlan)
    vocab: int | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def settings(self) -> dict[str, Any]:
        """The settings stored in a run's folder: a run is resumed only with equal ones."""
        given = json.dumps([self.prompts, self.held_out, self.opening])
        named = ("target", "revision", "device", "dtype", "weights", "kv_cache_dtype", "threads", "max_model_len")
        loaded = {name: getattr(self.engine, name) for name in named}
        made = {"text": asdict(self.text), "shape": {"vocab": self.vocab}, "schedule": asdict(self.schedule)}
        return loaded | made | {"prompts": hashlib.sha256(given.encode()).hexdigest()[:16]}


def train_draft(job: TrainingJob, observer: RunObserver) -> HeadTrainer:
    """Train an EAGLE-3 head and write it to `job.out`; an interrupted run is resumed.

    Raises:
        ModelError: the target is not supported, there is too little text or disk, or the folder has other content.
    """
    folder = RunFolder(job.out, job.settings())
    with folder.locked():
        folder.check_room(disk_bytes(job))
        return _run(job, folder, observer)


def disk_bytes(job: TrainingJob) -> int:
    """About how many bytes a run keeps at most until its end: the texts' hidden states and two training states."""
    plan, described = job.text, read_config(job.engine.target, job.engine.revision).get_text_config()
    hidden, vocab = int(described.hidden_size), int(described.vocab_size)
    own = min(plan.prompt_tokens, plan.prompt_tokens // 4 + 2 * len(job.opening) + 16)
    given = [min(plan.prompt_tokens, len(prompt)) for prompt in job.prompts] or [own]
    tokens = plan.texts * (sum(given) / len(given) + plan.tokens)
    tokens += plan.held_out * (max(given) + plan.held_out_tokens)
    shape = _shape(described, hidden, vocab, min(vocab, job.vocab or _LARGEST_VOCAB))
    matrices, output = shape.num_matrix_parameters, shape.draft_vocab_size * hidden
    state = 4 * (2 * matrices + 3 * output)  # float32, with one momentum of matrices and two of the output
    return int(2 * hidden * (NUM_PLACES + 1) * tokens) + 2 * state


def _run(job: TrainingJob, folder: RunFolder, observer: RunObserver) -> HeadTrainer:
    names, target, places = _write(job, folder, observer)
    torch.set_num_threads(job.engine.threads or cores())
    texts = [text for name in names for text in folder.load_texts(name)]
    found = sum(len(text.rows) for text in texts)
    needed = _FEWEST * job.schedule.window
    if found < needed:
        raise ModelError(f"the target generated {found} tokens; training requires at least {needed}: increase texts")
    trainer = _trainer(job, folder, texts, target)
    observer.stage("training", job.schedule.steps)
    trainer.run(texts, list(folder.load_texts(HELD_OUT)), observer.trained)
    limit = positions(read_config(job.engine.target, job.engine.revision)).limit
    export_head(trainer.head, config_of(trainer.head.shape, places, limit), job.out)
    return trainer


def _write(job: TrainingJob, folder: RunFolder, observer: RunObserver) -> tuple[list[str], TargetParts, Seq[int]]:
    """Generate the missing texts; return the names of all text files, and the target's matrices and places."""
    plan, done, tokens = job.text, 0, 0
    names = [f"{number:05}" for number in range(-(-plan.texts // plan.together))]
    missing = [number for number, name in enumerate(names) if not folder.has(f"{name}.texts")]

    def on_tokens(ended: int, number: int) -> None:
        nonlocal tokens
        tokens = number
        observer.generated(done + ended, tokens)

    writer = Writer(_fitted(job), observer.stage, on_tokens)
    prompts, apart = _split(job)
    if not folder.has(f"{HELD_OUT}.texts"):
        observer.stage("generating held-out texts", len(apart) or plan.held_out)
        own = apart or own_prompts(writer, job.opening, plan, -1, plan.held_out, as_prompt=job.as_prompt)
        greedy = [SamplingParams(max_tokens=plan.held_out_tokens)] * len(own)
        folder.save_texts(HELD_OUT, writer.write([prompt[-plan.prompt_tokens :] for prompt in own], greedy))
    if missing:
        observer.stage("generating texts", plan.texts)
    for number in missing:
        done = min(plan.texts, number * plan.together)
        folder.save_texts(names[number], _texts(job, writer, prompts, number))
        observer.wrote(min(plan.texts, (number + 1) * plan.together), plan.texts, tokens)
    return names, writer.parts(), writer.places


def _fitted(job: TrainingJob) -> EngineConfig:
    """The config with a context that is as long as the texts, so that more of them are generated concurrently."""
    plan, most = job.text, max(job.text.tokens, job.text.held_out_tokens)
    longest = max(plan.prompt_tokens + most, 2 * most)
    limit = min(longest, positions(read_config(job.engine.target, job.engine.revision)).limit)
    return job.engine.model_copy(update={"max_model_len": job.engine.max_model_len or limit})


def _texts(job: TrainingJob, writer: Writer, prompts: Seq[Tokens], number: int) -> list[WrittenText]:
    """The texts of file `number`."""
    plan, first = job.text, number * job.text.together
    chosen = range(first, min(plan.texts, first + plan.together))
    if not prompts:
        own = own_prompts(writer, job.opening, plan, number, len(chosen), as_prompt=job.as_prompt)
        return continued(writer, own, plan, number)
    given = [prompts[i % len(prompts)][-plan.prompt_tokens :] for i in chosen]
    again = first >= len(prompts)  # a repeated prompt would have the same greedy continuation
    return continued(writer, given, replace(plan, greedy=0.0) if again else plan, number)


def _split(job: TrainingJob) -> tuple[Seq[Tokens], Seq[Tokens]]:
    """Prompts for training and for measuring acceptance; default of the latter: the last tenth."""
    if job.held_out or not job.prompts:
        return job.prompts, job.held_out
    apart = min(job.text.held_out, len(job.prompts) // 10)
    if not apart:
        raise ModelError(f"there are {len(job.prompts)} prompts; expected at least 10, or separate held-out prompts")
    return job.prompts[:-apart], job.prompts[-apart:]


def _trainer(job: TrainingJob, folder: RunFolder, texts: Seq[WrittenText], parts: TargetParts) -> HeadTrainer:
    vocab, hidden = parts.embedding.shape
    kept = _kept(texts, vocab, min(vocab, job.vocab or _LARGEST_VOCAB))
    described = read_config(job.engine.target, job.engine.revision).get_text_config()
    torch.manual_seed(job.schedule.seed)
    head = TrainedEagle3(_shape(described, hidden, vocab, len(kept)), kept, parts.output)
    return HeadTrainer(head, parts, job.schedule, folder, pick_device(job.engine.device))


def _shape(described: PreTrainedConfig, hidden: int, vocab: int, draft_vocab: int) -> Eagle3Shape:
    wide = getattr(described, "intermediate_size", None)
    width = wide if isinstance(wide, int) else 4 * hidden
    return Eagle3Shape.fitting(hidden, vocab_size=vocab, draft_vocab_size=draft_vocab, intermediate_size=width)


def _kept(texts: Seq[WrittenText], vocab: int, number: int) -> Tensor:
    """The `number` most frequent tokens of the target, by ascending id."""
    counts = torch.bincount(torch.cat([text.tokens[text.prompt :] for text in texts]), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:number].sort().values
