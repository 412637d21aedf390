"""The embedded target's texts, and its drafters as they are explored: the draft model and the EAGLE head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.trees.record import DEPTH, NODES, RecordedText
from engine.attention import choose
from engine.config import EngineConfig
from engine.control.prefill_budget import PrefillBudget
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import stack
from engine.model.linear.packed import pack
from engine.model.runner import ModelRunner, kv_layout, load_model
from engine.model.tap import Tap
from engine.params import SamplingParams
from engine.proposers.heads.base import HeadContext
from engine.proposers.heads.eagle import load_eagle
from engine.proposers.heads.proposer import HeadProposer
from engine.startup.build import build_engine
from engine.text.codec import Codec
from engine.types import Request
from models import corpus, embedded_eagle, embedded_target

_CPU = torch.device("cpu")
_LONGEST = 1024  # tokens of a text: the embedded pair's context
_FIRST_SEED = 1000


def texts(num_prompts: int, num_tokens: int, *, is_sampled: bool) -> list[RecordedText]:
    """Let the embedded target write after held-out functions, greedily or at temperature 1; each with its own seed."""
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    prompts = (tuple(codec.encode(text)) for text in corpus.held_out_prompts(4 * num_prompts))
    fitting = list(islice((prompt for prompt in prompts if len(prompt) + num_tokens <= _LONGEST // 2), num_prompts))
    settings = {"target": str(embedded_target()), "dtype": "float32", "proposer": "none", "threads": 1}
    engine = build_engine(EngineConfig.model_validate({**settings, "max_batch_size": 8}))
    made: dict[str, list[int]] = {}
    for i, prompt in enumerate(fitting):
        sampling = SamplingParams(
            temperature=float(is_sampled), seed=_FIRST_SEED + i, max_tokens=num_tokens, ignore_eos=True
        )
        made[str(i)] = list(prompt)
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=sampling))
    while engine.has_work:
        for event in engine.step().events:
            made[event.request_id] += event.token_ids
    seeds = [_FIRST_SEED + i if is_sampled else None for i in range(len(fitting))]
    return [
        RecordedText(tuple(tokens), len(prompt), seed)
        for tokens, prompt, seed in zip(made.values(), fitting, seeds, strict=True)
    ]


def _arena(layout: KVLayout, num_tokens: int) -> KVArena:
    """Pages of one row: for a text, and for all guesses from as many places as a text of `num_tokens` new ones has."""
    return KVArena(layout, _LONGEST + num_tokens * (2 * DEPTH + NODES), 1, _CPU)


class ModelTrees:
    """A model of the embedded pair."""

    lag = 0

    def __init__(self, folder: Path, num_tokens: int) -> None:
        model = load_model(str(folder), None, torch.float32, _CPU)
        for prepare in (fuse, pack, stack):  # as the engine does
            prepare(model)
        arena = _arena(kv_layout(model.config, model.dtype), num_tokens)
        self._runner = ModelRunner(model, arena, choose("auto", _CPU))

    def read(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run the text; a model's children need nothing but K/V."""
        return self.grow([Feed(list(tokens), 0, range(len(tokens)), len(tokens))], torch.empty(0))

    def grow(self, feeds: Sequence[Feed], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the guesses."""
        del hidden
        logits = self._runner.forward(feeds)
        return logits, logits.new_empty(len(logits), 0)


class HeadTrees:
    """A head that continues the target's features."""

    lag = 1

    def __init__(self, num_tokens: int) -> None:
        model = load_model(str(embedded_target()), None, torch.float32, _CPU)
        head = load_eagle(str(embedded_eagle()), None, model)
        assert head.layout is not None, "it attends"
        attend, self._places, self._tap = choose("auto", _CPU), head.places, Tap(model, head.places)
        arena = KVArena(kv_layout(model.config, model.dtype), _LONGEST, 1, _CPU)
        self._target = ModelRunner(model, arena, attend)
        around = HeadContext(self._target, self._tap, _arena(head.layout, num_tokens), attend, PrefillBudget())
        proposer = head.proposer(around)
        assert isinstance(proposer, HeadProposer)
        self._head = proposer._head  # noqa: SLF001 - the head alone, because its proposer drafts chains

    def read(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run the target, then the head on its features."""
        self._target.forward([Feed(list(tokens), 0, range(len(tokens)))])
        features, rows = self._tap.read(self._places), len(tokens) - 1
        assert features is not None, "the target has run"
        return self.grow([Feed(list(tokens[1:]), 0, range(rows), rows)], self._head.project(features[:-1].clone()))

    def grow(self, feeds: Sequence[Feed], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head on the features of the parents."""
        made = self._head.forward(feeds, hidden)
        return self._head.logits(made), made
