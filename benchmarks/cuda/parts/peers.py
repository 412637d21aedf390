"""transformers on the same GPU with the same shapes: assisted generation, and continuous batching without drafts.

Two models with random weights never agree. So both get a logits processor that determines the token at each position.
The draft predicts it with the requested probability. All computation runs as usual.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.cuda.arenas import PAGE
from benchmarks.cuda.card import Card, wait
from benchmarks.cuda.engines import RandomPair, best_drafts, engine_of, positions_needed, settled
from benchmarks.cuda.parts.decoding import MOST_DRAFTS
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from pilotfish.engine.sampling.noise import Stream, uniform

_CERTAIN = 1e4  # a logit larger than any of a random model


def compare(setting: Setting, section: PartReport) -> None:
    """Compare tokens per second of the same models: rounds, and transformers' own loops."""
    card = Card.measured(setting.device)
    ours = _ours(setting, card)
    gc.collect()
    if card.is_cuda:
        torch.cuda.empty_cache()
    pair, context, tokens = (
        RandomPair.of(card, setting.target, setting.draft, "sdpa"),
        setting.context,
        setting.peer_tokens,
    )
    section.table("batch", "transformers", "tok/s", "Pilotfish, tok/s", "times")
    k = 4
    first = assisted(pair, card, setting.acceptance, context, k, tokens)
    _row(section, 1, f"assisted, K {k}", first, ours[1])
    if not card.is_cuda and importlib.util.find_spec("psutil") is None:
        section.say("Continuous batching on a CPU: needs psutil, which tells transformers how much memory there is.")
        return
    for size in setting.sizes[1:]:
        _row(section, size, "continuous batching", continuous(pair, card, size, context, tokens), ours[size])


def _ours(setting: Setting, card: Card) -> dict[int, float]:
    """Return our tokens per second by batch."""
    pair, most, rates = RandomPair.of(card, setting.target, setting.draft), max(setting.sizes), dict[int, float]()
    longest = positions_needed(setting.context, most, setting.steps, MOST_DRAFTS)
    engine = engine_of(pair, card, most, longest, setting.acceptance, MOST_DRAFTS)
    for size in setting.sizes:
        k = best_drafts(pair, card, size, setting.context, setting.acceptance, MOST_DRAFTS)
        got = settled(engine, card, size, setting.context, k, setting.steps)
        rates[size] = size * got.tokens / got.seconds
    return rates


def _row(section: PartReport, size: int, how: str, theirs: float, ours: float) -> None:
    section.row(size, how, f"{theirs:.0f}", f"{ours:.0f}", f"{ours / theirs:.1f}")
    section.number(str(size), how=how, theirs=theirs, ours=ours)


class Agreement(LogitsProcessor):
    """Determines the token at each position, and whether the draft predicts it."""

    def __init__(self, pair: RandomPair, acceptance: float, longest: int) -> None:
        assert pair.draft is not None
        device, vocab = pair.target.device, int(pair.target.config.vocab_size)
        place = torch.arange(longest, device=device)
        self._tokens = [int(token) for token in (place * 7919 % vocab).tolist()]
        knows = uniform(place * 0, place, Stream.ACCEPT) < acceptance
        self._knows: list[bool] = knows.tolist()
        self._vocab, self._is_drafting = vocab, False
        for model, is_draft in ((pair.target, False), (pair.draft, True)):
            model.register_forward_pre_hook(lambda *_, is_draft=is_draft: self._begin(is_draft=is_draft))

    def _begin(self, *, is_draft: bool) -> None:
        """Record whose logits come next."""
        self._is_drafting = is_draft

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Make one token certain: `[B, length]`, `[B, vocab]` -> `[B, vocab]`."""
        position = input_ids.shape[1]
        is_off = self._is_drafting and not self._knows[position]
        scores[:, (self._tokens[position] + is_off) % self._vocab] = _CERTAIN
        return scores


def tokens_per_second(run: Callable[[int], object], card: Card, tokens: tuple[int, int], times: int = 3) -> float:
    """Return tokens per second from runs of two lengths, so that prompts and preparation cancel out.

    NaN if the longer run was not slower, because the difference is then only noise.
    """

    def seconds(count: int) -> float:
        wait(card.device)
        start = perf_counter()
        run(count)
        wait(card.device)
        return perf_counter() - start

    for count in tokens:
        seconds(count)
    less, more = (statistics.median(seconds(count) for _ in range(times)) for count in tokens)
    return (tokens[1] - tokens[0]) / (more - less) if more > less else math.nan


def assisted(pair: RandomPair, card: Card, acceptance: float, context: int, k: int, tokens: tuple[int, int]) -> float:
    """Return tokens per second of assisted generation with one prompt and K drafts per round."""
    ids = torch.randint(pair.target.config.vocab_size, (1, context), device=card.device)
    processor = LogitsProcessorList([Agreement(pair, acceptance, context + tokens[1] + k + 2)])
    assert pair.draft is not None
    drafting: Any = pair.draft.generation_config
    drafting.update(num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0)

    def run(count: int) -> object:
        target: Any = pair.target
        return target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
            assistant_model=pair.draft, logits_processor=processor,
        )  # fmt: skip

    with torch.no_grad():
        return tokens_per_second(run, card, tokens)


def continuous(pair: RandomPair, card: Card, size: int, context: int, tokens: tuple[int, int]) -> float:
    """Return tokens per second of continuous batching with `size` prompts: plain decoding, because it has no drafts.

    All runs share one manager, which records its graphs at its start.
    """
    prompts = torch.randint(pair.target.config.vocab_size, (size, context)).tolist()
    wanted = GenerationConfig(max_new_tokens=tokens[1], do_sample=False, pad_token_id=0, eos_token_id=-1)
    target: Any = pair.target
    with target.continuous_batching_context_manager(
        generation_config=wanted, continuous_batching_config=batching_config(size, context + tokens[1]), timeout=5
    ) as manager:
        run = partial(_all_ended, manager, prompts)
        return size * tokens_per_second(run, card, tokens)


def _all_ended(manager: ContinuousBatchingManager, prompts: list[list[int]], count: int) -> None:
    """Generate `count` tokens for each prompt."""
    waiting = set(manager.add_requests(prompts, max_new_tokens=count))
    for done in manager:  # the loop ends when the manager's thread ends
        if done.is_finished():
            assert len(done.generated_tokens) == count, f"continuous batching failed: {done.error}"
            waiting.remove(done.request_id)
        if not waiting:
            return
    raise RuntimeError("the thread of continuous batching has died")


def batching_config(size: int, longest: int) -> ContinuousBatchingConfig:
    """Return pages for `size` sequences. The page size is `block_size` up to transformers 5.17, `page_size` later."""
    names = {field.name for field in fields(ContinuousBatchingConfig)}
    page: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": PAGE}
    pages = size * (-(-longest // PAGE) + 1)
    return ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=max(2048, size), **page)
