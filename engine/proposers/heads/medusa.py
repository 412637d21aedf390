"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state, each for one position ahead.

Chains only, one token per head. Each head drafts independently of those before it, so it is cheap, and less accurate
with depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.shapes import Shapes
from pilotfish.engine.model.decoder.stack import FINAL, Tap
from pilotfish.engine.proposers.base import Passed
from pilotfish.engine.proposers.chain import Chain, ChainProposer, extend
from pilotfish.engine.proposers.heads.base import Head
from pilotfish.engine.proposers.heads.features import Features
from pilotfish.engine.proposers.heads.layers import sizes_of
from pilotfish.engine.proposers.heads.weights import check_fits, load_checkpoint, matrix_shapes
from pilotfish.engine.stats import Forward
from pilotfish.engine.types import Sequence

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel


def load_medusa(name: str, revision: str | None, target: DecoderModel) -> Head:
    """Heads from a local folder or a hub id, in the target's type and on its device.

    Raises:
        ModelError: they are not Medusa heads, or not for this target.
    """
    config, stored = load_checkpoint(name, revision)
    heads, blocks = (_number(config, key, name) for key in ("medusa_num_heads", "medusa_num_layers"))
    tensors, (width, vocab) = {key.removeprefix("medusa_head."): t for key, t in stored.items()}, sizes_of(target)
    wanted: Shapes = {}
    for i in range(heads):
        for j in range(blocks):
            wanted |= matrix_shapes(f"{i}.{j}.linear", width, width, has_bias=True)
        if f"0.{blocks}.weight" in tensors:
            wanted |= matrix_shapes(f"{i}.{blocks}", vocab, width, has_bias=False)
    check_fits(wanted, tensors, name)
    made = MedusaHeads(heads, blocks, {key: tensor.to(target.device, target.dtype) for key, tensor in tensors.items()})
    matrix = target.get_output_embeddings()
    return Head((FINAL,), None, lambda context: MedusaProposer(made, matrix, context.tap))


def _number(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name!r}: config.json has {key} {value!r}; expected a positive number")
    return value


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Keys as published: `i.j.linear.weight`, `i.j.linear.bias` for block j of head i, then `i.{blocks}.weight`.

    The last is the head's own output matrix; if it is missing, all heads share the target's.
    """

    number: int
    blocks: int
    tensors: Mapping[str, Tensor]

    def logits(self, head: int, features: Tensor, output: nn.Module) -> Tensor:
        """float32 `[rows, vocab]` for the token `head + 2` positions after that of `features` `[rows, hidden]`.

        A block is x + SiLU(linear(x)), section 2.1.1.
        """
        for j in range(self.blocks):
            weight, bias = (self.tensors[f"{head}.{j}.linear.{kind}"] for kind in ("weight", "bias"))
            features = features + silu(linear(features, weight, bias))
        own = self.tensors.get(f"{head}.{self.blocks}.weight")
        made: Tensor = output(features) if own is None else linear(features, own)
        return made.float()


class MedusaProposer(ChainProposer):
    """Reads the hidden state from which the newest token was drawn; head i draws draft i."""

    def __init__(self, heads: MedusaHeads, output: nn.Module, tap: Tap) -> None:
        self._heads, self._output, self.tap = heads, output, tap
        self.most_drafts = heads.number
        self.features: WeakKeyDictionary[Sequence, Features] = WeakKeyDictionary()

    def observe(self, passed: Seq[Passed]) -> None:
        """Keep the rows from which a next token may be drawn; verification selects one of them."""
        for p in passed:
            self.features.pop(p.sequence, None)  # drop stale rows even if this fails
        hidden = self.tap.read((FINAL,))
        assert hidden is not None, "the target has not run"
        for p in passed:
            if p.feed.num_logits:
                start = p.feed.kv_len - p.feed.num_logits
                features = self.features[p.sequence] = Features()
                features.take(start, hidden[p.rows_from(start)])

    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """One token per head and sequence; none if the hidden state is unknown."""
        known = [(chain, row) for chain in chains if (row := self._newest(chain)) is not None]
        if not known:
            return
        active, features = [chain for chain, _ in known], torch.stack([row for _, row in known])
        for head in range(self._heads.number):
            rows = [i for i, chain in enumerate(active) if chain.k > head]
            if rows:
                logits = self._heads.logits(head, features[rows], self._output)
                extend([active[i] for i in rows], logits)
                forwards.append(Forward("draft", len(rows), len(rows)))

    def _newest(self, chain: Chain) -> Tensor | None:
        """The hidden state of the position before the newest token's: the newest token itself has never been fed."""
        features, position = self.features.get(chain.sequence), len(chain.sequence.tokens) - 2
        if features is None or not features.first <= position < features.stop:
            return None
        return features.rows[position - features.first]
