"""DFlash (Chen, Liang and Liu 2026, arXiv 2602.06036): a block of masks becomes all drafts of a sequence in one pass.

The draft is a few Qwen3 layers. Their context is no text but the target's hidden states, fused to one feature for each
position: every layer makes keys and values of it and nothing else. After the context stands the block: the newest
token and a mask for each draft, at consecutive positions. Its rows see the context and all of the block, and the row
of mask j predicts draft j. When fewer drafts are asked for than the block has masks, it is fed only as many, as in
the authors' code and in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from engine.attention import Attend
from engine.attention.registry import Ragged
from engine.attention.spec import AttentionSpec
from engine.control.prefill_budget import PrefillBudget
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.decoder.norms import RMSNorm
from engine.model.fallback import kv_layout
from engine.model.linear.packed import PackedLinear
from engine.model.tap import Tap
from engine.native import PackedMatrix, multiplies, rows_for
from engine.proposers.base import Proposal
from engine.proposers.chain import Chain, chains_of, draw, proposal_of
from engine.proposers.heads.base import Head, HeadContext
from engine.proposers.heads.dflash_config import DFlashConfig, read_dflash_config
from engine.proposers.heads.proposer import HeadProposer
from engine.proposers.heads.weights import fill, load_checkpoint, target_ids, widened
from engine.stats import Forward
from engine.types import Sequence

# Of the speculators form: parts of the target, which training compares with, and the map that `d2t` is inverse to.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")


class DFlashHead(nn.Module):
    """Keys as published: `fc`, `hidden_norm`, `layers.i` as in Qwen3, `norm`; `embed_tokens`, `lm_head` perhaps."""

    def __init__(self, settings: Qwen3Config, places: int, *, embeds: bool, outputs: int | None) -> None:
        super().__init__()
        hidden, eps = settings.hidden_size, settings.rms_norm_eps
        self.fc = nn.Linear(places * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(settings, i) for i in range(settings.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps)
        if embeds:
            self.embed_tokens = nn.Embedding(settings.vocab_size, hidden)
        if outputs is not None:
            self.lm_head = nn.Linear(hidden, outputs, bias=False)

    def keys_and_values(self, layer: int, features: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of fused features `[T, hidden]` in one layer, `[T, kv_heads, head_dim]` each; `rotary` `[T, head_dim]`."""
        attention = cast("Qwen3DecoderLayer", self.layers[layer]).self_attn
        heads = (len(features), -1, attention.head_dim)
        key = attention.k_norm(attention.k_proj(features).view(heads))
        cos, sin = (part[:, None] for part in rotary)
        return key * cos + rotate_half(key) * sin, attention.v_proj(features).view(heads)


def load_dflash(name: str, revision: str | None, target: PreTrainedModel) -> Head:
    """A draft of a local folder or a hub id, in the authors' form or that of `speculators`; its type is `_type_of`.

    Raises:
        ModelError: it is no DFlash draft, is of a kind that is not served, or does not fit this target.
    """
    written, tensors = load_checkpoint(name, revision)
    config = read_dflash_config(name, written, target, tensors)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in _UNUSED}
    offsets, own_output = tensors.pop("d2t", None), "lm_head.weight" in tensors
    tokens = None if offsets is None else _tokens(name, offsets, config)
    if config.draft_vocab != config.settings.vocab_size and (tokens is None or not own_output):
        raise ModelError(f"{name!r} drafts {config.draft_vocab} tokens; expected d2t and lm_head.weight to say which")
    head = DFlashHead(
        config.settings,
        len(config.places),
        embeds="embed_tokens.weight" in tensors,
        outputs=config.draft_vocab if own_output else None,
    )
    fill(head, tensors, name)
    dtype = _type_of(tensors["fc.weight"].dtype, target)
    head.to(target.device, dtype).eval()
    if target.device.type == "cpu":
        _pack(head)

    def proposer(context: HeadContext) -> DFlashProposer:
        assert context.arena is not None, "it has a layout"
        runner = DFlashRunner(head, config, tokens, target, dtype, context.arena, context.attend)
        return DFlashProposer(runner, context.tap, config.places, context.prefill)

    return Head(config.places, kv_layout(config.settings, dtype), proposer)


