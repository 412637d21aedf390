"""Trains Medusa heads for the embedded target, and writes the prompts for training its EAGLE head.

    python -m pilotfish.models.heads            # about 10 minutes on one core
    python -m pilotfish.models.heads --prompts  # only models/.train/prompts.jsonl and held-out.jsonl

Medusa's heads learn the frozen target's own distribution and are stored in their published layout. The EAGLE head is
trained by `pilotfish train-draft`, like that of any target, on text that the target generates after these prompts
(`make heads` does both).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish.models import corpus, embedded_medusa, embedded_target
from pilotfish.models.lessons import continuations, mixed, repeats
from pilotfish.models.tokens import token_stream
from pilotfish.models.train import DRAFT, NUM_CONTINUATIONS, POLISH, TARGET, WORK, batches


@dataclass(frozen=True)
class HeadRecipe:
    """Shape and schedule of the heads."""

    num_heads: int = 4  # one per draft
    num_layers: int = 1  # residual blocks in each head
    steps: int = 1600
    batch_tokens: int = 2048
    matrix_lr: float = 0.01  # Muon
    other_lr: float = 1e-3  # AdamW
    decay: float = 0.8  # weight of each deeper draft, which is used only if all drafts before it were right
    seed: int = 23


HEADS = HeadRecipe()
NUM_PROMPTS, PROMPTS_SEED = 8000, 1
NUM_HELD_OUT = 32


class Residual(nn.Module):
    """x + SiLU(linear(x)); starts as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to the same shape."""
        return x + F.silu(self.linear(x))


class Medusa(nn.ModuleList):
    """Head i predicts the token i + 2 positions on (Cai et al. 2024, arXiv 2401.10774). All share one output matrix."""

    def __init__(self, recipe: HeadRecipe, hidden: int) -> None:
        heads = range(recipe.num_heads)
        super().__init__(nn.Sequential(*[Residual(hidden) for _ in range(recipe.num_layers)]) for _ in heads)

    def losses(self, seen: TargetOutputs, matrix: Tensor) -> Iterator[Tensor]:
        """Yield one loss per head: head i must predict from `features[t]` the distribution at t + 1 + i."""
        for i, head in enumerate(self, start=1):
            yield seen.divergence(head(seen.features[:, :-i]) @ matrix.T, ahead=i)

    def config(self, recipe: HeadRecipe, target: LlamaConfig) -> dict[str, object]:
        """Return the config in the published format."""
        return {
            "medusa_num_heads": recipe.num_heads,
            "medusa_num_layers": recipe.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }


@dataclass(frozen=True)
class TargetOutputs:
    """The target's results for windows `[batch, length + 1]`."""

    features: Tensor  # [batch, length, hidden], after the final norm
    log_probs: Tensor  # [batch, length, vocab], of the token after each position

    @classmethod
    @torch.no_grad()
    def of(cls, target: LlamaForCausalLM, windows: Tensor) -> TargetOutputs:
        """Run one pass of the frozen target."""
        features = target.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
        return cls(features, target.lm_head(features).float().log_softmax(-1))

    def divergence(self, logits: Tensor, ahead: int) -> Tensor:
        """Return mean KL(target || head) in nats; `logits[:, t]` predicts the distribution at t + `ahead`."""
        wanted, got = self.log_probs[:, ahead:].flatten(0, 1), logits.float().log_softmax(-1).flatten(0, 1)
        return F.kl_div(got, wanted, reduction="batchmean", log_target=True)


def train(recipe: HeadRecipe, target: LlamaForCausalLM, data: Iterator[tuple[int, Tensor]]) -> Medusa:
    """Train all heads at once, from the same passes of the target."""
    torch.manual_seed(recipe.seed)
    medusa = Medusa(recipe, target.config.hidden_size)
    step_of = _optimiser(recipe, list(medusa.parameters()))
    smooth = np.zeros(recipe.num_heads)
    for step, windows in track(data, description="heads", total=recipe.steps):
        with torch.autocast("cpu", torch.bfloat16):
            seen, matrix = TargetOutputs.of(target, windows), target.lm_head.weight.detach()
            losses = list(medusa.losses(seen, matrix))
        torch.stack([recipe.decay**i * loss for i, loss in enumerate(losses)]).sum().backward()
        step_of(step)
        smooth += (np.array([loss.item() for loss in losses]) - smooth) * max(0.02, 1 / (step + 1))
        if step % 50 == 49:
            print(step + 1, " ".join(f"{loss:.3f}" for loss in smooth), flush=True)
    return medusa


def _optimiser(recipe: HeadRecipe, parameters: list[nn.Parameter]) -> Callable[[int], None]:
    """Return a step of Muon for matrices and AdamW for the rest: warm up, hold, fall to zero over the last 60 %."""
    groups = [[p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]]
    rates = (recipe.matrix_lr, recipe.other_lr)
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(groups[0], lr=rates[0], weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(groups[1], lr=rates[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def step_of(step: int) -> None:
        scale = min(1.0, (step + 1) / 50, (recipe.steps - step) / (0.6 * recipe.steps))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * scale
            optimiser.step()
            optimiser.zero_grad()

    return step_of


def lessons(recipe: HeadRecipe, target: LlamaForCausalLM) -> Iterator[tuple[int, Tensor]]:
    """Yield batches: of four steps, one uses the corpus, one repeated text, and two text of the target."""
    tokenizer = Tokenizer.from_file(str(embedded_target() / "tokenizer.json"))
    stream = token_stream(tokenizer, corpus.find(), seed=TARGET.seed)
    cache = WORK / "continuations.safetensors"
    windows = continuations(copy.deepcopy(target), stream, NUM_CONTINUATIONS, POLISH.seed, cache)
    schedule = replace(DRAFT, steps=recipe.steps, batch_tokens=recipe.batch_tokens, seed=recipe.seed)
    copying = repeats(stream, recipe.batch_tokens, range(recipe.steps), recipe.seed)
    return mixed(batches(stream, schedule, 0), copying, windows, recipe.batch_tokens, recipe.seed)


def export(head: nn.Module, config: dict[str, object], out: Path) -> None:
    """Write bf16 safetensors and a config.json."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().bfloat16().contiguous() for name, p in head.named_parameters()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_prompts(folder: Path) -> None:
    """Write starts of functions as prompts for `pilotfish train-draft`, and held-out ones for its evaluation."""
    prompts = corpus.training_prompts(NUM_PROMPTS, PROMPTS_SEED)
    random.Random(PROMPTS_SEED).shuffle(prompts)  # noqa: S311 - an order of prompts, no secret
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("prompts", prompts), ("held-out", corpus.held_out_prompts(NUM_HELD_OUT))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")


def main() -> None:
    """Write the prompts, and train and write Medusa's heads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=HEADS.steps)
    parser.add_argument("--prompts", action="store_true", help="only write the prompts")
    options = parser.parse_args()
    write_prompts(WORK)
    if options.prompts:
        return
    torch.set_num_threads(options.threads)
    recipe = replace(HEADS, steps=options.steps)
    target = LlamaForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32).eval().requires_grad_(False)
    medusa = train(recipe, target, lessons(recipe, target))
    export(medusa, medusa.config(recipe, target.config), embedded_medusa())
    print(json.dumps(asdict(recipe)))


if __name__ == "__main__":
    main()
