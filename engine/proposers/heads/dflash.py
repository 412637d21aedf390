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
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.attention import Attend
from engine.attention.registry import Ragged
from engine.attention.spec import AttentionSpec
from engine.control.prefill_budget import PrefillBudget
from engine.errors import ModelError
from engine.kv.batch import Feed, RaggedBatch
from engine.model.decoder.norms import norm_of
from engine.model.decoder.weights import HEAD, WeightReader
from engine.model.tap import Tap
from engine.native import multiplies
from engine.proposers.base import Proposal
from engine.proposers.chain import Chain, chains_of, draw, proposal_of
from engine.proposers.heads.base import Head
from engine.proposers.heads.dflash_config import DFlashConfig, read_dflash_config
from engine.proposers.heads.layers import FeatureHead, HeadRunner, reader_of
from engine.proposers.heads.proposer import HeadProposer
from engine.proposers.heads.weights import load_checkpoint, target_ids
from engine.stats import Forward
from engine.types import Sequence

if TYPE_CHECKING:
    from engine.model.decoder.decoder import DecoderModel

# Of the speculators form: parts of the target, which training compares with, and the map that `d2t` is inverse to.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")


class DFlashHead(FeatureHead):
    """Keys as published: `fc`, `hidden_norm`, `layers.i` as in Qwen3, `norm`; `embed_tokens`, `lm_head` perhaps.

    The matrices of keys and values are held twice: context rows need no queries, whose matrix is the larger one.
    """

    def __init__(
        self, config: DFlashConfig, weights: WeightReader, target: DecoderModel, drafts: Tensor | None
    ) -> None:
        made = config.architecture
        super().__init__(made, weights, target, drafts=drafts)
        below, width = weights.below("model."), made.width
        self.fc = below.matrix({"fc": width}, len(config.places) * width, has_bias=False)
        self.hidden_norm = norm_of(made.norm, below, "hidden_norm", width)
        mixers: list[Any] = [layer.mixer for layer in made.layers]
        self.keys_and_values = nn.ModuleList(
            below.below(f"layers.{i}.self_attn.").matrix(
                dict.fromkeys(("k_proj", "v_proj"), mixer.sizes[1]), width, has_bias=mixer.qkv_bias
            )
            for i, mixer in enumerate(mixers)
        )
        self.config = config

    def project(self, features: Tensor) -> Tensor:
        """The target's features `[n, places * width]`, fused: `[n, width]`."""
        return cast("Tensor", self.hidden_norm(self.fc(features.to(self.dtype))))

    def keep(self, features: Tensor, ragged: Ragged) -> None:
        """Write each layer's keys and values of fused features `[T, width]`."""
        turned = self.rotations.of(ragged.batch.position_ids, self.dtype, len(self.layers))
        for layer, matmul, rotary in zip(self.layers, self.keys_and_values, turned, strict=True):
            cast("Any", layer).mixer.write(matmul(features), rotary, ragged)

    def fill_in(self, causal: Ragged, mutual: Ragged) -> Tensor:
        """The outputs `[R, width]` of a batch's last rows; layers that are not causal run over `mutual`."""
        batch = causal.batch
        x = self.ends[0](batch.input_ids).to(self.dtype)[None]
        turned = self.rotations.of(batch.position_ids, self.dtype, len(self.layers))
        for layer, rotary, is_causal in zip(self.layers, turned, self.config.is_causal, strict=True):
            x = layer(x, rotary, causal if is_causal else mutual)
        assert self.norm is not None
        return cast("Tensor", self.norm(x[0][batch.logit_rows]))


