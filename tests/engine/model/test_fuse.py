"""Stand-ins say what the originals said; what they do not fit stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from engine.attention import choose
from engine.choices import KVType
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.fusion.fuse import Gated, Joined, RotaryAttention, fuse
from engine.model.linear.grouped import GroupedLinear
from engine.model.linear.rounding import round_weight
from engine.model.quantize import quantise
from engine.model.runner import ModelRunner, kv_layout
from engine.native import rows
from tests import zoo
from tests.covering import some
from tests.exactness.test_families import SERVED_UNASKED, SIZES

ROTARY = sorted(name for name in zoo.FAMILIES if not name.startswith(("gpt2", "distilgpt2", "opt")))


def logits(model: PreTrainedModel, kind: KVType = "auto") -> torch.Tensor:
    """Of a ragged batch: a chunk, a prompt, then one token each."""
    arena = KVArena(kv_layout(model.config, model.dtype).stored_as(kind), 3, 64, torch.device("cpu"))
    runner = ModelRunner(model, arena, choose("auto", model.device))
    first = runner.forward([Feed(range(5, 25), 0, [1], 20), Feed([3, 4, 5], 0, [2], 0)])
    return torch.cat([first, runner.forward([Feed([9], 20, [1]), Feed([3, 4], 3, [2], 2)])])


def of_kind(kind: str) -> PreTrainedModel:
    return zoo.ours(zoo.with_large_weights(AutoConfig.for_model(kind, **SIZES, **SERVED_UNASKED[kind])))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gemma2", torch.float32), ("opt", torch.float32), ("qwen3", torch.bfloat16)]
    + [pytest.param(family, torch.float32, marks=pytest.mark.slow) for family in ("phi3-longrope", "mixtral")],
)
def test_logits_are_the_same(family: str, dtype: torch.dtype) -> None:
    plain = zoo.ours(zoo.reference(family)).to(dtype)
    fused = copy.deepcopy(plain)
    done = fuse(fused)
    assert sum(p.numel() for p in fused.parameters()) == sum(p.numel() for p in plain.parameters()), (
        "none is kept twice"
    )
    want = logits(plain)
    atol = (1e-5 if dtype == torch.float32 else 0.05) * float(want.std())
    assert torch.allclose(logits(fused), want, rtol=0, atol=atol)
    if family in ROTARY:
        layers = plain.config.num_hidden_layers
        assert (done["attentions"], done["norms"] >= 2 * layers + 1) == (layers, True)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)])
def test_large_weights_of_norms_do_not_hide_their_form(family: str, dtype: torch.dtype) -> None:
    """Gemma's scale is 1 more than the weight. Beside large weights, as published ones are, 1 looks like rounding."""
    plain = zoo.ours(zoo.with_large_weights(zoo.family_config(family)))
    for name, module in plain.named_modules():
        if name.endswith("norm"):
            width = module.weight.numel()
            module.weight.data.copy_(torch.where(torch.arange(width) % 3 == 0, 0.01, 60.0))
    plain = torch.nn.Module.to(plain, dtype)
    fused = copy.deepcopy(plain)
    done, want = fuse(fused), logits(plain)
    assert done["norms"] > 2 * plain.config.num_hidden_layers
    off = float((logits(fused) - want).square().mean().sqrt() / want.std())
    assert off < (1e-4 if dtype == torch.float32 else 0.05)