def _type_of(stored: torch.dtype, target: PreTrainedModel) -> torch.dtype:
    """The type that the draft computes in: the target's, or on a CPU its own where our C multiplies that.

    A target may be in a wider type to keep its tokens what they are. No bit of a draft decides a token, and half the
    bytes are read in half the time.
    """
    return stored if target.device.type == "cpu" and multiplies(stored) else target.dtype


def _pack(head: DFlashHead) -> None:
    """Let our C multiply the matrices whose type and size it is for, and do the norms."""
    for name, part in list(head.named_modules()):
        if isinstance(part, Qwen3RMSNorm):
            head.set_submodule(name, RMSNorm(part.weight, part.variance_epsilon))
        elif type(part) is nn.Linear and multiplies(part.weight.dtype):
            weight, bias = part.weight.detach(), cast("Tensor | None", part.bias)
            bias = None if bias is None else bias.detach().float()
            if rows_for(weight.dtype, weight.shape[1]) is not None:
                out = torch.float32 if name == "lm_head" else None  # rounded to bfloat16 many logits would be equal
                head.set_submodule(name, PackedLinear(PackedMatrix.of(weight, bias), out))


def _tokens(name: str, offsets: Tensor, config: DFlashConfig) -> Tensor:
    """The target's token for each that the draft knows, `[draft vocab]`."""
    tokens = target_ids(offsets, config.draft_vocab, config.settings.vocab_size)
    if tokens is None:
        raise ModelError(f"{name!r}: d2t does not map {config.draft_vocab} draft tokens to as many of the target's")
    return tokens


