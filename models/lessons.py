"""What the draft is taught beyond the corpus: to copy, and what the target itself writes.

Distilled on the corpus alone, two layers did not learn to copy what stood before (Olsson et al. 2022, "In-context
learning and induction heads", arXiv 2209.11895): of its guesses at K=4 36 % were kept, where looking the last two
tokens up in the text is right 87 % of the time. On text that repeats itself the ability comes within 300 steps. And a
draft is judged on what the target writes, not on people's text: on-policy data (Zhou et al. 2023, "DistillSpec",
arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM

PROMPT, LENGTH = 96, 192  # tokens: a window is a piece of training text and what the target makes of it
BATCH = 256
REPEAT = 256


def continuations(target: LlamaForCausalLM, stream: np.ndarray, count: int, seed: int, cache: Path) -> np.ndarray:
    """`count` windows int64 `[count, LENGTH]`, three quarters continued greedily, one at temperature 0.8."""
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
    windows = target.generate(  # type: ignore[misc]  # transformers types `self` as a protocol that models miss
        ids, attention_mask=torch.ones_like(ids), min_length=LENGTH, max_length=LENGTH, pad_token_id=0, **chosen
    )
    assert isinstance(windows, torch.Tensor)
    return np.asarray(windows.numpy())


def repeats(stream: np.ndarray, batch_tokens: int, steps: range, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Windows `[batch, REPEAT + 1]` of one piece of 8 to 79 tokens over and over; a step's depend on the step alone."""
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
    """Of four steps one is of the corpus, one of repeats, two of `windows`; a step's data depends on the step alone."""
    for (step, text), (_, repeated) in zip(corpus, copying, strict=True):
        rng = np.random.default_rng((seed, step, 1))
        chosen = rng.integers(0, len(windows), batch_tokens // LENGTH)
        yield step, (text, repeated, *[torch.from_numpy(windows[chosen])] * 2)[step % 4]
