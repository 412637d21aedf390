"""Trains the embedded models from scratch: tokenizer, target, then the draft distilled from the target, in stages.

    python -m pilotfish.models.train            # everything, about 90 minutes on two cores
    python -m pilotfish.models.train --stage draft

Deterministic for one machine, torch version and standard library, because the data order depends only on the step.
Resumable: a stopped run continues from its last checkpoint under `models/.train/`.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish.models import corpus, embedded_draft, embedded_target
from pilotfish.models.lessons import continuations, mixed, repeats
from pilotfish.models.tokens import VOCAB, encode, token_stream, train_tokenizer

WORK = Path(__file__).resolve().parent / ".train"


@dataclass(frozen=True)
class Recipe:
    """One model's shape and schedule. Lengths in tokens; `steps` counts optimiser steps."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    steps: int
    batch_tokens: int = 4096
    short: int = 512  # context length during most of the training
    long: int = 1024  # context length during the last fifth, so that the model learns positions up to this one
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 2e-3  # AdamW: embeddings and norms
    warmup: int = 50
    seed: int = 17

    def config(self) -> LlamaConfig:
        """Return the transformers config of this shape."""
        return LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=64,
            max_position_embeddings=self.long,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )

    def length_at(self, step: int) -> int:
        """Return the context length of this step's windows."""
        return self.short if step < 0.8 * self.steps else self.long

    def lr_scale(self, step: int) -> float:
        """Return the learning rate factor: warm up, hold, then fall linearly to zero over the last 60 % (trapezoid)."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.6 * self.steps))


TARGET = Recipe(hidden=256, ffn=640, layers=10, heads=4, kv_heads=2, steps=3300)
DRAFT = Recipe(hidden=192, ffn=512, layers=2, heads=3, kv_heads=1, steps=2000)
COPY = replace(DRAFT, steps=600)  # the draft learns to copy
POLISH = replace(DRAFT, steps=1400, matrix_lr=0.015, other_lr=1e-3)  # then it learns from the target's text
NUM_CONTINUATIONS = 4096


# ---------------------------------------------------------------------------------------------------- data


def batches(stream: np.ndarray, recipe: Recipe, first: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (step, windows `[batch, length + 1]`) from step `first` on; the data of a step depends only on the step."""
    for step in range(first, recipe.steps):
        length = recipe.length_at(step)
        rng = np.random.default_rng((recipe.seed, step))
        starts = rng.integers(0, len(stream) - length - 1, recipe.batch_tokens // length)
        yield step, torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


# ------------------------------------------------------------------------------------------------------- training

Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


def next_token_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Return mean cross-entropy in nats per token; windows `[batch, length + 1]`."""
    return F.cross_entropy(_logits(model, windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def distillation_loss(teacher: LlamaForCausalLM) -> Loss:
    """KL(target || draft) at every position: the draft learns the target's distribution, not that of the text."""

    def loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = _logits(teacher, windows[:, :-1]).log_softmax(-1)
        got = _logits(model, windows[:, :-1]).log_softmax(-1)
        return F.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)

    return loss


def _logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


