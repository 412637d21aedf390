"""All layers in one call: the same bits as layer after layer, and only where that is so."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import GraniteConfig, PreTrainedModel

from engine.attention import choose
from engine.choices import KVType
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.fusion.fuse import fuse
from engine.model.fusion.stack import Stack, stack
from engine.model.fusion.straight import DirectPass
from engine.model.linear.packed import PackedLinear, is_batch_invariant, pack
from engine.model.quantize import quantise
from engine.model.runner import ModelRunner, kv_layout
from engine.model.tap import FINAL, Tap
from engine.native import library, multiplies
from engine.proposers.early_exit import first_layers
from tests import zoo

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    library() is None or not all(map(multiplies, (torch.int8, torch.float32))), reason="needs a C compiler"
)
DTYPES = [torch.float32, torch.bfloat16]
# Norms, attention, MLP with a gate; the others differ, and run layer by layer.
STACKED = {"llama", "llama-3", "llama-tied", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3"}
STRAIGHT = STACKED - {"gemma2"}  # which bends its logits


def plain_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """With heads that are whole vectors, where the family has such a size."""
    config = zoo.family_config(family)
    if family in STACKED:
        config.update({"hidden_size": 128, "intermediate_size": 80, "head_dim": 32})
    return zoo.ours(zoo.with_large_weights(config)).to(dtype)


def model(family: str, dtype: torch.dtype, *, int8: bool) -> PreTrainedModel:
    made = plain_model(family, dtype)
    if int8:
        quantise(made)
    fuse(made)
    pack(made)
    return made


def runner_of(made: PreTrainedModel, attention: str = "auto", kind: KVType = "auto") -> ModelRunner:
    arena = KVArena(kv_layout(made.config, made.dtype).stored_as(kind), 8, 32, CPU)
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


# Families that run in one call, in both types, of floats and of codes by turns; and some that do not.
_KINDS = itertools.product(DTYPES, (False, True))
_CELLS = [(family, *kind) for family, kind in zip(sorted(STACKED), itertools.cycle(_KINDS), strict=False)]


@pytest.mark.parametrize(
    ("family", "dtype", "int8"), _CELLS + [(family, torch.float32, False) for family in ("gpt2", "opt", "mixtral")]
)
def test_one_call_gives_the_bits_of_layer_after_layer(
    family: str, dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most without transformers' code around the layers, too."""
    made = model(family, dtype, int8=int8)
    want = several_passes(made)
    assert stack(made) == (family in STACKED)
    assert isinstance(made.forward, DirectPass) == (family in STRAIGHT)
    if family in STACKED:
        monkeypatch.setattr(Stack, "one_by_one", partial(_never, "one by one"))
    if family in STRAIGHT:
        monkeypatch.setattr(type(made.get_decoder()), "forward", None)  # the way around
    assert torch.equal(several_passes(made), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_gives_the_bits_of_layer_after_layer_over_int8_keys(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model("llama", dtype, int8=False)
    floats, want = several_passes(made), several_passes(made, kind="int8")
    assert stack(made)
    monkeypatch.setattr(Stack, "one_by_one", partial(_never, "one by one"))
    assert torch.equal(several_passes(made, kind="int8"), want)
    assert 0 < (want - floats).std() < 0.1 * floats.std()


def test_another_attention_than_ours_runs_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("llama", torch.float32, int8=False)
    assert stack(made)
    assert torch.allclose(several_passes(made), several_passes(made, "reference"), atol=1e-4)
    monkeypatch.setattr(Stack, "one_by_one", partial(_never, "one by one"))
    with pytest.raises(AssertionError, match="one by one"):
        several_passes(made, "reference")


def _never(what: str, *_: object, **__: object) -> None:
    raise AssertionError(what)


def test_without_a_ragged_batch_the_layers_run_as_they_are() -> None:
    made = model("llama", torch.float32, int8=False)
    ids = torch.arange(3, 12)[None]
    made.set_attn_implementation("eager")
    want = made(input_ids=ids, use_cache=False).logits
    stack(made)
    assert torch.equal(made(input_ids=ids, use_cache=False).logits, want)


def test_the_first_layers_alone_are_a_stack_too() -> None:
    made = model("llama", torch.float32, int8=True)
    early = first_layers(made, 1)
    want = several_passes(early)
    stack(made)
    again = first_layers(made, 1)
    assert torch.equal(several_passes(again), want)
    assert again.model.layers[0].self_attn.inner.o_proj.packed is made.model.layers[0].self_attn.inner.o_proj.packed


def test_a_copy_keeps_to_its_own_arena() -> None:
    made = model("llama", torch.float32, int8=True)
    stack(made)
    want = several_passes(made)
    twin = copy.deepcopy(made)
    assert torch.equal(several_passes(twin), want)
    assert torch.equal(several_passes(made), want)


def test_what_a_layer_does_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks like ours and is not: it adds half of what its MLP says."""
    made = model("llama", torch.float32, int8=False)
    layer = made.model.layers[1]
    forward: Callable[..., torch.Tensor] = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: forward(x) * 0.5)
    assert not stack(made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_models_keep_their_rows_apart(dtype: torch.dtype) -> None:
    made = plain_model("llama", dtype)
    assert not is_batch_invariant(made)
    assert pack(made) == 7 * made.config.num_hidden_layers + 1
    assert is_batch_invariant(made)
    assert isinstance(made.get_output_embeddings(), PackedLinear)
    assert made.get_output_embeddings()(torch.zeros(1, 2, made.config.hidden_size, dtype=dtype)).dtype == torch.float32


# ------------------------------------------------------------------ a pass without transformers' code around it


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


def test_it_says_of_itself_what_the_model_takes() -> None:
    made, plain = zoo.as_served(plain_model("llama", torch.float32)), plain_model("llama", torch.float32)
    assert inspect.signature(made.forward).parameters.keys() == inspect.signature(plain.forward).parameters.keys()
