"""Maps the vocabulary of a draft to the target's.

Tokens are matched by their bytes, special ones by their role. Each target token is fed to the draft as exactly one
draft token, so positions are equal; the draft's logits are returned in the order of the target's ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.text.spelling import Spelling

# Word frequencies fall as 1/rank: of 50,000 tokens the most frequent tenth makes up four fifths of text. With a smaller
# overlap most drafts would be impossible.
LEAST_SHARED = 0.1  # minimum share of the target's tokens with text
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The vocabulary of one checkpoint. `width`: of its logits, which may be padded."""

    name: str
    width: int
    ids: Mapping[str, int]  # ids by the tokenizer's spelling; empty without a tokenizer
    texts: Mapping[int, bytes]  # the ordinary tokens
    specials: Mapping[int, str]  # the others
    begin: int | None
    end: int | None

    @classmethod
    def of(
        cls, name: str, width: int, tokenizer: Tokenizer | None, begin: int | None, ends: Iterable[int]
    ) -> DraftVocabulary:
        """Read a tokenizer; `begin` and `ends`: ids of these roles in the model's config."""
        if tokenizer is None:
            return cls(name, width, {}, {}, {}, None, None)
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i < width}
        specials = {i: token.content for i, token in added.items() if token.special}
        end = min((i for i in ends if i < width), default=None)
        begin = begin if begin is not None and begin < width else None
        if isinstance(tokenizer.model, models.WordPiece) or isinstance(tokenizer.decoder, decoders.WordPiece):
            raise ModelError(
                f"model {name!r} has a WordPiece tokenizer, which is not supported: its tokens do not preserve spaces"
            )
        spelling = Spelling(tokenizer)
        pieces = {i: piece for piece, i in tokenizer.get_vocab(with_added_tokens=False).items() if i < width}
        texts = {i: text for i in pieces if (text := spelling.bytes_of(i)) is not None}
        texts |= {i: token.content.encode() for i, token in added.items()}
        characters = {piece for piece in pieces.values() if len(piece) == 1}
        for i, piece in pieces.items():
            if i in specials or i in (begin, end) or _is_spare(piece, characters):
                texts.pop(i, None)
        texts = {i: text for i, text in texts.items() if i not in specials}
        return cls(name, width, tokenizer.get_vocab(), texts, specials, begin, end)


@dataclass(frozen=True, slots=True)
class VocabMap:
    """The map of a draft with `draft_width` logits: both tuples have an entry per target id."""

    draft_of: tuple[int, ...]  # the fed draft token
    column_of: tuple[int, ...]  # the index of the draft's logit; -1: none
    draft_width: int
    num_tokens: int  # the target's tokens with text

    @property
    def num_shared(self) -> int:
        """Target tokens that the draft can propose."""
        return sum(column != _ABSENT for column in self.column_of)

    @classmethod
    def between(cls, target: DraftVocabulary, draft: DraftVocabulary) -> VocabMap | None:
        """The map, or None if equal ids are equal tokens.

        If a tokenizer is missing, equal widths are assumed to mean equal tokens.

        Raises:
            ModelError: widths differ and a tokenizer is missing, or too few tokens are shared.
        """
        if not (target.ids and draft.ids):
            if target.width == draft.width:
                return None
            raise ModelError(
                f"draft {draft.name!r} has {draft.width} tokens and target {target.name!r} {target.width}; "
                f"mapping them requires a tokenizer.json in {(draft if target.ids else target).name!r}"
            )
        if target.ids == draft.ids:
            if target.width == draft.width:
                return None
            # Logits are padded to unequal widths: ids beyond the narrower one are unused.
            ids, beyond = tuple(range(min(target.width, draft.width))), max(0, target.width - draft.width)
            return cls(ids + (0,) * beyond, ids + (_ABSENT,) * beyond, draft.width, target.width)
        column_of = _columns(target, draft)
        found = cls(_fed(target, draft, column_of), column_of, draft.width, max(len(target.texts), 1))
        least = int(LEAST_SHARED * found.num_tokens) + 1
        if found.num_shared < least:
            raise ModelError(
                f"draft {draft.name!r} shares {found.num_shared} of the {found.num_tokens} tokens of target "
                f"{target.name!r}; expected at least {least}, because its drafts would rarely be accepted"
            )
        return found


class MappedRunner:
    """A draft's runner with target ids as inputs and outputs."""

    def __init__(self, draft: Runner, vocab: VocabMap, device: torch.device) -> None:
        assert draft.vocab_size == vocab.draft_width, "a map of other models"
        self._draft, self._vocab = draft, vocab
        self.vocab_size = len(vocab.column_of)
        columns = torch.tensor(vocab.column_of, device=device)
        self._columns, self._absent = columns.clamp(min=0), columns == _ABSENT  # [target vocab]

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Float32 logits `[R, target vocab]`; -inf for tokens that the draft does not have."""
        draft_of = self._vocab.draft_of
        translated = [replace(feed, tokens=[draft_of[token] for token in feed.tokens]) for feed in feeds]
        logits = self._draft.forward(translated)
        return logits[:, self._columns].masked_fill_(self._absent, float("-inf"))


def _columns(target: DraftVocabulary, draft: DraftVocabulary) -> tuple[int, ...]:
    """The draft's logit for each target token, each used once: by end role, then by equal id, then by text."""
    columns, used = [_ABSENT] * target.width, set()
    for ours, theirs in _pairs(target, draft):
        if columns[ours] == _ABSENT and theirs not in used:
            columns[ours] = theirs
            used.add(theirs)
    return tuple(columns)


def _pairs(target: DraftVocabulary, draft: DraftVocabulary) -> Iterator[tuple[int, int]]:
    if target.end is not None and draft.end is not None:
        yield target.end, draft.end
    yield from ((i, i) for i, text in target.texts.items() if draft.texts.get(i) == text)
    by_text = {text: i for i, text in draft.texts.items()}
    yield from ((i, by_text[text]) for i, text in target.texts.items() if text in by_text)
    # Special tokens with a role are never matched by name: `<s>` begins texts in one family and ends them in another.
    with_role = {target.begin, target.end}, {draft.begin, draft.end}
    by_name = {name: i for i, name in draft.specials.items() if i not in with_role[1]}
    named = ((i, name) for i, name in target.specials.items() if i not in with_role[0])
    yield from ((i, by_name[name]) for i, name in named if name in by_name)


def _fed(target: DraftVocabulary, draft: DraftVocabulary, column_of: Seq[int]) -> tuple[int, ...]:
    """One draft token for every target token: its counterpart, or one with the same ending, or an unused token."""
    nothing = next((i for i in (draft.begin, draft.end) if i is not None), 0)
    by_text = {text: i for i, text in draft.texts.items()}
    fed = []
    for token, column in enumerate(column_of):
        if token == target.begin and draft.begin is not None:
            fed.append(draft.begin)  # if one token both begins and ends texts, it is the beginning in a context
        elif column != _ABSENT:
            fed.append(column)
        else:
            text = target.texts.get(token, b"")  # the next token depends most on the end of the text
            endings = (text[start:] for start in range(len(text)))
            fed.append(next((by_text[ending] for ending in endings if ending in by_text), nothing))
    return tuple(fed)


def _is_spare(piece: str, characters: set[str]) -> bool:
    """Whether this is a byte token such as `<0x41>` of a character that has its own token, so that it is never used."""
    found = _BYTE_TOKEN.fullmatch(piece)
    return found is not None and chr(int(found[1], 16)) in characters and int(found[1], 16) < 0x80
