"""Stand-ins for CUDA say what the originals said: with plain torch in the place of kernels, and with kernels."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import choose
from engine.kernels import faults, has_triton, reference
from engine.model.fusion.fuse_cuda import fuse_for_cuda
from engine.model.fusion.kernel_layers import KernelLayer, KernelNorm, LayerOps
from engine.model.linear.experts import StackedExperts
from engine.model.tap import FINAL, Tap
from engine.proposers.model import first_layers
from tests import zoo
from tests.card import here
from tests.engine.model.test_experts import plain_model
from tests.engine.model.test_fuse import ROTARY, logits
from tests.interpreting import WHY_NOT

IN_LAYERS = set(ROTARY) - {"gemma", "mixtral", "phi3-longrope"}  # whose norms and gates are all ours


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3"])
def test_logits_are_the_same(family: str) -> None:
    plain = zoo.ours(zoo.reference(family))
    fused, done = fused_like(plain)
    assert close(logits(fused), logits(plain))
    layers = plain.config.num_hidden_layers
    if family in ROTARY:
        assert done["attentions"] == layers
        assert done["norms"] >= 2 * layers + 1
    if family in IN_LAYERS:
        assert (done["layers"], done["gates"], done["sums handed on"]) == (layers, layers, layers)


def test_keys_and_values_in_int8_are_rounded_from_what_the_kernel_writes() -> None:
    plain, fused = fused_pair("qwen3")
    want = logits(plain, "int8")
    assert close(logits(fused, "int8"), want)
    assert not close(logits(fused), want)


def fused_like(plain: PreTrainedModel, ops: object = reference) -> tuple[PreTrainedModel, dict[str, int]]:
    """A copy with our stand-ins, and how many of each kind it has."""
    fused = copy.deepcopy(plain)
    return fused, fuse_for_cuda(fused, ops)


def fused_pair(family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    plain = zoo.ours(zoo.reference(family))
    return plain, fused_like(plain)[0]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=0, atol=2e-5 * float(want.std()))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whoever_reads_or_changes_hidden_states_between_layers_gets_what_is_right(family: str) -> None:
    """Hooks see the plain model's sums; one that returns other rows has them normed; features are those of the norm."""
    plain, fused = fused_pair(family)
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(layer, _inputs, output):
        seen.setdefault(id(layer), []).append(output.clone())
        return output * 2 + 1 if layer in firsts else None

    firsts = [model.get_decoder().layers[0] for model in (plain, fused)]
    for model in (plain, fused):
        for layer in model.get_decoder().layers:
            layer.register_forward_hook(keep)
    taps = Tap(plain), Tap(fused)
    assert close(logits(fused), logits(plain))
    for ours, theirs in zip(fused.get_decoder().layers, plain.get_decoder().layers, strict=True):
        assert all(close(a, b) for a, b in zip(seen[id(ours)], seen[id(theirs)], strict=True))
    assert close(taps[1].read((FINAL,)), taps[0].read((FINAL,)))
    norms = [module for module in fused.modules() if isinstance(module, KernelNorm)]
    assert all(norm._handed == (None, None) for norm in norms), "what was handed on is let go of"


def test_a_fused_targets_first_layers_draft_for_it() -> None:
    """They are a copy that shares all weights; the final norm reads the sum of another layer there."""
    config = zoo.family_config("llama")
    config.num_hidden_layers = 3
    plain = zoo.ours(zoo.with_large_weights(config))
    fused, _ = fused_like(plain)
    mine, theirs = first_layers(fused, 2), first_layers(plain, 2)
    assert close(logits(mine), logits(theirs))
    assert close(logits(fused), logits(plain))
    last = mine.get_decoder().layers[-1]
    assert last.following == (mine.get_decoder().norm,)


def test_without_a_ragged_batch_a_fused_model_is_the_original() -> None:
    plain, fused = fused_pair()
    tokens = torch.tensor([list(range(5, 25))])
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert close(fused(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "kind"), [("add_norm", "norms"), ("gate", "gates"), ("rotate_and_write", "attentions")]
)
def test_a_kernel_that_does_not_compile_or_fit_stays_out_and_the_log_says_so_once(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's own error is no RuntimeError. It used to end the load."""
    tried: list[None] = []

    def fails(*_: object) -> None:
        tried.append(None)
        raise faults()[0]("out of resource: shared memory, Required: 300000, Hardware limit: 232448")

    plain = zoo.ours(zoo.reference("llama"))
    with caplog.at_level(logging.WARNING):
        fused, done = fused_like(plain, dataclasses.replace(LayerOps.of(reference), **{name: fails}))
    assert done[kind] == 0
    assert len(tried) == 1, "one failure tells enough: every other would take as long to compile"
    lines = [record.message for record in caplog.records if "no kernels of ours" in record.message]
    why = "TritonError: out of resource: shared memory, Required: 300000, Hardware limit: 232448"
    assert lines == [f"no kernels of ours for {kind}: {why}"]
    assert close(logits(fused), logits(plain))
    assert any(isinstance(module, KernelLayer) for module in fused.modules()) == (kind != "norms")


@pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")
@pytest.mark.parametrize("kind", ["qwen2_moe", "glm4_moe", "gpt_oss", "nemotron_h"])
def test_experts_are_taken_together_without_the_host(kind: str) -> None:
    """Halves and turns, stacks either way round, biases, a gate that stands alone, experts that all rows share."""
    plain = zoo.ours(plain_model(kind))
    fused, done = fused_like(plain)
    assert done["mixtures"] > 0
    assert close(logits(fused), logits(plain))
    name = next(name for name, module in fused.named_modules() if isinstance(module, StackedExperts))
    with here() as card, torch.inference_mode():
        block, x = fused.get_submodule(name.rpartition(".")[0]).cuda(), torch.randn(1, 7, 64).cuda()
        card.waits.clear()
        block(x)
        assert card.launched
        assert not card.waits


def test_a_layer_is_asked_as_before() -> None:
    """Some versions of transformers ask a layer which kind of attention it has."""
    model = zoo.ours(zoo.reference("llama"))
    layer = model.get_decoder().layers[0]
    layer.attention_type = "full_attention"
    fuse_for_cuda(model, reference)
    stand_in = model.get_decoder().layers[0]
    assert stand_in is not layer
    assert stand_in.attention_type == "full_attention"
    with pytest.raises(AttributeError):
        stand_in.nothing_of_the_kind  # noqa: B018


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")
@pytest.mark.parametrize(
    ("family", "done"),
    [
        pytest.param("gemma2", {"attentions": 2}, marks=pytest.mark.slow(lowest=True)),
        pytest.param("gpt-oss", {"mixtures": 2}, marks=pytest.mark.slow(lowest=True)),
        pytest.param("gemma-4", {}, marks=pytest.mark.slow),
    ],
)
def test_a_whole_model_on_interpreted_kernels(
    family: str, done: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention with windows, softcap, sinks and heads of several sizes, norms, gates, experts: all at once."""
    plain = zoo.ours(zoo.reference(family))
    fused = copy.deepcopy(plain)
    want = logits(plain)
    assert fuse_for_cuda(fused).items() >= done.items()
    kernel = choose("triton", torch.device("cpu"))
    monkeypatch.setattr("tests.engine.model.test_fuse.choose", lambda *_: kernel)
    assert close(logits(fused), want)
