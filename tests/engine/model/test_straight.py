"""A pass without transformers' code around it: the same bits, and only where nothing is left out by it."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from transformers import GraniteConfig, PreTrainedModel

from engine.model.fusion.stack import Stack
from engine.model.fusion.straight import DirectPass
from engine.model.tap import FINAL, Tap
from tests import zoo
from tests.engine.model.test_stack import DTYPES, STRAIGHT, model, plain_model, pytestmark, several_passes, stack

__all__ = ["pytestmark"]


@pytest.mark.parametrize(("family", "dtype"), list(zip(sorted(STRAIGHT), itertools.cycle(DTYPES), strict=False)))
def test_a_pass_goes_straight_through_and_gives_the_same_bits(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(family, dtype, int8=False)
    want = several_passes(made)
    stack(made)
    assert isinstance(made.forward, DirectPass)
    monkeypatch.setattr(type(made.get_decoder()), "forward", None)  # the way around
    assert torch.equal(several_passes(made), want)


def granite(**scales: float) -> PreTrainedModel:
    """Layers as Llama's, and scales around them where it has any."""
    sizes = {"vocab_size": zoo.VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_multiplier": 32**-0.5}
    return zoo.as_served(zoo.ours(zoo.with_large_weights(GraniteConfig(**sizes, **heads, **scales))))


@pytest.mark.parametrize("scale", ["embedding_multiplier", "logits_scaling"])
def test_a_model_that_does_something_on_the_way_does_it_still(scale: str) -> None:
    straight, scaled = granite(), granite(**{scale: 2.0})
    assert isinstance(scaled.get_decoder().layers, Stack)
    assert isinstance(straight.forward, DirectPass)
    assert not isinstance(scaled.forward, DirectPass)
    assert not torch.equal(several_passes(straight), several_passes(scaled))


def test_who_listens_to_the_layers_hears_of_every_pass() -> None:
    made = zoo.as_served(plain_model("llama", torch.float32))
    want = several_passes(made)
    tap = Tap(made)
    assert torch.equal(several_passes(made), want)
    assert tap.read((FINAL,)) is not None
    assert tap.read((FINAL,)).shape[0] == 1 + 16 + 1  # of the last pass, every row


def test_another_attention_takes_the_way_around() -> None:
    made = zoo.as_served(plain_model("llama", torch.float32))
    assert torch.allclose(several_passes(made), several_passes(made, "reference"), atol=1e-4)


def test_it_says_of_itself_what_the_model_takes() -> None:
    made, plain = zoo.as_served(plain_model("llama", torch.float32)), plain_model("llama", torch.float32)
    assert inspect.signature(made.forward).parameters.keys() == inspect.signature(plain.forward).parameters.keys()
