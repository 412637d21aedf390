"""Shares of a model compute together what transformers' own module does, each with its part of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import reference
from pilotfish.engine.kv.arena import LayerKV
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.decoder.architecture import Architecture
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.load import prepared
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.shapes import is_aligned, shapes_of
from pilotfish.engine.model.decoder.share import Share, ShareOfWeights, share_of, sum_results
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.unbatched import plain_logits
from pilotfish.engine.startup.implementation import Implementation
from tests import zoo
from tests.engine.model.test_decoder import CASES, CPU, _model, _off, _runner, feed

FIRST, SECOND = [(7 * i + 3) % zoo.VOCAB for i in range(30)], [(5 * i + 11) % zoo.VOCAB for i in range(17)]


class InThreads:
    """Two shares of a model, each in a thread: they exchange results where processes would."""

    def __init__(self, model: PreTrainedModel, rounded: Any = None, ops: LayerOps | None = None) -> None:
        self._barrier, self._given = Barrier(2), dict[int, Tensor]()
        architecture = _architecture(model)
        weights = prepared(model.state_dict(), architecture)
        self.models = []
        for number in range(2):
            share = Share(number, 2, self._total(number))
            read = WeightReader(ShareOfWeights(weights, architecture, share), model.dtype, rounded, packs=ops is None)
            made = DecoderModel(share_of(architecture, 2), copy.deepcopy(model.config), read).eval()
            sum_results(made, share)
            if ops is not None:
                made.use(ops)
            self.models.append(made)
        self._runners = [*map(_runner, self.models)]

    def _total(self, number: int) -> Callable[[Tensor], Tensor]:
        def total(part: Tensor) -> Tensor:
            self._given[number] = part
            self._barrier.wait(60)
            found = self._given[0] + self._given[1]
            self._barrier.wait(60)
            return found

        return total

    def forward(self, feeds: list[Feed]) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(lambda runner: runner.forward(feeds), self._runners)
        assert torch.equal(first, second)
        return first


def _architecture(model: PreTrainedModel) -> Architecture:
    found = architecture_for(model.config)
    assert found is not None
    return found


def _is_cut(kind: str, more: dict[str, Any]) -> bool:
    made = architecture_for(zoo.config_of(kind, **{"hidden_size": 64, "intermediate_size": 80} | more))
    assert made is not None
    if any(layer.around is not None for layer in made.layers):
        return False
    mixers = [layer.mixer for layer in made.layers]
    return not any(mixer.state(torch.float32) or getattr(mixer, "kv_heads", 2) == 1 for mixer in mixers)


# One for each way to store weights or to compute with them; the others hang on the same code.
_SOME = (
    "bitnet", "codegen", "deepseek_v3", "falcon", "gpt2", "gpt_neox", "gpt_oss", "granitemoeshared", "olmo2", "phi3",
    "qwen2_moe", "stablelm",
)  # fmt: skip
_EACH = pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param(kind, more, marks=[] if kind in _SOME and more is several[-1] else pytest.mark.slow)
        for kind, several in CASES.items()
        for more in several
        if _is_cut(kind, more)
    ],
)


@_EACH
def test_logits_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    model = _model(kind, more)
    together = InThreads(model)
    alone = together.forward([feed(FIRST, range(30), 0, 30)])
    assert _off(alone, plain_logits(model, FIRST)) < 1e-4
    together.forward([feed(FIRST, range(13), 1, 1), feed(SECOND, range(9), 0, 1)])
    parts = together.forward([feed(SECOND, range(9, 17), 0, 2), feed(FIRST, range(13, 30), 1, 17)])
    assert _off(parts[2:], alone[13:]) < 1e-4
    if is_aligned(together.models[0].architecture):
        assert torch.equal(parts[2:], alone[13:]), "a row's bits depend on its batch"


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "llama", "qwen2_moe"])
def test_kernels_give_the_same(kind: str) -> None:
    """With plain torch in their place."""
    model = _model(kind, CASES[kind][0])
    together = InThreads(model, ops=LayerOps.of(reference))
    assert _off(together.forward([feed(FIRST, range(30), 0, 30)]), plain_logits(model, FIRST)) < 1e-4


def test_layers_that_lie_in_others_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size is 2; nested layers"):
        share_of(_architecture(_model("gemma3n_text", CASES["gemma3n_text"][0])), 2)


@pytest.mark.parametrize("rounded", ["int8", "int4"])
def test_rounded_shares_are_as_near_to_floats_as_a_rounded_whole(rounded: Any) -> None:
    """Between their groups of inputs matrices may be cut."""
    model = _model("llama", {"head_dim": 16, "intermediate_size": 128}, is_soft=True)
    whole, together = _runner(zoo.as_served(copy.deepcopy(model), rounded)), InThreads(model, rounded)
    text, want = [feed(FIRST, range(30), 0, 30)], plain_logits(model, FIRST)
    assert _off(together.forward(text), want) < 1.3 * _off(whole.forward(text), want)
    assert not any(type(module) is nn.Linear for module in together.models[0].modules())


def test_each_has_half_of_the_matrices_and_of_the_keys() -> None:
    model = _model("llama", {})
    share = share_of(_architecture(model), 2)
    assert share.kv == (LayerKV(1, 16, 16),) * 2
    assert [layer.summed for layer in share.layers] == [(True, True)] * 2
    for key, shape in shapes_of(_architecture(model)).items():
        is_whole = "norm" in key or not key.startswith("model.layers")
        assert torch.Size(shapes_of(share)[key]).numel() * (1 if is_whole else 2) == torch.Size(shape).numel()


@pytest.mark.parametrize(("kind", "summed"), [("olmo2", (False, True)), ("bitnet", (False, False))])
def test_what_a_norm_of_all_its_numbers_follows_is_whole_in_each(kind: str, summed: tuple[bool, bool]) -> None:
    made = _architecture(_model(kind, CASES[kind][0]))
    for layer, before in zip(share_of(made, 2).layers, made.layers, strict=True):
        assert layer.mixer == before.mixer
        assert layer.summed == summed


@pytest.mark.parametrize(
    ("kind", "more", "size", "problem"),
    [
        ("llama", {}, 3, "does not divide num_attention_heads (4)"),
        ("llama", {}, 4, "does not divide num_key_value_heads (2)"),
        ("llama", {"num_key_value_heads": 4, "intermediate_size": 82}, 4, "does not divide intermediate_size (82)"),
        ("gpt_bigcode", CASES["gpt_bigcode"][0], 2, "does not divide num_key_value_heads (1)"),
        ("mixtral", {"num_key_value_heads": 4, "intermediate_size": 82}, 4, "does not divide moe_intermediate_size"),
        ("codegen", CASES["codegen"][0] | {"n_head": 8}, 8, "does not divide the groups of qkv_proj (4)"),
        ("mamba", {"state_size": 16}, 2, "; recurrent layers cannot be sharded"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(kind: str, more: dict[str, Any], size: int, problem: str) -> None:
    with pytest.raises(ModelError) as told:
        Implementation.of(EngineConfig(target="", tensor_parallel_size=size), zoo.config_of(kind, **more), CPU)
    assert f"tensor_parallel_size is {size}" in str(told.value)
    assert problem in str(told.value)