# Projections, norms or rotations that ours does not have.
_OF_OTHER_SHAPES = {
    "gpt_neox", "phi", "olmo2", "olmo3", "cohere2", "glm4", "minicpm3", "longcat_flash", "persimmon", "codegen",
    "gpt_bigcode",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", some(SERVED_UNASKED, ("gpt_neox", "olmo2", "granite")))
def test_families_that_nobody_named(kind: str) -> None:
    """Their attention may turn heads otherwise, norm before the split, or skip rotation: a trial decides."""
    plain = of_kind(kind)
    fused = copy.deepcopy(plain)
    done = fuse(fused)
    want = logits(plain)
    assert torch.allclose(logits(fused), want, rtol=0, atol=1e-5 * float(want.std()))
    assert (done["attentions"] > 0) == (kind not in _OF_OTHER_SHAPES)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_joining_changes_no_bit_in_int8(family: str) -> None:
    """Norms sum in another order, and gates have a formula of their own; without them no last bit differs."""
    plain = zoo.ours(zoo.reference(family))
    quantise(plain)
    fused = copy.deepcopy(plain)
    fuse(fused)
    norms = {name: module for name, module in plain.named_modules() if type(module).__name__.endswith("RMSNorm")}
    for name in [name for name, module in fused.named_modules() if type(module).__name__ == "RMSNorm"]:
        fused.set_submodule(name, norms[name.replace("self_attn.inner.", "self_attn.")])
    for name in [name for name, module in fused.named_modules() if isinstance(module, Gated)]:
        fused.set_submodule(name, fused.get_submodule(name).inner)
    assert torch.equal(logits(fused), logits(plain))


class OddRMSNorm(nn.Module):
    """Of another formula than its name says."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(-1, keepdim=True)


def test_parts_of_other_kinds_are_left() -> None:
    model = zoo.ours(zoo.reference("llama"))
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.q_proj = GroupedLinear(round_weight(attention.q_proj.weight, 8))
    model.get_submodule("model.layers.1.mlp").gate_proj.register_parameter("bias", nn.Parameter(torch.zeros(48)))
    model.set_submodule("model.norm", OddRMSNorm())
    assert fuse(model) == {"matmuls joined": 2, "norms": 4, "gates": 1, "attentions": 1}


def test_joined_asks_once_and_lets_go() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    inner = Counting(4, 6)
    joined, x, y = Joined(inner, [4, 2]), torch.ones(1, 4), torch.zeros(1, 4)
    assert torch.equal(torch.cat([joined.share(0, x), joined.share(1, x)], -1), nn.Linear.forward(inner, x))
    assert (inner.calls, joined._rows) == (1, None)
    assert torch.equal(joined.share(1, y), inner.bias[None, 4:]), "another input, in whatever order"
    assert torch.equal(joined.share(0, x), nn.Linear.forward(inner, x)[:, :4])


def test_transformers_own_pass_still_runs() -> None:
    model = zoo.ours(zoo.reference("qwen3"))
    fuse(model)
    assert isinstance(model.get_submodule("model.layers.0.self_attn"), RotaryAttention)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(model(ids).logits, zoo.reference("qwen3")(ids).logits, atol=1e-4)


@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_a_shape_that_our_c_is_for(dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, gates and rotations in C, beside the same stand-ins in torch, beside the model as it was."""
    shape = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=zoo.VOCAB, num_hidden_layers=2, max_position_embeddings=64, head_dim=32, **shape)
    plain = zoo.ours(zoo.with_large_weights(config)).to(dtype)
    if int8:
        quantise(plain)
    fused = copy.deepcopy(plain)
    assert fuse(fused) == {"matmuls joined": 4, "norms": 5, "gates": 2, "attentions": 2}
    want, got = logits(plain), logits(fused)
    assert native_calls(fused, monkeypatch) >= {"norm", "rotate", "gate_round" if int8 else "gate"}
    off = (got - want).square().mean(-1).sqrt().max() / want.std()
    assert off < (1e-5 if dtype == torch.float32 and not int8 else 0.25)
    monkeypatch.setattr("engine.model.fusion.fuse.rows_for", lambda *_: None)
    off = (logits(fused) - got).square().mean(-1).sqrt().max() / want.std()
    assert off < (1e-5 if dtype == torch.float32 and not int8 else 0.25)


def native_calls(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which of our C functions a pass of `model` calls."""
    found = rows()
    if found is None:
        pytest.skip("no C compiler here")
    called = set()
    for name, function in found._call.items():
        monkeypatch.setitem(found._call, name, lambda *a, n=name, f=function: (called.add(n), f(*a)))
    logits(model)
    return called
