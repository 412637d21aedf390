"""Checkpoints of heads are loaded whole, or refused with what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.proposers.heads.dflash import load_dflash
from pilotfish.engine.proposers.heads.eagle import load_eagle
from pilotfish.engine.proposers.heads.medusa import load_medusa
from tests import heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints as made
from tests.engine.proposers.heads.test_eagle3 import IDS, SMALL, speculators

Z, GONE = torch.zeros, object()


@dataclass(frozen=True)
class Kind:
    """A head that is whole, for a Llama of so many layers."""

    load: Callable[..., object]
    config: dict[str, object]
    tensors: dict[str, Tensor]
    depth: int = 4


@lru_cache
def target(depth: int) -> torch.nn.Module:
    return zoo.ours(zoo.with_large_weights(zoo.config_of("llama", num_hidden_layers=depth)))


REDUCED = heads.EAGLE3_CONFIG | SMALL
MEDUSA = Kind(load_medusa, {"medusa_num_heads": 4, "medusa_num_layers": 1}, heads.medusa_tensors())
EAGLE = Kind(load_eagle, heads.EAGLE_CONFIG, heads.eagle_tensors(), depth=2)
EAGLE3 = Kind(load_eagle, heads.EAGLE3_CONFIG, heads.eagle3_tensors(heads.EAGLE3_CONFIG))
SMALLER = Kind(load_eagle, REDUCED, heads.eagle3_tensors(REDUCED))
OTHER = Kind(load_eagle, speculators(**SMALL), SMALLER.tensors)
DFLASH = Kind(load_dflash, made.AUTHORS, made.tensors())
WINDOW = Kind(load_dflash, made.AUTHORS | made.SLIDING, made.tensors())
SPECULATORS = Kind(load_dflash, made.SPECULATORS, made.tensors(speculators=True))


def own(**changes: object) -> dict[str, object]:
    return {"dflash_config": made.AUTHORS["dflash_config"] | changes}


NARROW = REDUCED | {"hidden_size": 16, "target_hidden_size": 32}
CASES: list[tuple[Kind, dict[str, object], dict[str, object], str]] = [
    # Of tensors.
    (MEDUSA, {}, {"2.0.linear.bias": GONE}, "does not fit the target: 2.0.linear.bias is missing"),
    (MEDUSA, {}, {"4.0.linear.bias": Z(32)}, "4.0.linear.bias is unexpected"),
    (MEDUSA, {}, {"1.1.weight": Z(50, 32)}, "1.1.weight is (50, 32), expected (97, 32)"),
    (EAGLE, {}, {"fc.weight": Z(32, 32)}, "fc.weight is (32, 32), expected (32, 64)"),
    (EAGLE3, {}, {"mask_hidden": Z(1, 96)}, "mask_hidden is unexpected"),
    (EAGLE3, {}, {"midlayer.self_attn.q_norm.weight": Z(8)}, "self_attn.q_norm.weight is unexpected"),
    (SMALLER, {}, {"d2t": GONE}, "drafts 60 of the target's 97 tokens, but has no d2t"),
    (SMALLER, {}, {"d2t": Z(60).long() + 40}, "d2t is not a map from the head's 60 tokens"),
    (SMALLER, {}, {"d2t": Z(59).long()}, "d2t is not a map"),
    (SMALLER, NARROW, heads.eagle3_tensors(NARROW), "hidden size 16 and no embed_tokens"),
    (DFLASH, {}, {"fc.weight": Z(32, 32)}, "fc.weight is (32, 32), expected (32, 64)"),
    (DFLASH, {}, {"layers.0.self_attn.q_norm.weight": GONE}, "q_norm.weight is missing"),
    (DFLASH, {}, {"markov_head.w1": Z(3)}, "markov_head.w1 is unexpected"),
    (SPECULATORS, {}, {"d2t": GONE}, "drafts 50 of the target's 97 tokens, but has no d2t"),
    (SPECULATORS, {}, {"d2t": Z(9).long()}, "d2t is not a map from the head's 50 tokens"),
    (SPECULATORS, {}, {"d2t": Z(50).long() + 90}, "d2t is not a map from the head's 50 tokens"),
    (SPECULATORS, {}, {"d2t": -torch.arange(50)}, "d2t is not a map from the head's 50 tokens"),
    # Of what a config says.
    (MEDUSA, {"medusa_num_layers": GONE}, {}, "medusa_num_layers None; expected a positive number"),
    # It is taken for one of EAGLE-3.
    (EAGLE, {}, {"d2t": Z(9)}, "reads layers 2, 1 and -1; the target has 2"),
    (EAGLE, {"hidden_size": 64}, {}, "for hidden size 64 and 97 tokens; the target has"),
    (EAGLE, {"num_hidden_layers": 2}, {}, "has 2 layers"),
    (EAGLE3, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "are ['Eagle3DeepseekV2ForCausalLM']"),
    (EAGLE3, {"model_type": "qwen3"}, {}, "model_type is 'qwen3'"),
    (EAGLE3, {"parallel_drafting": True}, {}, "parallel_drafting is True"),
    (EAGLE3, {"eagle_config": 3}, {}, "eagle_config is 3; expected an object"),
    (EAGLE3, {"eagle_config": {"use_mtp_layernorm": True}}, {}, "use_mtp_layernorm is True"),
    (EAGLE3, {IDS: [2, 3, 9]}, {}, "layer_ids are [2, 3, 9]; the target has 4 layers"),
    (EAGLE3, {"fc_norm": True}, {}, "fc_norm.0.weight is missing"),
    (EAGLE3, {"fc_norm": True, "norm_before_fc": True}, {}, "fc_norm and norm_before_fc are both true"),
    (EAGLE3, {"num_hidden_layers": 2}, {}, "layers.1.input_layernorm.weight is missing"),
    (EAGLE3, {"vocab_size": 50}, {}, "for hidden size 32 and 50 tokens; the target has (32, 97)"),
    (EAGLE3, {"target_hidden_size": 64}, {}, "for hidden size 64 and 97 tokens"),
    (EAGLE3, {"draft_vocab_size": 50}, {}, "lm_head.weight is (97, 32), expected (50, 32)"),
    (EAGLE3, {"rope_scaling": {"rope_type": "spiral"}}, {}, "rope_type is 'spiral'; supported: default, linear"),
    (EAGLE3, {"rope_scaling": {"rope_type": "linear"}}, {}, "rope_parameters of rope_type 'linear' have no factor"),
    (EAGLE3, {"num_attention_heads": "4"}, {}, "invalid llama config: {"),
    (EAGLE3, {"hidden_act": "swoosh"}, {}, "the activation swoosh is not in the table"),
    (OTHER, {"norm_before_residual": GONE}, {}, "config.json has no norm_before_residual"),
    (OTHER, {"speculators_model_type": "peagle"}, {}, "'peagle'; expected 'eagle3'"),
    (OTHER, {"transformer_layer_config": {}}, {}, "transformer_layer_config has no model_type"),
    (DFLASH, {"dflash_config": GONE}, {}, "neither dflash_config nor speculators_model_type"),
    (DFLASH, {"architectures": ["DFlash2DraftModel"]}, {}, "is a DFlash2DraftModel"),
    (DFLASH, {"model_type": "laguna"}, {}, "model_type is 'laguna'"),
    (DFLASH, {"logit_scale": 0.5}, {}, "logit_scale is 0.5, which is not supported"),
    (DFLASH, own(projector_type="domino"), {}, "projector_type is 'domino', which is not supported"),
    (DFLASH, own(target_layer_ids=None), {}, "target_layer_ids is None; expected a list of layers"),
    (DFLASH, own(target_layer_ids=[0, 3]), {}, "target_layer_ids is [0, 3]; expected a list of layers before"),
    (DFLASH, own(mask_token_id=None), {}, "mask_token_id is None; the target has 97 tokens"),
    (DFLASH, own(mask_token_id=97), {}, "mask_token_id is 97; the target has 97 tokens"),
    (DFLASH, {"block_size": None}, {}, "block_size is None; expected at least 2"),
    (DFLASH, {"block_size": 1}, {}, "block_size is 1"),
    (DFLASH, {"num_target_layers": 36}, {}, "num_target_layers 36; the target has 4 layers"),
    (DFLASH, {"hidden_size": 64}, {}, "is for hidden size 64 and 97 tokens; the target has (32, 97)"),
    (DFLASH, {"layer_types": ["chunked_attention"] * 3}, {}, "layer_types is ['chunked_attention'"),
    (DFLASH, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {},
     "rope_type is 'dynamic'; supported: default, linear, llama3, longrope, yarn"),
    (WINDOW, {"use_sliding_window": False}, {}, "require sliding_window and use_sliding_window"),
    (WINDOW, {"is_causal": False}, {}, "causal is False and sliding_window_non_causal False with sliding_attention"),
    (SPECULATORS, {"speculators_model_type": "dspark"}, {}, "speculators_model_type is 'dspark'"),
    (SPECULATORS, {"sample_from_anchor": True}, {}, "sample_from_anchor is True, which is not supported"),
    (SPECULATORS, {"target_hidden_size": 64}, {}, "target_hidden_size is 64, but hidden_size is 32"),
    (SPECULATORS, {"transformer_layer_config": None}, {}, "transformer_layer_config has no model_type"),
    (SPECULATORS, {"markov_rank": 256}, {}, "markov_rank is 256, which is not supported"),
    (SPECULATORS,
     {"transformer_layer_config": made.BACKBONE | made.SLIDING, "sliding_window_non_causal": True}, {},
     "sliding_window_non_causal True"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "tensors", "said"), CASES, ids=[said for *_, said in CASES])
def test_heads_that_do_not_fit(
    tmp_path: Path, kind: Kind, config: dict[str, object], tensors: dict[str, Tensor], said: str
) -> None:
    whole, stored = kind.config | config, kind.tensors | tensors
    folder = heads.save(
        tmp_path,
        {name: value for name, value in whole.items() if value is not GONE},
        {name: tensor for name, tensor in stored.items() if tensor is not GONE},
    )
    with pytest.raises(ModelError) as raised:
        kind.load(folder, None, target(kind.depth))
    assert said in str(raised.value)


def test_files_that_are_no_head(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no safetensors; expected config\.json"):
        load_medusa(str(tmp_path), None, target(2))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    for load in (load_medusa, load_eagle):
        with pytest.raises(ModelError, match="pickled weights are refused; convert"):
            load(str(tmp_path), None, target(2))
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not an object"):
        load_eagle(str(tmp_path), None, target(2))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot load .*config\.json"):
        load_eagle(str(tmp_path), None, target(2))
