"""Training data of the draft beyond the corpus: repeated text, and text that the target generated.

Distilled on the corpus alone, a draft of two layers did not learn to copy earlier text (Olsson et al. 2022, "In-context
learning and induction heads", arXiv 2209.11895). The target accepted 36 % of its drafts at K=4. Looking up the last two
tokens in the text is right 87 % of the time. With repetitive text in the training data, the draft learns to copy within
300 steps. A draft must also predict what the target generates, so it needs on-policy data (Zhou et al. 2023,
"DistillSpec", arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM

PROMPT, LENGTH = 96, 192  # tokens; a window is PROMPT tokens of training text and the target's continuation
BATCH = 256
REPEAT = 256


def continuations(target: LlamaForCausalLM, stream: np.ndarray, count: int, seed: int, cache: Path) -> np.ndarray:
    """Return `count` windows int64 `[count, LENGTH]`: 75 % continued greedily, 25 % at temperature 0.8."""
    if cache.exists():
        return load_file(cache)["windows"].astype(np.int64)
    rng = np.random.default_rng((seed, PROMPT))
    starts = rng.integers(0, len(stream) - PROMPT, count)
    prompts = np.stack([stream[s : s + PROMPT] for s in starts]).astype(np.int64)
    torch.manual_seed(seed)
    torch.nn.Module.to(target, torch.bfloat16)
    groups = range(0, count, BATCH)
    parts = [_continue(target, prompts[i : i + BATCH], i // BATCH % 4 == 3) for i in track(groups, "continuations")]
    windows = np.concatenate(parts)
    cache.parent.mkdir(parents=True, exist_ok=True)
    save_file({"windows": windows.astype(np.int16)}, cache)
    return windows


@torch.inference_mode()
def _continue(target: LlamaForCausalLM, prompts: np.ndarray, sampled: bool) -> np.ndarray:
    ids = torch.from_numpy(prompts)
    chosen = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {"do_sample": False}
    # some transformers 5 releases type `self` as a protocol that models miss, others do not
    windows = cast(Any, target).generate(
        ids, attention_mask=torch.ones_like(ids), min_length=LENGTH, max_length=LENGTH, pad_token_id=0, **chosen
    )
    assert isinstance(windows, torch.Tensor)
    return np.asarray(windows.numpy())


def repeats(stream: np.ndarray, batch_tokens: int, steps: range, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield windows `[batch, REPEAT + 1]`, each a repeated piece of 8 to 79 tokens; they depend only on the step."""
    for step in steps:
        rng = np.random.default_rng((seed, step, 2))
        yield step, torch.from_numpy(np.stack([_repeat(stream, rng) for _ in range(batch_tokens // REPEAT)]))


def _repeat(stream: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    size = int(rng.integers(8, 80))
    start = int(rng.integers(0, len(stream) - size))
    return np.resize(stream[start : start + size], REPEAT + 1).astype(np.int64)


def mixed(
    corpus: Iterator[tuple[int, torch.Tensor]],
    copying: Iterator[tuple[int, torch.Tensor]],
    windows: np.ndarray,
    batch_tokens: int,
    seed: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Of four steps, one uses the corpus, one repeats, two `windows`; the data of a step depends only on the step."""
    for (step, text), (_, repeated) in zip(corpus, copying, strict=True):
        rng = np.random.default_rng((seed, step, 1))
        chosen = rng.integers(0, len(windows), batch_tokens // LENGTH)
        yield step, (text, repeated, *[torch.from_numpy(windows[chosen])] * 2)[step % 4]
