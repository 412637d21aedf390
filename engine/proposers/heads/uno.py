"""Drafts with the target itself and a low-rank adapter (Uno: Sahoo et al. 2026, arXiv 2609.04010).

One pass of the target makes all drafts of a sequence. It is fed the newest token, as in plain decoding, and after it
K - 1 tokens of noise: random ids, at the positions of the tokens that are to be guessed. Attention is causal. Only the
rows of noise have the adapter, which was trained so that a row predicts, from the text before it, the token after its
position, for any token fed there. For drafts A B C of a text x y:

    fed       y               noise           noise
    at        y's place       A's place       B's place
    weights   the target's    with adapter    with adapter
    predicts  A               B               C

The first draft is the target's own next token. The keys and values of the noise are beyond the cursor, like those of
rejected drafts, and the next verification overwrites them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.adapters.peft import CONFIG, WEIGHTS
from pilotfish.engine.model.checkpoint import as_model_error, shape_of
from pilotfish.engine.model.published.files import folder_of
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.proposers.chain import Chain, ChainProposer, extend_at_once
from pilotfish.engine.proposers.heads.base import Head, HeadContext
from pilotfish.engine.recurrent.arena import parts_of
from pilotfish.engine.sampling.distribution import signed
from pilotfish.engine.sampling.noise import Stream, uniform
from pilotfish.engine.stats import Forward
from pilotfish.engine.types import Adapter

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel

INNER = "adapter"  # its folder in a checkpoint with the base model, such as s-sahoo/uno-qwen3-8B
_LOWEST = 1  # first token id of noise, in training and in the authors' engine


def load_uno(name: str, revision: str | None, target: DecoderModel) -> Head:
    """An adapter from a local folder or a hub id, in PEFT format, with which the target drafts.

    Raises:
        ModelError: there is none, or this target is not supported.
    """
    if parts_of(target):
        kind = type(target).__name__
        raise ModelError(f"uno: {kind} has recurrent layers, which are not supported")
    noise = _noise_ids(target)

    def proposer(context: HeadContext) -> UnoProposer:
        assert context.adapter is not None, "it has one"
        return UnoProposer(context.target, context.adapter, noise)

    return Head((), None, proposer, adapter_folder(name, revision))


def adapter_folder(name: str, revision: str | None) -> Path:
    """The folder of the adapter: the local folder or hub id itself, or `adapter` in it.

    Raises:
        ModelError: the hub has no such id.
    """
    patterns = [path for file in (CONFIG, WEIGHTS) for path in (file, f"{INNER}/{file}")]
    with as_model_error(name):
        folder = folder_of(name, revision, *patterns)
    inner = folder / INNER
    return inner if (inner / CONFIG).is_file() and not (folder / CONFIG).is_file() else folder


def _noise_ids(target: DecoderModel) -> range:
    """The token ids of noise: those below the config's mask token, or else all but the first.

    No published adapter contains the range. The authors draw below the first unused id of the tokenizer; if a config
    does not have it (`mask_token_id`), ids that only pad the embedding are also drawn, as in vLLM and SGLang.
    """
    vocab = shape_of(target.config, "vocab_size")
    config = target.config.get_text_config()
    mask = getattr(config, "mask_token_id", None)
    if mask is None:
        return range(_LOWEST, vocab)
    if type(mask) is not int or not _LOWEST < mask <= vocab:
        raise ModelError(f"uno: mask_token_id of the target is {shown(mask)}; expected 2 to {vocab}")
    return range(_LOWEST, mask)


class UnoProposer(ChainProposer):
    """Drafts in a pass of the target with rows of noise, which have `adapter`; `noise`: their token ids.

    A sequence with its own adapter feeds its newest token with that adapter, so its first draft is also right. A row
    has at most one adapter: the noise has only the draft's.
    """

    is_parallel = True

    def __init__(self, target: Runner, adapter: Adapter, noise: range) -> None:
        self._target, self._adapter, self._noise = target, adapter, noise

    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """All drafts from one pass; draft i is drawn from row i of its sequence."""
        if not chains:
            return
        noise = self._draw_noise(chains)
        feeds = [feed for chain, ids in zip(chains, noise, strict=True) for feed in self._feeds(chain, ids)]
        logits = self._target.forward(feeds)
        extend_at_once(chains, logits)
        forwards.append(Forward("draft", len(chains), len(logits)))

    def _feeds(self, chain: Chain, noise: list[int]) -> list[Feed]:
        """The newest token, and the noise after it: two feeds, because their adapters differ.

        All rows of a layer are written before any attends, so the noise sees the newest token.
        """
        sequence, cursor = chain.sequence, chain.sequence.target
        newest, own = len(sequence.tokens) - 1, sequence.adapter
        assert cursor.kv_len == newest, "all but the newest token has been fed"
        number = 0 if own is None else own.number
        feeds = [Feed(sequence.tokens[newest:], newest, cursor.page_table, 1, cursor.table, adapter=number)]
        if noise:
            beyond = Feed(noise, newest + 1, cursor.page_table, len(noise), cursor.table, adapter=self._adapter.number)
            feeds.append(beyond)
        return feeds

    def _draw_noise(self, chains: list[Chain]) -> list[list[int]]:
        """K - 1 ids for each chain, which depend only on seed and position, so requests are reproducible."""
        spans = [range(len(chain.sequence.tokens), len(chain.sequence.tokens) + chain.k - 1) for chain in chains]
        pairs = zip(chains, spans, strict=True)
        places = [(signed(chain.sequence.seed), position) for chain, span in pairs for position in span]
        if not places:
            return [[] for _ in chains]
        seed, position = torch.tensor(places).unbind(1)
        size = len(self._noise)
        drawn = (uniform(seed, position, Stream.FILLER) * size).long().clamp_(max=size - 1) + self._noise.start
        ids = iter(drawn.tolist())
        return [[next(ids) for _ in span] for span in spans]
