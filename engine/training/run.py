"""A training run: the target generates texts, the head is trained and exported. Each part can be resumed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.threads import cores
from pilotfish.engine.model.checkpoint import positions, read_config
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.startup.build import pick_device
from pilotfish.engine.training.eagle3 import Eagle3Shape, TrainedEagle3, config_of, export_head
from pilotfish.engine.training.store import RunFolder, Schedule, TargetParts, TextPlan, WrittenText
from pilotfish.engine.training.text import Tokens, Writer, continued, own_prompts
from pilotfish.engine.training.trainer import HeadTrainer, TrainingStep

log = logging.getLogger(__name__)

PARTS, HELD_OUT = "target", "held-out"
_LARGEST_VOCAB = 32000  # default draft vocabulary, as of published heads
_FEWEST = 4  # minimum windows of text of a run


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def wrote(self, done: int, total: int, tokens: int) -> None:
        """`done` of `total` texts are generated; `tokens`: since this process began."""

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
        ModelError: the target is not supported, there is too little text, or the folder has other content.
    """
    folder = RunFolder(job.out, job.settings())
    with folder.locked():
        return _run(job, folder, observer)


def _run(job: TrainingJob, folder: RunFolder, observer: RunObserver) -> HeadTrainer:
    names = _write(job, folder, observer)
    torch.set_num_threads(job.engine.threads or cores())
    texts = [text for name in names for text in folder.load_texts(name)]
    found = sum(len(text.rows) for text in texts)
    needed = _FEWEST * job.schedule.window
    if found < needed:
        raise ModelError(f"the target generated {found} tokens; training requires at least {needed}: increase texts")
    parts, notes = folder.load(PARTS)
    target = TargetParts(parts["embedding"], parts["output"], **json.loads(notes["law"]))
    trainer = _trainer(job, folder, texts, target)
    trainer.run(texts, list(folder.load_texts(HELD_OUT)), observer.trained)
    limit = positions(read_config(job.engine.target, job.engine.revision)).limit
    export_head(trainer.head, config_of(trainer.head.shape, json.loads(notes["places"]), limit), job.out)
    return trainer


def _write(job: TrainingJob, folder: RunFolder, observer: RunObserver) -> list[str]:
    """Generate the missing texts; return the names of all text files."""
    plan = job.text
    names = [f"{number:05}" for number in range(-(-plan.texts // plan.together))]
    missing = [number for number, name in enumerate(names) if not folder.has(f"{name}.texts")]
    if not missing and folder.has(f"{HELD_OUT}.texts") and folder.has(PARTS):
        return names
    writer = Writer(job.engine)
    if not folder.has(PARTS):
        parts = writer.parts()
        logits = {"factor": parts.factor, "cap": parts.cap}
        notes = {"places": json.dumps(writer.places), "law": json.dumps(logits)}
        folder.save(PARTS, {"embedding": parts.embedding, "output": parts.output}, notes)
    prompts, apart = _split(job)
    if not folder.has(f"{HELD_OUT}.texts"):
        own = apart or own_prompts(writer, job.opening, plan, -1, as_prompt=job.as_prompt)[: plan.held_out]
        greedy = [SamplingParams(max_tokens=plan.held_out_tokens)] * len(own)
        folder.save_texts(HELD_OUT, writer.write([prompt[-plan.prompt_tokens :] for prompt in own], greedy))
    tokens = 0
    for number in missing:
        texts = _texts(job, writer, prompts, number)
        folder.save_texts(names[number], texts)
        tokens += sum(len(text.tokens) for text in texts)
        observer.wrote(min(plan.texts, (number + 1) * plan.together), plan.texts, tokens)
    return names


def _texts(job: TrainingJob, writer: Writer, prompts: Seq[Tokens], number: int) -> list[WrittenText]:
    """The texts of file `number`."""
    plan, first = job.text, number * job.text.together
    chosen = range(first, min(plan.texts, first + plan.together))
    if not prompts:
        own = own_prompts(writer, job.opening, plan, number, as_prompt=job.as_prompt)
        return continued(writer, own[: len(chosen)], plan, number)
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
    wide = getattr(read_config(job.engine.target, job.engine.revision).get_text_config(), "intermediate_size", None)
    width = wide if isinstance(wide, int) else 4 * hidden
    torch.manual_seed(job.schedule.seed)
    shape = Eagle3Shape.fitting(hidden, vocab_size=vocab, draft_vocab_size=len(kept), intermediate_size=width)
    head = TrainedEagle3(shape, kept, parts.output)
    return HeadTrainer(head, parts, job.schedule, folder, pick_device(job.engine.device))


def _kept(texts: Seq[WrittenText], vocab: int, number: int) -> Tensor:
    """The `number` most frequent tokens of the target, by ascending id."""
    counts = torch.bincount(torch.cat([text.tokens[text.prompt :] for text in texts]), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:number].sort().values
