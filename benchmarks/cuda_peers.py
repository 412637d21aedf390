"""transformers on the same GPU with the same shapes: assisted generation, and continuous batching without drafts.

Two models with random weights never agree, so a processor of logits, which both are given, says what comes: at each
position a token that the draft knows with the probability asked for. Everything is computed as if it counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.cuda_engines import Pair
from benchmarks.cuda_kernels import Card, wait
from engine.noise import Stream, uniform

_CERTAIN = 1e4  # a logit that no random model reaches


class Agreement(LogitsProcessor):
    """What comes at each position, and whether the draft knows."""

    def __init__(self, pair: Pair, acceptance: float, longest: int) -> None:
        device, vocab = pair.target.device, int(pair.target.config.vocab_size)
        place = torch.arange(longest, device=device)
        self._tokens = [int(token) for token in (place * 7919 % vocab).tolist()]
        knows = uniform(place * 0, place, Stream.ACCEPT) < acceptance
        self._knows: list[bool] = knows.tolist()
        self._vocab, self._is_drafting = vocab, False
        for model, is_draft in ((pair.target, False), (pair.draft, True)):
            model.register_forward_pre_hook(lambda *_, is_draft=is_draft: self._begin(is_draft=is_draft))

    def _begin(self, *, is_draft: bool) -> None:
        """Whose logits come next."""
        self._is_drafting = is_draft

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[B, length]`, `[B, vocab]` -> `[B, vocab]`, where one token is certain."""
        position = input_ids.shape[1]
        is_off = self._is_drafting and not self._knows[position]
        scores[:, (self._tokens[position] + is_off) % self._vocab] = _CERTAIN
        return scores


def seconds_per_token(run: Callable[[int], object], card: Card, tokens: tuple[int, int], times: int = 3) -> float:
    """From runs of two lengths: what both have in common, prompts and preparation, does not count."""

    def seconds(count: int) -> float:
        wait(card.device)
        start = perf_counter()
        run(count)
        wait(card.device)
        return perf_counter() - start

    for count in tokens:
        seconds(count)
    less, more = (statistics.median(seconds(count) for _ in range(times)) for count in tokens)
    return max(more - less, 1e-9) / (tokens[1] - tokens[0])


def assisted(pair: Pair, card: Card, acceptance: float, context: int, k: int, tokens: tuple[int, int]) -> float:
    """Tokens per second of assisted generation with one prompt and K drafts a round."""
    ids = torch.randint(pair.target.config.vocab_size, (1, context), device=card.device)
    processor = LogitsProcessorList([Agreement(pair, acceptance, context + tokens[1] + k + 2)])
    drafting: Any = pair.draft.generation_config
    drafting.update(num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0)

    def run(count: int) -> object:
        target: Any = pair.target
        return target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
            assistant_model=pair.draft, logits_processor=processor,
        )  # fmt: skip

    with torch.no_grad():
        return 1 / seconds_per_token(run, card, tokens)


def continuous(pair: Pair, card: Card, size: int, context: int, page: int, tokens: tuple[int, int]) -> float:
    """Tokens per second of continuous batching with so many prompts: plain decoding, for it has no drafts."""
    prompts = torch.randint(pair.target.config.vocab_size, (size, context)).tolist()
    pages = size * (-(-(context + tokens[1]) // page) + 1)
    sizes = ContinuousBatchingConfig(num_blocks=pages, page_size=page, max_batch_tokens=max(2048, size))

    def run(count: int) -> object:
        wanted = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1)
        target: Any = pair.target
        return target.generate_batch(prompts, generation_config=wanted, continuous_batching_config=sizes)

    with torch.no_grad():
        return size / seconds_per_token(run, card, tokens)
