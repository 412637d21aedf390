"""What a tap reads is what transformers' models say of themselves (`output_hidden_states`), past C and without it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from pilotfish.engine import attention
from pilotfish.engine.attention import reference
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.decoder.stack import FINAL, Stack, Tap
from pilotfish.engine.model.runner import ModelRunner, layout_of_model
from pilotfish.engine.native import library
from tests import zoo

TOKENS = [3, 7, 11, 2, 9, 4]
SIZES = {"vocab_size": zoo.VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def run(model: PreTrainedModel) -> None:
    attend = reference.attend if library() is None else attention.choose("native", torch.device("cpu"))
    arena = KVArena(layout_of_model(model), 1, len(TOKENS), model.device)
    ModelRunner(model, arena, attend).forward([Feed.begun(TOKENS, 0, 1)])


def depth_of(model: PreTrainedModel) -> int:
    return int(model.config.num_hidden_layers)


@torch.inference_mode()
def hidden_states(plain: PreTrainedModel) -> dict[int, Tensor]:
    """By place; transformers' last hidden state is behind the final norm."""
    found = plain(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    return {**{place: found[place][0] for place in range(depth_of(plain))}, FINAL: found[-1][0]}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize("served", [False, True], ids=["torch", "as served"])
def test_a_tap_reads_every_place(family: str, served: bool) -> None:
    plain = zoo.reference(family)
    want, model = hidden_states(plain), zoo.ours(copy.deepcopy(plain))
    model = zoo.as_served(model) if served else model
    tap = Tap(model, [*want, depth_of(plain)])
    run(model)
    for place, rows in want.items():
        assert torch.allclose(tap.read((place,)), rows, atol=1e-4), place
    last = tap.read((depth_of(plain),))
    assert not torch.allclose(last, want[FINAL], atol=1e-4), "the last place is before the final norm"
    both = tap.read((1, FINAL))
    assert both.shape == (len(TOKENS), 2 * last.shape[1])
    assert torch.allclose(both, torch.cat([want[1], want[FINAL]], -1), atol=1e-4)


def test_several_taps_read_one_model() -> None:
    """Engines that share a target have one each; the layers that run in one call are cut where any of them reads."""
    plain = zoo.with_large_weights(LlamaConfig(**SIZES))
    want, model = hidden_states(plain), zoo.as_served(zoo.ours(plain))
    first = Tap(model, [FINAL])
    run(model)
    second = Tap(model, [1, 2])
    run(model)
    for tap, place in ((first, FINAL), (second, 1), (second, 2)):
        assert torch.allclose(tap.read((place,)), want[place], atol=1e-4), place
    assert second.read((FINAL,)) is None
    if library() is not None:
        assert isinstance(model.model.layers, Stack), "C runs these layers"


@pytest.mark.parametrize("places", [[-2], [0, 99]])
def test_a_place_that_is_not_there_is_refused(places: list[int]) -> None:
    with pytest.raises(ModelError, match=r"the head reads the target after layers .*; it has"):
        Tap(zoo.ours(copy.deepcopy(zoo.reference("llama"))), places)
