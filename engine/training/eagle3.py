"""An EAGLE-3 head with gradients (Li et al. 2025, arXiv 2503.01840), in the form 3.1 of its published folders.

The head is fed (hidden states of position t at three places of the target, token t + 1) and predicts token t + 2. From
there it continues with its own features. Training simulates that ("training-time test"): `unroll` makes several drafts
from every position. As in form 3.1 each of the three hidden states is normalised before they are joined, and the
feature that is fed back is normalised: otherwise its magnitude drifts with depth.

Parameters are named as in published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

NUM_PLACES = 3
KV = tuple[Tensor, Tensor]  # keys and values `[batch, heads, length, head_dim]`


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """Sizes of a head, by their names in its config. Its hidden size is the target's, whose embedding it shares."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @classmethod
    def fitting(cls, hidden_size: int, **others: int) -> Eagle3Shape:
        """The usual attention for this hidden size: heads of 64 if possible, up to four per K/V head."""
        dim = next(size for size in (64, 32, 16, 8, 4, 2) if hidden_size % size == 0 and hidden_size // size > 1)
        heads = hidden_size // dim
        shared = next(n for n in (4, 2, 1) if (heads % n == 0 and heads // n > 1) or n == 1)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // shared, "head_dim": dim}
        return cls(hidden_size=hidden_size, **sizes, **others)

    @property
    def num_matrix_parameters(self) -> int:
        """The number of parameters of all matrices except the output."""
        hidden, wide = self.hidden_size, self.num_attention_heads * self.head_dim
        projections = 2 * (wide + 2 * self.num_key_value_heads * self.head_dim) + wide
        return hidden * (NUM_PLACES * hidden + projections + 3 * self.intermediate_size)


class TrainedRMSNorm(nn.Module):
    """x / rms(x), times a weight (Zhang and Sennrich 2019, arXiv 1910.07467), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), list(x.shape[-1:]), self.weight, self.eps)


class TrainedAttention(nn.Module):
    """Attention in which the query of draft j from position t sees the true positions up to t and its own chain."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, past: list[KV]) -> tuple[Tensor, KV]:
        """Map `[batch, length, 2 * hidden]` of draft `len(past)` to `[batch, length, hidden]`, and its own K/V."""
        batch, length, _ = x.shape
        cos, sin = self._angles(length, len(past), x.device)
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q, own = (
            _rotated(q, cos, sin),
            (_rotated(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)),
        )
        chain = [*past, own]
        if len(chain) == 1:
            made = F.scaled_dot_product_attention(q, *own, is_causal=True)
        else:
            made = _attend(q * self.shape.head_dim**-0.5, chain[0], chain[1:])
        out: Tensor = self.o_proj(made.transpose(1, 2).reshape(batch, length, -1))
        return out, own

    def _split(self, x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(-1, (-1, self.shape.head_dim))
        return parts.transpose(1, 2)

    def _angles(self, length: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, device=device) / self.shape.head_dim
        positions = torch.arange(first, first + length, device=device)
        angles = torch.outer(positions.float(), self.shape.rope_theta**-half).repeat(1, 2)
        return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), halves as Llama pairs them."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _attend(q: Tensor, true: KV, own: list[KV]) -> Tensor:
    """Softmax over the true positions up to the query's and the keys of its own chain, one of each draft."""
    length = q.shape[2]
    later = torch.full((length, length), float("-inf"), device=q.device).triu(1)
    scores = [(q @ true[0].transpose(-1, -2)).float() + later]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in own]
    weights = torch.cat(scores, -1).softmax(-1).to(true[1].dtype)
    made = weights[..., :length] @ true[1]
    for i, (_, v) in enumerate(own):
        made = made + weights[..., length + i, None] * v
    return made


class TrainedFeedForward(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TrainedLayer(nn.Module):
    """The head's one layer; attention reads the embedding beside the feature, both normalised."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.hidden_norm = TrainedRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = TrainedRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = TrainedRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn, self.mlp = TrainedAttention(shape), TrainedFeedForward(shape)

    def forward(self, embedded: Tensor, feature: Tensor, past: list[KV]) -> tuple[Tensor, KV]:
        """Features `[batch, length, hidden]` to the next ones, and the K/V of this draft."""
        attended, own = self.self_attn(torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1), past)
        x = feature + attended
        return x + self.mlp(self.post_attention_layernorm(x)), own


class TrainedEagle3(nn.Module):
    """The whole head except the embedding, which is the target's."""

    def __init__(self, shape: Eagle3Shape, kept: Tensor, output: Tensor) -> None:
        """Make a head that drafts the tokens `kept`, ascending ids; its output begins with rows of the target's."""
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(TrainedRMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(NUM_PLACES))
        self.fc = nn.Linear(NUM_PLACES * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = TrainedLayer(shape)
        self.norm = TrainedRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", kept - torch.arange(len(kept)))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, kept, value=True))
        self._begin(output[kept])

    def _begin(self, output: Tensor) -> None:
        """Initialise: random matrices; the layer is the identity, and the output matrix the target's."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
        nn.init.zeros_(self.midlayer.self_attn.o_proj.weight)
        nn.init.zeros_(self.midlayer.mlp.down_proj.weight)
        with torch.no_grad():
            self.lm_head.weight.copy_(output)

    @property
    def kept(self) -> Tensor:
        """Ids of the draftable tokens, int64 `[draft_vocab]`."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def unroll(self, hidden: Tensor, embedded: Tensor, drafts: int) -> Iterator[Tensor]:
        """Yield the logits of each draft j, `[batch, length - j, draft_vocab]`; row t predicts token t + 2 + j.

        Args:
            hidden: the target's hidden states of positions t, `[batch, length, 3 * hidden]`.
            embedded: the embedding of the token after each, `[batch, length, hidden]`.
            drafts: number of drafts.
        """
        joined = [norm(part) for norm, part in zip(self.fc_norm, hidden.chunk(NUM_PLACES, -1), strict=True)]
        feature, past = self.fc(torch.cat(joined, -1)), list[KV]()
        for j in range(drafts):
            length = hidden.shape[1] - j  # the last chains have no true token to continue with
            if length < 1:
                return
            past = [(k[:, :, :length], v[:, :, :length]) for k, v in past]
            made, own = self.midlayer(embedded[:, j:], feature[:, :length], past)
            feature = self.norm(made)
            past.append(own)
            yield self.lm_head(feature)


def config_of(shape: Eagle3Shape, places: Seq[int], positions: int) -> dict[str, Any]:
    """The head's config, with the names of the published ones; `positions` are those of the target."""
    return asdict(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "target_hidden_size": shape.hidden_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": list(places),  # layers whose input is read
        "dtype": "bfloat16",
    }


def export_head(head: TrainedEagle3, config: dict[str, Any], out: Path) -> None:
    """Write a head in the published layout of EAGLE-3; the weights last and atomically.

    The embedding is omitted: it is the target's.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    unfinished = out / "model.unfinished"
    unfinished.write_bytes(save(tensors, {"format": "pt"}))  # `save_file` would write it with mode 0600
    unfinished.replace(out / "model.safetensors")