class DFlashRunner:
    """The draft over an arena of its own."""

    def __init__(
        self,
        head: DFlashHead,
        config: DFlashConfig,
        tokens: Tensor | None,
        target: PreTrainedModel,
        dtype: torch.dtype,
        arena: KVArena,
        attend: Attend,
    ) -> None:
        self._dtype = dtype
        self.arena, self.mask, self.block = arena, config.mask, config.block
        self._head, self._config, self._attend, self._device = head, config, attend, target.device
        own: nn.Module | None = getattr(head, "lm_head", None)
        self._embed = getattr(head, "embed_tokens", None) or target.get_input_embeddings()
        self._output, self._output_type = own or target.get_output_embeddings(), target.dtype if own is None else dtype
        self._tokens = None if tokens is None else tokens.to(target.device)
        self._rotary = Qwen3RotaryEmbedding(config.settings).to(target.device)  # no part of the head: stays in float32

    def project(self, features: Tensor) -> Tensor:
        """The target's features `[n, places * hidden]`, fused: `[n, hidden]`."""
        return cast("Tensor", self._head.hidden_norm(self._head.fc(features.to(self._dtype))))

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """Keep keys and values of fused features `[T, hidden]` at the rows of `feeds`; returns those at the last rows.

        No row sees another one here: a context row is projected, and never asks.
        """
        batch = RaggedBatch.of(feeds, self.arena.page_size, self._device)
        rotary = self._rotary_of(batch, features)
        for layer in range(len(self._head.layers)):
            self.arena.write(layer, batch.kv_rows, *self._head.keys_and_values(layer, features, rotary))
        return features[batch.logit_rows]

    def fill_in(self, feeds: Seq[Feed]) -> Tensor:
        """Run blocks of the newest token and masks, each after its context; the outputs `[R, hidden]` of the masks."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self._device)
        causal = Ragged(batch, self.arena, self._attend)
        mutual = Ragged(batch, self.arena, partial(attend_bidirectionally, self._attend))
        x = self._embed(batch.input_ids).to(self._dtype)
        cos, sin = self._rotary_of(batch, x)
        x = x[None]
        for layer, is_causal in zip(self._head.layers, self._config.is_causal, strict=True):
            x = layer(x, position_embeddings=(cos[None], sin[None]), ragged=causal if is_causal else mutual)
        return cast("Tensor", self._head.norm(x[0][batch.logit_rows]))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[R, target's vocab]`; -inf for tokens that the draft does not know."""
        logits: Tensor = self._output(hidden.to(self._output_type)).float()
        if self._config.softcap is not None:
            logits = torch.tanh(logits / self._config.softcap) * self._config.softcap
        if self._tokens is None:
            return logits
        return widened(logits, self._tokens, self._config.settings.vocab_size)

    def _rotary_of(self, batch: RaggedBatch, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the batch's positions, `[T, head_dim]` in the type of `like`."""
        cos, sin = self._rotary(like, batch.positions[None])
        return cos[0], sin[0]


def attend_bidirectionally(
    attend: Attend, query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec
) -> Tensor:
    """As `attend`, but every row of a sequence sees all of it, also the rows after it.

    The last row sees all. So the rows of a sequence become further query heads of its last one: those that share a K/V
    head meet every key in one go, however many rows there are.
    """
    last, rows, home = batch.once("mutual", partial(_as_last_rows, batch))
    heads = k.shape[1]
    folded = query[rows].unflatten(2, (heads, -1)).transpose(1, 2)  # [B, kv_heads, n, group, key_dim]
    out = attend(folded.flatten(1, 3), k, v, last, spec).unflatten(1, folded.shape[1:4])
    unfolded: Tensor = out.transpose(1, 2).flatten(2, 3).flatten(0, 1)[home]
    return unfolded


def _as_last_rows(batch: RaggedBatch) -> tuple[RaggedBatch, Tensor, Tensor]:
    """The same sequences, each with its last row alone; the rows of each; and where each row stands among those.

    `[B, n]` rows of the batch, n of the longest: a shorter one repeats its last; `[T]` places among the B * n.
    """
    device, stops = batch.positions.device, batch.cu_seqlens[1:]
    spans = [range(start, stop) for start, stop in zip(batch.cu_seqlens, stops, strict=False)]
    n = max(map(len, spans))
    rows = torch.tensor([[min(span.start + i, span.stop - 1) for i in range(n)] for span in spans], device=device)
    home = torch.tensor([b * n + i for b, span in enumerate(spans) for i in range(len(span))], device=device)
    last = replace(
        batch, positions=batch.positions[rows[:, -1]], cu_seqlens=tuple(range(len(spans) + 1)), _worked_out={}
    )
    return last, rows, home


class DFlashProposer(HeadProposer):
    """Drafts up to `block` - 1 tokens of each sequence in one pass.

    Row r of a sequence's arena holds the keys and values of the r-th feature. They are all true, for only the target
    makes features; the block lies beyond the cursor, where the next features overwrite it.
    """

    is_parallel = True  # one pass, however many drafts

    def __init__(self, draft: DFlashRunner, tap: Tap, places: tuple[int, ...], prefill: PrefillBudget) -> None:
        super().__init__(draft, tap, places, prefill)
        self._draft, self.most_drafts = draft, draft.block - 1

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Catch up on the target's features, within the token budget; then all drafts of those that have."""
        chains = chains_of(sequences, [min(k, self.most_drafts) for k in k_each])
        read: list[Forward] = []
        ready, _ = self._catch_up([chain for chain in chains if chain.k], read)
        # What one round leaves to read belongs to the pass of the block; a prompt is reading of its own.
        forwards = [one for one in read if not ready or one.tokens > self._draft.block * one.sequences]
        if ready:
            self._draw_block(ready)
            forwards.append(Forward("draft", len(ready), sum(chain.k + 1 for chain in ready)))
        return proposal_of(chains, forwards)

    def _draw_block(self, chains: list[Chain]) -> None:
        """Draw all drafts of each chain, those of one depth together: processors see what was drawn before."""
        feeds = []
        for chain in chains:
            cursor, block = chain.sequence.draft, [chain.sequence.tokens[-1], *[self._draft.mask] * chain.k]
            feeds.append(Feed(block, cursor.kv_len, cursor.page_table, chain.k))
        logits = self._draft.logits(self._draft.fill_in(feeds))
        first = list(accumulate((chain.k for chain in chains), initial=0))
        for depth in range(max(chain.k for chain in chains)):
            deep = [i for i, chain in enumerate(chains) if chain.k > depth]
            draw([chains[i] for i in deep], logits[[first[i] + depth for i in deep]])

    def _grow(self, chains: list[Chain], hidden: Tensor) -> tuple[list[Chain], Tensor]:
        """A feature alone makes no draft: the chains that are fed to their end go on to their blocks as they are."""
        return chains, hidden
