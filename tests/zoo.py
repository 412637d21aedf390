"""Small random-weight models of several families: real code paths, weights that nobody has to download."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from engine.attention.registry import ATTENTION_NAME
from engine.runner import prepare

VOCAB = 97
END = 2
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": END,
}


def configs() -> dict[str, PreTrainedConfig]:
    """One config per family; grouped heads, learned and rotary positions, norms on q and k, windows, softcaps."""
    return {
        "llama": LlamaConfig(**_COMMON),
        "gpt2": GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=END
        ),
        "opt": OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            bos_token_id=1,
            eos_token_id=END,
        ),
        "qwen3": Qwen3Config(**_COMMON, head_dim=16),
        "mistral": MistralConfig(**_COMMON, sliding_window=9),
        "gemma2": Gemma2Config(**_COMMON, head_dim=16, sliding_window=9, query_pre_attn_scalar=7),
    }


@lru_cache
def reference(family: str, seed: int = 0) -> PreTrainedModel:
    """The plain transformers model, with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[family]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model


def ours(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with our attention, as `runner.load_model` would load them."""
    config = copy.deepcopy(model.config)
    prepare(config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def near(model: PreTrainedModel, amount: float = 0.02) -> PreTrainedModel:
    """A draft that is often right: the same weights, a little disturbed, with our attention."""
    twin = ours(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return twin


def prompts(count: int = 4, seed: int = 1) -> list[list[int]]:
    """Prompts of unequal lengths, some with repetitions that an n-gram proposer can use."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [tokens + tokens[: len(tokens) // 2] if i % 2 else tokens for i, tokens in enumerate(drawn)]
