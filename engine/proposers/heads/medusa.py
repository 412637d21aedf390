"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each a place further on.

Chains only, one token per head. Each head guesses without knowing what those before it guessed, so it costs next to
nothing and is right less often the deeper it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.errors import ModelError
from engine.model.linear.rows import matmul_shape
from engine.model.tap import FINAL, Tap
from engine.proposers.base import Passed, Proposal, Proposer
from engine.proposers.chain import Chain, chains_of, draw, proposal_of
from engine.proposers.heads.base import Head
from engine.proposers.heads.features import Features
from engine.proposers.heads.weights import fill, load_checkpoint, number
from engine.stats import Forward
from engine.types import Sequence

if TYPE_CHECKING:
    from engine.model.decoder.decoder import DecoderModel


class _Residual(nn.Module):
    """x + SiLU(linear(x)), section 2.1.1."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Keys as published: `i.j.linear.weight`, `i.j.linear.bias` for block j of head i, then `i.{blocks}.weight`.

    The last is an output matrix of the head's own; where it is not stored, all heads share the target's.
    """

    def __init__(self, heads: int, blocks: int, hidden: int, vocab_size: int | None) -> None:
        own = [] if vocab_size is None else [vocab_size]
        super().__init__(
            nn.Sequential(*(_Residual(hidden) for _ in range(blocks)), *(nn.Linear(hidden, v, bias=False) for v in own))
            for _ in range(heads)
        )
        self.has_own_output = vocab_size is not None

    def logits(self, head: int, features: Tensor, output: nn.Module) -> Tensor:
        """float32 `[rows, vocab]` for the token `head + 2` places after that of `features` `[rows, hidden]`."""
        made = self[head](features)
        return cast("Tensor", (made if self.has_own_output else output(made)).float())


def load_medusa(name: str, revision: str | None, target: DecoderModel) -> Head:
    """Heads of a local folder or a hub id, in the target's type and place.

    Raises:
        ModelError: they are no Medusa heads, or not of this target.
    """
    config, tensors = load_checkpoint(name, revision)
    heads, blocks = number(config, "medusa_num_heads", name), number(config, "medusa_num_layers", name)
    output = matmul_shape(target.get_output_embeddings())
    if output is None:
        raise ModelError(f"{type(target).__name__}: its output is no matrix that heads could share")
    tensors = {key.removeprefix("medusa_head."): tensor for key, tensor in tensors.items()}
    own = f"0.{blocks}.weight" in tensors
    made = MedusaHeads(heads, blocks, output[0], output[1] if own else None)
    fill(made, tensors, name)
    made = made.to(target.device, target.dtype).eval()
    matrix = target.get_output_embeddings()
    return Head((FINAL,), None, lambda context: MedusaProposer(made, matrix, context.tap))


class MedusaProposer(Proposer):
    """Reads the hidden state that the newest token came from; head i draws the draft i places after that token."""

    def __init__(self, heads: MedusaHeads, output: nn.Module, tap: Tap) -> None:
        self._heads, self._output, self.tap = heads, output, tap
        self.most_drafts = len(heads)
        self.features: WeakKeyDictionary[Sequence, Features] = WeakKeyDictionary()

    def observe(self, passed: Seq[Passed]) -> None:
        """Keep the rows that a next token may come from: after verification one of them is the right one."""
        for p in passed:
            self.features.pop(p.sequence, None)  # what cannot be replaced must not be met again
        hidden = self.tap.read((FINAL,))
        assert hidden is not None, "the target has not run"
        for p in passed:
            if p.feed.num_logits:
                start = p.feed.kv_len - p.feed.num_logits
                features = self.features[p.sequence] = Features()
                features.take(start, hidden[p.rows_from(start)])

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """One token per head and sequence; none where the hidden state is not known."""
        chains = chains_of(sequences, k_each)
        known = [(chain, row) for chain in chains if (row := self._newest(chain)) is not None]
        if not known:
            return proposal_of(chains, ())
        active, features = [chain for chain, _ in known], torch.stack([row for _, row in known])
        forwards: list[Forward] = []
        for head in range(len(self._heads)):
            rows = [i for i, chain in enumerate(active) if chain.k > head]
            if rows:
                logits = self._heads.logits(head, features[rows], self._output)
                draw([active[i] for i in rows], logits)
                forwards.append(Forward("draft", len(rows), len(rows)))
        return proposal_of(chains, forwards)

    def _newest(self, chain: Chain) -> Tensor | None:
        """The hidden state of the position before the newest token's: the newest token itself has never been fed."""
        features, position = self.features.get(chain.sequence), len(chain.sequence.tokens) - 2
        if features is None or not features.first <= position < features.stop:
            return None
        return features.rows[position - features.first]
