"""Tiny models in the loop of rounds on the device, requests for it, and a record of what it says."""

from __future__ import annotations

import random
from functools import lru_cache

from engine import draws
from engine.attention import paged
from engine.kernels import reference
from engine.kv import KVArena
from engine.resident import Place
from engine.round_loop import News, RoundLoop
from engine.rounds import Fed, Ops
from engine.runner import kv_layout
from engine.types import FinishReason, Request, SamplingParams
from tests import zoo

PLAIN = Ops(paged.attend_plainly, draws.choose, reference.commit)
LONGEST, PAGE = 64, 16
LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(temperature=1.0),
)


def fed(model, num_pages: int) -> Fed:
    arena = KVArena(kv_layout(model.config, model.dtype), num_pages, PAGE, model.device)
    return Fed(model, arena, model.config.max_position_embeddings)


@lru_cache
def models(family: str = "llama", device: str = "cpu"):
    return tuple(model.to(device) for model in (zoo.ours(zoo.reference(family)), zoo.near(zoo.reference(family))))


def loop_of(
    family: str = "llama", ops: Ops = PLAIN, pages: int = 40, slots: int = 4, device: str = "cpu", **options
) -> RoundLoop:
    target, draft = (fed(model, pages + 1) for model in models(family, device))
    sizes = {"num_slots": slots, "longest": LONGEST, "most_drafts": 4, "vocab": zoo.VOCAB, "chunk": 7}
    return RoundLoop(target, draft, ops, **sizes, **options)


def request(i: int) -> Request:
    """Different lengths, laws and seeds; every third may end early."""
    rng = random.Random(i)
    prompt = tuple(rng.randrange(3, zoo.VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 33])))
    law = LAWS[i % len(LAWS)]
    stops = (rng.randrange(zoo.VOCAB), rng.randrange(zoo.VOCAB)) if i % 3 == 0 else ()
    wanted = {"max_tokens": rng.randint(1, 30), "stop_token_ids": stops, "ignore_eos": True}
    changed = SamplingParams(
        temperature=law.temperature, top_p=law.top_p, top_k=law.top_k, min_p=law.min_p, seed=2**64 - 1 - i, **wanted
    )
    return Request(request_id=str(i), token_ids=prompt, sampling=changed)


def add(loop: RoundLoop, wanted: Request, num_draft: int = 4) -> bool:
    sampling = wanted.sampling
    assert sampling.seed is not None
    length, ends = wanted.max_len(LONGEST), sampling.stop_token_ids
    return loop.add(wanted.request_id, Place(wanted.token_ids, length, ends, sampling, sampling.seed, num_draft))


class Record:
    """What the loop said of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}

    def note(self, news: list[News]) -> None:
        for item in news:
            assert item.name not in self.finished, "a sequence went on after its end"
            assert item.num_accepted <= len(item.tokens)
            self.tokens.setdefault(item.name, []).extend(item.tokens)
            if item.finished is not None:
                self.finished[item.name] = item.finished
