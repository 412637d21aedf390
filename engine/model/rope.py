"""One rotary table per sequence. Knows positions and config fields; knows no attention and no request.

Longrope has two frequency tables: short factors for a sequence of at most `original_max_position_embeddings` tokens,
long factors for a longer one. transformers picks one of them for a whole pass, by its largest position. This is right
for a single sequence and wrong for a ragged batch. Here the position id of every token contains the number of its
table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.kv.batch import TABLE_MARK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Families whose `generate` discards K/V made with the short table at the border, so that the result of a sequence
# depends only on its length. Other families continue with K/V of both tables; we serve them up to the border only.
_RENEWING = {"phi3"}


class TwoTables(nn.Module):
    """Longrope's embedding, which reads the table of each token from its position id."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        super().__init__()
        init, border = ROPE_INIT_FUNCTIONS["longrope"], longrope_border(config)
        assert border is not None
        short, self.attention_scaling = init(config, device, seq_len=border)
        long, scaling = init(config, device, seq_len=border + 1)
        assert scaling == self.attention_scaling, "the scaling depends on the config, not on the table"
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", torch.stack([short, long]), persistent=False)  # [2, rotary_dim / 2]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[1, T, rotary_dim]` of marked `position_ids` `[1, T]`, in the type of `x`."""
        positions, tables = position_ids % TABLE_MARK, position_ids // TABLE_MARK
        angles = positions[..., None].float() * self.inv_freq[tables].float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def longrope_border(config: PreTrainedConfig) -> int | None:
    """The longest sequence for which the first table is used, if a model has two tables that we support; else None."""
    rope = getattr(config, "rope_parameters", None) or {}
    border: int | None = rope.get("original_max_position_embeddings")
    if config.model_type not in _RENEWING or rope.get("rope_type") != "longrope" or border is None:
        return None
    # One of the two numbers chooses the table and the other the moment of renewal, so they must be equal.
    return border if border == getattr(config, "original_max_position_embeddings", None) else None


def install_tables(model: PreTrainedModel) -> None:
    """Replace the rotary embedding of a model with two tables by ours; any other model stays as it is."""
    if longrope_border(model.config) is None:
        return
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    for name, module in list(model.named_modules()):
        if isinstance(module, Phi3RotaryEmbedding):
            model.set_submodule(name, TwoTables(model.config, module.inv_freq.device))
