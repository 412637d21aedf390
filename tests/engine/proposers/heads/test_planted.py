"""Heads that are right by construction: all of their drafts are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.native import multiplies
from pilotfish.engine.startup.build import build_engine
from tests import fakes, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints, mtp_checkpoints

FIXED = {"speculation": "fixed", "max_batch_size": 8}


def ring(size: int) -> tuple[PreTrainedModel, dict[str, object], dict[str, Tensor]]:
    """A target whose next token is that after the last one on a ring, and a head that goes on it as well."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(5))
    then = torch.zeros(size, size)
    then[order, order.roll(-1)] = 1  # [token, next]
    sizes = {"vocab_size": size, "hidden_size": size, "intermediate_size": size, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1}
    model = zoo.with_large_weights(LlamaConfig(**zoo.COMMON | sizes | {"num_hidden_layers": 6, "eos_token_id": None}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(then.T)
    config = heads.EAGLE3_CONFIG | sizes
    tensors = heads.eagle3_tensors(config, target=size)
    tensors = {k: torch.ones_like(t) if k.endswith("norm.weight") else t for k, t in tensors.items()}
    tensors["midlayer.self_attn.o_proj.weight"].zero_()
    # The feature of a token is made that of its next by fc, and that one's next by the MLP: silu(a) b with a = b.
    tensors["fc.weight"] = torch.cat([then.T, torch.zeros(size, 2 * size)], -1)
    tensors["lm_head.weight"] = torch.eye(size)
    tensors |= {f"midlayer.mlp.{name}_proj.weight": torch.eye(size) for name in ("gate", "up")}
    root = torch.tensor(size**0.5)
    tensors["midlayer.mlp.down_proj.weight"] = (then.T - torch.eye(size)) / (silu(root) * root)
    return model, config, {name: tensor.contiguous() for name, tensor in tensors.items()}


def eagle3(folder: Path, *, size: int) -> Engine:
    model, config, tensors = ring(size)
    head = heads.save(folder, config, tensors)
    engine = heads.assembled(EngineConfig(target="llama", proposer="eagle", draft=head, **FIXED), zoo.as_served(model))
    in_c = size == 64 and multiplies(torch.bfloat16)
    assert engine.proposers.by_name["eagle"].head.dtype == (torch.bfloat16 if in_c else torch.float32)
    return engine


def dflash(folder: Path) -> Engine:
    """In bfloat16 for a target in float32, the draft stays in bfloat16 where our C multiplies that."""
    dtype = torch.bfloat16
    draft = dflash_checkpoints.planted(folder, dtype=dtype)
    config = EngineConfig(target="planted", draft=draft, proposer="dflash", **FIXED)
    engine = heads.assembled(config, zoo.as_served(dflash_checkpoints.planted_target()))
    dflash = engine.proposers.by_name["dflash"]
    want = dtype if multiplies(dtype) else torch.float32
    assert dflash.arena.layout.dtype == dflash.head.project(torch.zeros(1, 2 * dflash_checkpoints.HIDDEN)).dtype == want
    return engine


def mtp(folder: Path) -> Engine:
    saved = mtp_checkpoints.planted("deepseek-v3", folder)
    return build_engine(
        EngineConfig(target=saved.folder, draft="mtp", proposer="mtp", warm_up_seconds=0, threads=1, **FIXED)
    )


@pytest.mark.parametrize(
    "head",
    [partial(eagle3, size=32), partial(eagle3, size=64), dflash, mtp],
    ids=["eagle3", "eagle3 in C", "dflash", "mtp"],
)
def test_a_right_head_is_always_kept(tmp_path: Path, head: Callable[[Path], Engine]) -> None:
    """12 tokens with 1 to 8 drafts each. The first token comes from the prompt, and the last may have no drafts."""
    engine, prompts = head(tmp_path), [[3 + (i + j) % 20 for j in range(1 + 3 * i)] for i in range(8)]
    for law in ({}, {"temperature": 0.3, "seed": 3}):
        done = fakes.run(engine, fakes.requests(prompts, range(1, 9), max_tokens=12, ignore_eos=True, **law))
        stats = [done.finished[str(i)].stats for i in range(8)]
        assert [one.acceptance_rate for one in stats] == [1.0] * 8
        assert [one.rounds for one in stats] == [-(-10 // (k + 1)) for k in range(1, 9)]
