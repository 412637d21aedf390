"""Stand-ins for CUDA say what the originals said: with plain torch in the place of kernels, and with kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.attention import choose
from engine.fuse_cuda import fuse_for_cuda
from engine.kernels import reference
from tests import zoo
from tests.engine.test_fuse import ROTARY, logits
from tests.interpreting import WHY_NOT

TWO_NORMS = {
    "llama",
    "llama-tied",
    "llama-3",
    "tinyllama-1.1b",
    "llama-160m",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
}


@pytest.mark.parametrize("family", zoo.families())
def test_logits_are_the_same(family: str) -> None:
    plain = zoo.ours(zoo.reference(family))
    fused = copy.deepcopy(plain)
    done = fuse_for_cuda(fused, reference)
    want = logits(plain)
    assert torch.allclose(logits(fused), want, rtol=0, atol=2e-5 * float(want.std()))
    layers = plain.config.num_hidden_layers
    if family in ROTARY:
        assert done["attentions"] == layers
        assert done["norms"] >= 2 * layers + 1
    if family in TWO_NORMS:
        assert (done["layers"], done["gates"]) == (layers, layers)


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
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_whole_model_on_interpreted_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with windows and softcap, rotation with norms of heads, sums with norms, gates: all at once."""
    plain = zoo.ours(zoo.reference(family))
    want = logits(plain)
    fused = copy.deepcopy(plain)
    assert fuse_for_cuda(fused)["attentions"] == plain.config.num_hidden_layers
    kernel = choose("triton", torch.device("cpu"))
    monkeypatch.setattr("tests.engine.test_fuse.choose", lambda *_: kernel)
    assert torch.allclose(logits(fused), want, rtol=0, atol=2e-5 * float(want.std()))