class Trainer:
    """A model, its two optimisers, and a checkpoint of all three."""

    def __init__(self, name: str, recipe: Recipe, start_from: Path | None = None) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.folder, self.step = recipe, WORK / name, 0
        self.model = LlamaForCausalLM(recipe.config())
        if start_from is not None:
            self.model = LlamaForCausalLM.from_pretrained(start_from, dtype=torch.float32)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if (self.folder / "step.json").exists():
            self.load()

    def run(self, data: Iterable[tuple[int, torch.Tensor]], loss_of: Loss) -> LlamaForCausalLM:
        """Train to the last step; `data` yields (step, windows) from `self.step` on."""
        smooth = None
        with _progress(self.folder.name) as bar:
            task = bar.add_task("", total=self.recipe.steps, completed=self.step, loss="")
            for step, windows in data:
                loss = self._one_step(step, windows, loss_of)
                smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
                self.step = step + 1
                bar.update(task, advance=1, loss=f"loss {smooth:.3f}")
                if self.step % 50 == 0:
                    bar.console.print(f"{self.folder.name} step {self.step} loss {smooth:.4f}")
                if self.step % 200 == 0 or self.step == self.recipe.steps:
                    self.save()
        self.model.eval()
        return self.model

    def _one_step(self, step: int, windows: torch.Tensor, loss_of: Loss) -> float:
        for optimiser, lr in zip(self.optimisers, (self.recipe.matrix_lr, self.recipe.other_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = lr * self.recipe.lr_scale(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(self.model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        return loss.item()

    def save(self) -> None:
        """Weights and optimiser state as safetensors; `step.json` is written last and names the step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = {n: p.data for n, p in self.model.named_parameters()}
        save_file(weights | self._optimiser_tensors(), self.folder / "state.tmp")
        (self.folder / "state.tmp").replace(self.folder / "state.safetensors")
        (self.folder / "step.json").write_text(json.dumps({"step": self.step, "recipe": asdict(self.recipe)}))

    def load(self) -> None:
        """Continue the run in `folder`; raise an error if it was started with another recipe."""
        saved = json.loads((self.folder / "step.json").read_text())
        if saved["recipe"] != asdict(self.recipe):
            raise ValueError(f"{self.folder} was started with another recipe: remove it to start again")
        tensors = load_file(self.folder / "state.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])
        for i, optimiser in enumerate(self.optimisers):
            for j, parameter in enumerate(optimiser.param_groups[0]["params"]):
                mark = f"optimiser.{i}.{j}."
                optimiser.state[parameter] = {k.removeprefix(mark): t for k, t in tensors.items() if k.startswith(mark)}
        self.step = saved["step"]

    def _optimiser_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"optimiser.{i}.{j}.{key}": value
            for i, optimiser in enumerate(self.optimisers)
            for j, parameter in enumerate(optimiser.param_groups[0]["params"])
            for key, value in optimiser.state[parameter].items()
        }


def _progress(name: str) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    return Progress(TextColumn(name), *columns, TimeElapsedColumn(), TimeRemainingColumn())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, text: corpus.Corpus, windows: int = 200) -> float:
    """Return the cross-entropy in nats per token over windows of 512 tokens from the held-out modules."""
    stream = np.concatenate([encode(tokenizer, path) for path in text.held_out])
    recipe = replace(TARGET, steps=windows, batch_tokens=512, seed=1, long=512)
    losses = [next_token_loss(model, rows).item() for _, rows in batches(stream, recipe, 0)]
    return float(np.mean(losses))


def polish(teacher: LlamaForCausalLM, stream: np.ndarray, draft: Path) -> LlamaForCausalLM:
    """Continue training the `draft`, mostly on text that the target wrote."""
    cache = WORK / "continuations.safetensors"
    windows = continuations(copy.deepcopy(teacher), stream, NUM_CONTINUATIONS, POLISH.seed, cache)
    trainer = Trainer("polish", POLISH, start_from=draft)
    text = batches(stream, POLISH, trainer.step)
    copying = repeats(stream, POLISH.batch_tokens, range(trainer.step, POLISH.steps), POLISH.seed)
    data = mixed(text, copying, windows, POLISH.batch_tokens, POLISH.seed)
    return trainer.run(data, distillation_loss(teacher))


def export(model: LlamaForCausalLM, out: Path, tokenizer_from: Path) -> None:
    """Write config, generation config, bf16 safetensors and the tokenizer as one loadable folder."""
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if out != tokenizer_from:
            shutil.copy(tokenizer_from / name, out / name)


# --------------------------------------------------------------------------------------------------------- stages


def main() -> None:
    """Run the requested stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", choices=("all", "tokenizer", "target", "draft", "copy", "polish"), default="all")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = corpus.find()
    target, draft = embedded_target(), embedded_draft()
    if options.stage in ("all", "tokenizer"):
        train_tokenizer(text.library, target, TARGET.long)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    stream = token_stream(tokenizer, text, seed=TARGET.seed)
    report = {"corpus": text.fingerprint(), "tokens": len(stream)}
    if options.stage in ("all", "target"):
        trainer = Trainer("target", TARGET)
        model = trainer.run(batches(stream, TARGET, trainer.step), next_token_loss)
        report["target_held_out_loss"] = held_out_loss(model, tokenizer, text)
        export(model, target, target)
    if options.stage in ("all", "draft"):
        teacher = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        trainer = Trainer("draft", DRAFT)
        model = trainer.run(batches(stream, DRAFT, trainer.step), distillation_loss(teacher))
        export(model, draft, target)
    if options.stage in ("all", "copy"):
        trainer = Trainer("copy", COPY, start_from=draft)
        lessons = repeats(stream, COPY.batch_tokens, range(trainer.step, COPY.steps), COPY.seed)
        export(trainer.run(lessons, next_token_loss), draft, target)
    if options.stage in ("all", "polish"):
        teacher = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        model = polish(teacher, stream, draft)
        report["draft_held_out_loss"] = held_out_loss(model, tokenizer, text)
        export(model, draft, target)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
