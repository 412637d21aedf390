"""All layers in one call: the same bits as layer after layer, and only where that is so."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pilotfish.engine.attention import choose
from pilotfish.engine.choices import KVType
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.stack import FINAL, Stack, Tap
from pilotfish.engine.model.runner import ModelRunner, layout_of_model
from pilotfish.engine.native import library, multiplies
from pilotfish.engine.proposers.model import first_layers
from tests import zoo

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    library() is None or not all(map(multiplies, (torch.int8, torch.float32))), reason="needs a C compiler"
)
DTYPES = [torch.float32, torch.bfloat16]
# Families of the table.
STACKED = {"llama", "llama-3", "llama-tied", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3"}


def wide_config(family: str) -> PreTrainedConfig:
    """With heads that are whole vectors, where the family has such a size."""
    config = zoo.family_config(family)
    if family in STACKED:
        config.update({"hidden_size": 128, "intermediate_size": 80, "head_dim": 32})
    return config


def plain_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return zoo.with_large_weights(wide_config(family)).to(dtype)


def model(family: str, dtype: torch.dtype, *, int8: bool) -> DecoderModel:
    made = zoo.as_served(plain_model(family, dtype), "int8" if int8 else "native")
    assert isinstance(made, DecoderModel)
    return made


def layer_by_layer(made: DecoderModel) -> DecoderModel:
    """A copy whose layers run one after the other."""
    twin = copy.deepcopy(made)
    twin.model.layers.serves = lambda *_: False
    return twin


def runner_of(made: PreTrainedModel, attention: str = "auto", kind: KVType = "auto") -> ModelRunner:
    arena = KVArena(layout_of_model(made).stored_as(kind), 8, 32, CPU)
    return ModelRunner(made, arena, choose(attention, CPU))  # type: ignore[arg-type]


def several_passes(made: PreTrainedModel, attention: str = "auto", kind: KVType = "auto") -> torch.Tensor:
    """Prompts whole and in parts, decoding and verification."""
    runner, text = runner_of(made, attention, kind), [(7 * i + 3) % zoo.VOCAB for i in range(30)]
    feeds = [
        [Feed(text, 0, [0], 30), Feed(text[:9], 0, [1], 1)],
        [Feed(text[9:12], 9, [1], 3), Feed(text[:4], 0, [5, 2], 0)],
        [Feed(text[12:13], 12, [1]), Feed(text[4:20], 4, [5, 2], 5), Feed(text[:1], 0, [7])],
    ]
    return torch.cat([runner.forward(batch) for batch in feeds])


# In both types, of floats and of codes by turns.
_KINDS = itertools.product(DTYPES, (False, True))


@pytest.mark.parametrize(
    ("family", "dtype", "int8"),
    [(family, *kind) for family, kind in zip(sorted(STACKED), itertools.cycle(_KINDS), strict=False)],
)
def test_one_call_gives_the_bits_of_layer_after_layer(
    family: str, dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(family, dtype, int8=int8)
    want = several_passes(layer_by_layer(made))
    monkeypatch.setattr(Stack, "layer_by_layer", partial(_never, "layer by layer"))
    assert torch.equal(several_passes(made), want)


@pytest.mark.parametrize("family", sorted(STACKED))
def test_logits_are_those_of_transformers(family: str) -> None:
    """Sizes that C multiplies, and sizes that it does not; every kind of pass."""
    for config in (zoo.family_config(family), wide_config(family)):
        plain = zoo.with_large_weights(config)
        made, ids = zoo.as_served(plain), [(7 * i + 3) % zoo.VOCAB for i in range(30)]
        with torch.inference_mode():
            want = plain(torch.tensor([ids]), use_cache=False).logits[0]
        runner = runner_of(made)
        whole = runner.forward([Feed([5, 6], 0, [3]), Feed(ids, 0, [0], 30)])[1:]
        parts = [runner.forward([Feed(ids[i : i + 10], i, [1], 10), Feed([4], 0, [2])])[:10] for i in (0, 10, 20)]
        for got in (whole, torch.cat(parts)):
            assert torch.allclose(got, want, atol=2e-4 * float(want.std()) + 2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_gives_the_bits_of_layer_after_layer_over_int8_keys(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model("llama", dtype, int8=False)
    floats, want = several_passes(made), several_passes(layer_by_layer(made), kind="int8")
    monkeypatch.setattr(Stack, "layer_by_layer", partial(_never, "layer by layer"))
    assert torch.equal(several_passes(made, kind="int8"), want)
    assert 0 < (want - floats).std() < 0.1 * floats.std()


def test_another_attention_than_ours_runs_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("llama", torch.float32, int8=False)
    assert torch.allclose(several_passes(made), several_passes(made, "reference"), atol=1e-4)
    monkeypatch.setattr(Stack, "layer_by_layer", partial(_never, "layer by layer"))
    with pytest.raises(AssertionError, match="layer by layer"):
        several_passes(made, "reference")


def _never(what: str, *_: object, **__: object) -> None:
    raise AssertionError(what)


def test_the_first_layers_alone_are_a_stack_too() -> None:
    made = model("llama", torch.float32, int8=True)
    again = first_layers(made, 1)
    assert torch.equal(several_passes(again), several_passes(layer_by_layer(again)))
    assert again.model.layers[0].self_attn.o_proj.packed is made.model.layers[0].self_attn.o_proj.packed


def test_a_copy_keeps_to_its_own_arena() -> None:
    made = model("llama", torch.float32, int8=True)
    want = several_passes(made)
    twin = copy.deepcopy(made)
    assert torch.equal(several_passes(twin), want)
    assert torch.equal(several_passes(made), want)


def test_taps_read_every_pass() -> None:
    made = zoo.as_served(plain_model("llama", torch.float32))
    want = several_passes(made)
    tap = Tap(made)
    assert torch.equal(several_passes(made), want)
    assert tap.read((FINAL,)) is not None
    assert tap.read((FINAL,)).shape[0] == 1 + 16 + 1  # of the last pass, every row
