"""Phi-3's two rotary tables: each sequence has its own, and what it gives is what `generate` gives to it alone."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import Phi3Config, PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.model.checkpoint import longrope_border
from pilotfish.engine.model.decoder.rotary import Rotation
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import KVCursor, Request
from tests import fakes, zoo
from tests.families import generate

NEW_TOKENS = 30
BORDER = zoo.BORDER
LENGTHS = (3, BORDER - 9, BORDER - 1, BORDER, BORDER + 1, BORDER + 20)  # below, crossing soon or at once, above


@lru_cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    halves = [torch.randint(3, zoo.VOCAB, (-(-n // 2),), generator=generator).tolist() for n in LENGTHS]
    return [(half + half)[:n] for half, n in zip(halves, LENGTHS, strict=True)]


@lru_cache
def expected() -> list[list[int]]:
    """From `generate`, one by one; the weights end no output early, so that every one that can cross does."""
    model = zoo.reference("phi3-longrope")
    return [generate(model, prompt, NEW_TOKENS, eos_token_id=None) for prompt in prompts()]


def with_border(border: int | None) -> PreTrainedModel:
    """The near draft with another border, or with one table only."""
    model = zoo.disturbed(zoo.reference("phi3-longrope"))
    config = zoo.longrope(border) if border else Phi3Config(**{**model.config.to_dict(), "rope_parameters": None})
    if not border:
        config.max_position_embeddings = config.original_max_position_embeddings = 128
    twin = zoo.with_large_weights(config)
    twin.load_state_dict(model.state_dict())
    return zoo.ours(twin)


@lru_cache
def draft(border: int | None) -> PreTrainedModel:
    return with_border(border)


def engine_of(border: int | None = BORDER, **config: object) -> Engine:
    target = zoo.ours(zoo.reference("phi3-longrope"))
    return assemble(EngineConfig(target="phi3", draft="near", max_batch_size=8, **config), target, draft(border))


def greedy(engine: Engine) -> fakes.Outputs:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(request_id=str(i), token_ids=tuple(p), sampling=params) for i, p in enumerate(prompts())]
    return fakes.run(engine, requests)


def tokens_of(outputs: fakes.Outputs) -> list[list[int]]:
    return [outputs.tokens[str(i)] for i in range(len(LENGTHS))]


@pytest.mark.slow
@pytest.mark.parametrize("border", [None, 20])
def test_target_and_draft_cross_each_at_its_own_border(border: int | None) -> None:
    outputs = greedy(engine_of(border))
    assert tokens_of(outputs) == expected()
    assert sum(ended.stats.accepted for ended in outputs.finished.values()) > 10


@pytest.mark.slow
def test_a_plain_target_with_a_longrope_draft() -> None:
    target = zoo.ours(zoo.reference("phi3"))
    plain = greedy(assemble(EngineConfig(target="phi3"), target))
    drafted = greedy(assemble(EngineConfig(target="phi3", draft="near"), target, draft(BORDER)))
    assert drafted.tokens == plain.tokens


@pytest.mark.slow
def test_preempted_on_both_sides_of_the_border() -> None:
    layout = kv_layout(zoo.longrope(), torch.float32)
    engine = engine_of(page_size=8, attention="reference", kv_memory=17 * 8 * 2 * layout.bytes_per_token / 2**30)
    preempted = 0
    original = engine.scheduler._preempt

    def counting(sequence: object) -> None:
        nonlocal preempted
        preempted += 1
        original(sequence)

    engine.scheduler._preempt = counting
    assert tokens_of(greedy(engine)) == expected()
    assert preempted > 0


def test_the_two_tables_differ_enough_to_tell() -> None:
    """Kept to the first table, the longer sequences would give other tokens: else nothing here proves anything."""
    model = zoo.ours(zoo.reference("phi3-longrope"))
    engine = assemble(EngineConfig(target="phi3"), model)
    [tables] = [module for module in model.modules() if isinstance(module, Rotation)]
    tables.frequencies[1] = tables.frequencies[0]
    same = [got == want for got, want in zip(tokens_of(greedy(engine)), expected(), strict=True)]
    assert not any(same[1:])


def test_a_cursor_tells_its_table() -> None:
    cursor = KVCursor.of(8, 8)
    assert (cursor.table, cursor.is_outgrown(8), cursor.is_outgrown(9)) == (0, False, True)
    assert (cursor.room_before_border(5), KVCursor.of(8, 9).table) == (3, 1)
    assert KVCursor.of(8, 9).room_before_border(9) == KVCursor().room_before_border(9) > 2**30


def test_position_ids_carry_the_table() -> None:
    feeds = [Feed([5, 6], 3, [0], table=1), Feed([7], 2, [1])]
    batch = RaggedBatch.of(feeds, 8, torch.device("cpu"))
    assert batch.positions.tolist() == [3, 4, 2]
    assert (batch.position_ids - batch.positions).unique().numel() == 2


def test_numbers_that_disagree_keep_to_the_first_table() -> None:
    config = zoo.longrope()
    config.original_max_position_embeddings += 1
    assert longrope_border(config) is None
    assert longrope_border(zoo.longrope()) == BORDER
    assert longrope_border(zoo.family_config("llama")) is None