def load_dflash(name: str, revision: str | None, target: DecoderModel) -> Head:
    """A draft of a local folder or a hub id, in the authors' form or that of `speculators`.

    On a CPU it computes in its own type where our C multiplies that, else in the target's. A target may be in a wider
    type to keep its tokens what they are. No bit of a draft decides a token, and half the bytes are read in half the
    time.

    Raises:
        ModelError: it is no DFlash draft, is of a kind that is not served, or does not fit this target.
    """
    written, tensors = load_checkpoint(name, revision)
    config = read_dflash_config(name, written, target, tensors)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in _UNUSED}
    offsets, made = tensors.pop("d2t", None), config.architecture
    tokens = None if offsets is None else _tokens(name, offsets, config)
    if config.draft_vocab != made.vocab_size and (tokens is None or HEAD not in tensors):
        raise ModelError(f"{name!r} drafts {config.draft_vocab} tokens; expected d2t and lm_head.weight to say which")
    width = made.width
    own = {"fc.weight": (width, len(config.places) * width), "hidden_norm.weight": (width,)}
    reader = reader_of(made, tensors, target, name, own | {HEAD: (config.draft_vocab, width)})
    stored = tensors["fc.weight"].dtype
    dtype = stored if target.device.type == "cpu" and multiplies(stored) else target.dtype
    head = DFlashHead(config, replace(reader, dtype=dtype), target, tokens)
    return head.over(config.places, DFlashRunner, DFlashProposer)


def _tokens(name: str, offsets: Tensor, config: DFlashConfig) -> Tensor:
    """The target's token for each that the draft knows, `[draft vocab]`."""
    tokens = target_ids(offsets, config.draft_vocab, config.architecture.vocab_size)
    if tokens is None:
        raise ModelError(f"{name!r}: d2t does not map {config.draft_vocab} draft tokens to as many of the target's")
    return tokens


class DFlashRunner(HeadRunner):
    """The draft over an arena of its own."""

    head: DFlashHead

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """Keep keys and values of fused features `[T, width]` at the rows of `feeds`; returns those at the last rows.

        No row sees another one here: a context row is projected, and never asks.
        """
        batch = RaggedBatch.of(feeds, self.arena.page_size, features.device)
        self.head.keep(features, Ragged(batch, self.arena, self.attend))
        return features[batch.logit_rows]

    def fill_in(self, feeds: Seq[Feed]) -> Tensor:
        """Run blocks of the newest token and masks, each after its context; the outputs `[R, width]` of the masks."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self.arena.k[0].device)
        mutual = partial(attend_bidirectionally, self.attend)
        return self.head.fill_in(*(Ragged(batch, self.arena, attend) for attend in (self.attend, mutual)))


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
        self._draft, self._config = draft, draft.head.config
        self.most_drafts = self._config.block - 1

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Catch up on the target's features, within the token budget; then all drafts of those that have."""
        chains = chains_of(sequences, [min(k, self._config.block - 1) for k in k_each])
        read: list[Forward] = []
        ready, _ = self._catch_up([chain for chain in chains if chain.k], read)
        # What one round leaves to read belongs to the pass of the block; a prompt is reading of its own.
        forwards = [one for one in read if not ready or one.tokens > self._config.block * one.sequences]
        if ready:
            self._draw_block(ready)
            forwards.append(Forward("draft", len(ready), sum(chain.k + 1 for chain in ready)))
        return proposal_of(chains, forwards)

    def _draw_block(self, chains: list[Chain]) -> None:
        """Draw all drafts of each chain, those of one depth together: processors see what was drawn before."""
        feeds = []
        for chain in chains:
            cursor, block = chain.sequence.draft, [chain.sequence.tokens[-1], *[self._config.mask] * chain.k]
            feeds.append(Feed(block, cursor.kv_len, cursor.page_table, chain.k))
        logits = self._draft.logits(self._draft.fill_in(feeds))
        first = list(accumulate((chain.k for chain in chains), initial=0))
        for depth in range(max(chain.k for chain in chains)):
            deep = [i for i, chain in enumerate(chains) if chain.k > depth]
            draw([chains[i] for i in deep], logits[[first[i] + depth for i in deep]])

    def _grow(self, chains: list[Chain], hidden: Tensor) -> tuple[list[Chain], Tensor]:
        """A feature alone makes no draft: the chains that are fed to their end go on to their blocks as they are."""
        return chains, hidden
