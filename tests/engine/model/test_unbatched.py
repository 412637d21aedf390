"""Models that run one sequence at a time: what the arena holds is all that they know of their past."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.unbatched import TOKENS, UnbatchedRunner, cache_layout, plain_logits, use_own_attention
from tests import zoo
from tests.classes import tiny

TEXT = [(7 * i + 3) % zoo.VOCAB for i in range(30)]  # longer than the windows of the tiny models
OTHER = TEXT[::-1]
MINE, OTHERS = (6, 0, 3, 1), (2, 7, 5, 4)  # pages of 8


def runner_of(model: PreTrainedModel, layout: KVLayout | None) -> UnbatchedRunner:
    return UnbatchedRunner(model, KVArena(layout, num_pages=8, page_size=8, device=model.device))


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got, expected, atol=1e-4 * float(expected.std()))


def model_of(kind: str) -> PreTrainedModel:
    model = zoo.with_large_weights(tiny(kind))
    use_own_attention(model)
    return model


@pytest.mark.parametrize(
    ("kind", "keeps"), [("bloom", "cache"), ("mpt", "cache"), ("gpt_neo", "cache"), ("bart", "cache"), ("rwkv", "text")]
)
def test_chunks_drafts_and_other_sequences_change_nothing(kind: str, keeps: str) -> None:
    model = model_of(kind)
    layout = cache_layout(model) if keeps == "cache" else TOKENS
    runner, expected = runner_of(model, layout), plain_logits(model, TEXT)
    first = runner.forward([Feed(TEXT[:11], 0, MINE, 11), Feed(OTHER, 0, OTHERS, 1)])
    assert same(first[:11], expected[:11])
    drafted = runner.forward([Feed([*TEXT[11:13], 1, 2, 3], 11, MINE, 5)])
    assert same(drafted[:2], expected[11:13])
    assert not same(drafted[2:], expected[13:16])  # the drafts were others than the text
    rest = runner.forward([Feed(TEXT[13:29], 13, MINE, 0), Feed(TEXT[29:], 29, MINE, 1)])
    assert same(rest, expected[29:])


@pytest.mark.parametrize("kind", ["openai-gpt", "mamba", "deepseek_v32"])
def test_what_is_no_keys_and_values_by_position_has_no_layout(kind: str) -> None:
    with pytest.raises(ModelError, match="has no key/value cache"):
        cache_layout(model_of(kind))


def test_a_prompt_without_logits_is_only_written_down() -> None:
    model = model_of("rwkv")
    runner, passes = runner_of(model, TOKENS), list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    assert runner.forward([Feed(TEXT[:20], 0, MINE, 0)]).shape == (0, zoo.VOCAB)
    assert not passes
    assert same(runner.forward([Feed(TEXT[20:], 20, MINE, 1)]), plain_logits(model, TEXT)[-1:])


def test_positions_count_from_zero_as_generate_counts_them() -> None:
    model = model_of("roberta")
    ids = torch.tensor([TEXT])
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1)
    assert int(generated[0, -1]) == int(plain_logits(model, TEXT)[-1].argmax())
