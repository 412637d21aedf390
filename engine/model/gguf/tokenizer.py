"""The tokenizer in a GGUF file, its special tokens and its chat template.

A file contains a vocabulary, merges or scores, and the name of the pre-tokenizer. The rest follows from the kind of
tokenizer, by llama.cpp's names (`llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.model.gguf.container import Container, Strings

_Array = np.ndarray[Any, Any]
_NONE = (None, "none", "no_vocab")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
# Above the maxima of published vocabularies (256 bytes of a token, 2.3 MB of text, 2.2 merges per token, 0.7 MB of
# added tokens for speech), because a small file could otherwise take minutes and all memory.
_LONGEST_TOKEN, _MOST_TEXT, _MOST_MERGES, _MOST_ADDED = 1 << 9, 1 << 22, 8, 1 << 20
_CHAR_BITS, _ID_BITS = 21, 31  # of a character's number, and of a token's
_IDS = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")}
_SPACE = "▁"  # the space in vocabularies of SentencePiece
# Texts of control tokens that end a turn; few files list them as end tokens.
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
_HARMONY = frozenset({"<|return|>", "<|call|>"})  # gpt-oss; its `<|end|>` ends only one of several messages

_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_4O = _CASED.replace("|", f"{_SHORT_FORMS}?|") + f"{_SHORT_FORMS}?"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True, slots=True)
class _Rule:
    """The pre-tokenization of a byte-level tokenizer."""

    pattern: str | None = None  # one piece per match; None: GPT-2's pattern
    digits: bool = False  # each digit is first split into a separate piece
    whole_words: bool = False  # a piece that is a token is not merged
    begins: bool = False  # default of the flag to begin texts with the first token

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")] if self.digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)]
        )


_LLAMA3 = _Rule(rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}")
_LLAMA3_WHOLE = _Rule(_LLAMA3.pattern, whole_words=True, begins=True)
_SEED = _Rule(rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")
_QWEN2 = _Rule(rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}")
_GPT4O = _Rule(rf"{_CASED_4O}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}")
_TEKKEN = _Rule(rf"{_CASED}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}", whole_words=True, begins=True)
# By `tokenizer.ggml.pre`.
_RULES = (
    dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _Rule())
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Rule(digits=True))
    | dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral"), _LLAMA3_WHOLE)
    | dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "smaug-bpe"), _LLAMA3)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2)
    | dict.fromkeys(("gpt-4o", "llama4"), _GPT4O)
    | {"seed-coder": _SEED, "tekken": _TEKKEN}
)


def check_tokens(container: Container) -> None:
    """Compare the tokens of a file with its embedding, and bound their texts.

    Raises:
        ModelError: the numbers of tokens and rows differ, a token is too long, or a special token is invalid.
    """
    key, path = "tokenizer.ggml.tokens", container.path
    tokens, embedding = container.get(key, Strings), container.tensors.get("token_embd.weight")
    count = len(tokens or ()) if embedding is None else embedding.shape[0]
    if tokens is not None:
        if len(tokens) != count:
            raise ModelError(f"{path}: {key} has {len(tokens)} tokens; token_embd.weight has {count} rows")
        sizes = tokens.sizes()
        longest = int(sizes.argmax()) if len(sizes) else 0
        if len(sizes) and sizes[longest] > _LONGEST_TOKEN:
            raise ModelError(f"{path}: {key}[{longest}] has {sizes[longest]} bytes; expected at most {_LONGEST_TOKEN}")
        if sizes.sum() > _MOST_TEXT:
            raise ModelError(f"{path}: {key} has {sizes.sum()} bytes; expected at most {_MOST_TEXT}")
    for key in _IDS.values():
        found = container.get(key, int)
        if found is not None and not 0 <= found < count:
            raise ModelError(f"{path}: {key} is {found}; expected a token id below {count}")


def tokenizer_in(container: Container) -> Tokenizer | None:
    """The tokenizer of a file, or None. Raises ModelError if it is invalid or not supported."""
    kind, whole = container.get("tokenizer.ggml.model", str), container.get("tokenizer.huggingface.json", str)
    if kind is None and whole is None and container.strings("tokenizer.ggml.tokens"):
        raise ModelError(f"{container.path} has tokenizer.ggml.tokens but no tokenizer.ggml.model")
    if whole is None and kind in _NONE:
        return None
    with tokenizer_faults(container.path):
        if whole is not None:
            return Tokenizer.from_str(whole)
        vocabulary = _Vocabulary.of(container)
        if kind == "gpt2":
            return _byte_level(container, vocabulary)
        if kind == "llama":
            return _of_pieces(container, vocabulary)
    raise ModelError(f"{container.path}: tokenizer.ggml.model is {shown(kind)}; expected gpt2 or llama")


@contextmanager
def tokenizer_faults(path: Path) -> Iterator[None]:
    """Convert any error while a tokenizer is built to a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # the tokenizers library raises bare Exception, and BaseException if it panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"cannot read the tokenizer of {path}: {error}") from error


def chat_template_in(container: Container) -> str | None:
    """The chat template of a file; None if it has none."""
    return container.get("tokenizer.chat_template", str)


def special_tokens_in(container: Container) -> dict[str, str]:
    """Texts of the special tokens that a chat template may use: `bos_token`, `eos_token`."""
    tokens = container.strings("tokenizer.ggml.tokens")
    ids = {f"{name}_token": container.get(_IDS[name], int) for name in ("bos", "eos")}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def end_tokens_in(container: Container) -> list[int]:
    """The end tokens: those of the metadata, and known ends of turns."""
    ids = (container.get(_IDS[name], int) for name in ("eos", "eot", "eom"))
    found, tokens = {i for i in ids if i is not None}, container.strings("tokenizer.ggml.tokens")
    if container.get("tokenizer.ggml.model", str) in _NONE or not tokens:
        return sorted(found)
    control = {tokens[i]: i for i in np.flatnonzero(_types(container, tokens) == _CONTROL).tolist()}
    ends = _ENDS - {"<|end|>"} | _HARMONY if control.keys() >= _HARMONY else _ENDS
    return sorted(found | {i for text, i in control.items() if text in ends})


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens in the order of their ids, and their types."""

    tokens: list[str]
    kinds: _Array
    ids: dict[str, int]

    @classmethod
    def of(cls, container: Container) -> _Vocabulary:
        check_tokens(container)
        stored = container.get("tokenizer.ggml.tokens", Strings)
        if not stored:
            raise ModelError(f"{container.path} has no tokenizer.ggml.tokens")
        kinds = _types(container, stored)
        added = int(stored.sizes()[np.isin(kinds, (_CONTROL, _USER_DEFINED))].sum())
        if added > _MOST_ADDED:
            size = f"tokens of types {_CONTROL} and {_USER_DEFINED} have {added} bytes"
            raise ModelError(f"{container.path}: {size}; expected at most {_MOST_ADDED}")
        tokens = list(stored)
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) < len(tokens):
            first, text = next((i, text) for i, text in enumerate(tokens) if ids[text] != i)
            twice = f"{first} and {ids[text]} are both {shown(text)}"
            raise ModelError(f"{container.path}: tokenizer.ggml.tokens {twice}; expected unique tokens")
        return cls(tokens, kinds, ids)

    def respell(self, texts: Mapping[str, str]) -> None:
        """Respell some tokens; of two with equal spelling the last is kept, as in a dict."""
        for text in texts.keys() & self.ids.keys():
            i, new = self.ids.pop(text), texts[text]
            self.tokens[i], self.ids[new] = new, max(i, self.ids.get(new, i))

    def of_kind(self, kind: int) -> list[str]:
        return [self.tokens[i] for i in np.flatnonzero(self.kinds == kind).tolist()]

    def add_to(self, made: Tokenizer) -> None:
        """Add control tokens and user-defined tokens, which are matched before pre-tokenization."""
        made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in self.of_kind(_CONTROL)])
        made.add_tokens([AddedToken(t, normalized=False) for t in self.of_kind(_USER_DEFINED)])


def _types(container: Container, tokens: Sized) -> _Array:
    """The types of tokens; all normal if the file has none."""
    found = container.get("tokenizer.ggml.token_type", np.ndarray)
    found = np.ones(len(tokens), np.int32) if found is None else found
    if len(found) != len(tokens) or found.dtype.kind not in "iu":
        raise ModelError(f"{container.path} has {len(tokens)} tokens; token types are {len(found)} {found.dtype}")
    return found


def _byte_level(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """A byte-level tokenizer, with bytes spelt as printable characters as in GPT-2."""
    name = container.get("tokenizer.ggml.pre", str)
    if name not in _RULES:
        raise ModelError(f"{container.path}: tokenizer.ggml.pre is {shown(name)}; expected one of {', '.join(_RULES)}")
    rule, stored = _RULES[name], container.strings("tokenizer.ggml.merges")
    places = sum(map(len, vocabulary.tokens))
    _check_merges(container, len(stored), len(vocabulary.tokens))
    if not stored and not rule.whole_words and places > len(vocabulary.tokens):
        raise ModelError(f"{container.path} has no tokenizer.ggml.merges, but tokens of several bytes")
    merges = [merge.partition(" ")[::2] for merge in stored]
    made = Tokenizer(BPE(vocabulary.ids, merges, ignore_merges=rule.whole_words))
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    vocabulary.add_to(made)
    _begin(container, vocabulary, made, otherwise=rule.begins)
    return made


def _of_pieces(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """A SentencePiece tokenizer, with a special character for spaces and byte fallback."""
    family = container.get("general.architecture", str) or ""
    unknown = next(iter(vocabulary.of_kind(_UNKNOWN)), None)
    scores = container.get("tokenizer.ggml.scores", np.ndarray)
    if family.startswith("gemma"):  # tokens of blanks are written with real spaces, and ids have the order of merges
        vocabulary.respell({" " * size: _SPACE * size for size in range(1, _LONGEST_TOKEN + 1)})
        scores = -np.arange(len(vocabulary.tokens))
    if scores is None or len(scores) != len(vocabulary.tokens) or not np.isfinite(scores).all():
        found = "none" if scores is None else f"{len(scores)}, of which {int(np.isfinite(scores).sum())} are finite"
        raise ModelError(f"{container.path} has {len(vocabulary.tokens)} tokens; tokenizer.ggml.scores are {found}")
    halves = merges_of(vocabulary.ids, scores)
    _check_merges(container, len(halves[0]), len(vocabulary.tokens))
    made = Tokenizer(
        BPE(vocabulary.ids, _Pairs(vocabulary.tokens, *halves), fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    leading = not family.startswith("gemma") and container.get("tokenizer.ggml.add_space_prefix", bool) is not False
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if leading else steps)
    if family.startswith("gemma"):
        made.normalizer = normalizers.Replace(" ", _SPACE)
    elif family == "phi3":
        before = [normalizers.Prepend(_SPACE)] if leading else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if leading else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    vocabulary.add_to(made)
    _begin(container, vocabulary, made, otherwise=True)
    return made


def merges_of(ids: Mapping[str, int], scores: _Array) -> tuple[_Array, _Array]:
    """The merges implied by scores: all pairs that make each token, best tokens first; as ids of both parts.

    Tokens a 0, b 0, ab -1, aba -2 -> (a, b), (ab, a). Dictionary look-ups of all prefixes and suffixes would take
    seconds for 262,144 tokens. Here all texts advance one character at a time, and equal prefixes share a number.
    """
    texts, tokens = list(ids), np.fromiter(ids.values(), np.int32)
    chars = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    sizes = np.fromiter(map(len, texts), np.int64)
    stops = np.cumsum(sizes)
    first = _names(chars, tokens, sizes, stops - sizes, 1)[:-1]  # of the part before each split
    second = _names(chars, tokens, sizes, stops - 1, -1)[1:]
    whole = np.repeat(tokens, sizes)
    cuts = np.flatnonzero((first >= 0) & (second >= 0) & (whole[1:] == whole[:-1]))
    first, second, best = first[cuts], second[cuts], -scores[whole[cuts]].astype(float)
    order = np.argsort(first.astype(np.int64) << _ID_BITS | second)
    order = order[np.argsort(best[order], kind="stable")]
    return first[order], second[order]


def _names(chars: _Array, tokens: _Array, sizes: _Array, starts: _Array, step: int) -> _Array:
    """For each character of all texts, the token equal to the text's prefix up to it; -1: none.

    Texts a, ab, b of tokens 5, 6, 7: of the characters a, ab, b -> 5, 5 6, 7. With a step of -1 texts are read
    backwards from their last characters, `starts` -> 5, 6 7, 7.
    """
    names, live = np.full(len(chars), -1, np.int32), np.flatnonzero(sizes)
    nodes = np.zeros(len(live), np.int64)  # the number of each text's current prefix
    for done in range(int(sizes.max())):
        at = starts[live] + step * done
        found, nodes = np.unique(nodes << _CHAR_BITS | chars[at], return_inverse=True)
        ends = sizes[live] == done + 1
        named = np.full(len(found), -1, np.int32)
        named[nodes[ends]] = tokens[live[ends]]
        names[at] = named[nodes]
        live, nodes = live[~ends], nodes[~ends]
    return names


class _Pairs(Sequence[tuple[str, str]]):
    """Pairs of tokens, created lazily: half a million tuples would take as long as everything else."""

    def __init__(self, tokens: list[str], *halves: _Array) -> None:
        self._tokens, self._halves = tokens, halves

    def __len__(self) -> int:
        return len(self._halves[0])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._tokens[half[index]] for half in self._halves)

    def __iter__(self) -> Iterator[Any]:
        return zip(*(map(self._tokens.__getitem__, half.tolist()) for half in self._halves), strict=True)


def _check_merges(container: Container, count: int, num_tokens: int) -> None:
    """Limit the number of merges, of which a small file may have millions."""
    if count > _MOST_MERGES * num_tokens:
        raise ModelError(f"{container.path} has {count} or more merges; expected at most {_MOST_MERGES} per token")


def _begin(container: Container, vocabulary: _Vocabulary, made: Tokenizer, *, otherwise: bool) -> None:
    """Let texts begin with the first token if the file's flag is set; `otherwise`: the default."""
    asked, first = (
        container.get("tokenizer.ggml.add_bos_token", bool),
        container.get(_IDS["bos"], int),
    )
    if first is None or not (otherwise if asked is None else asked):
        return
    text = vocabulary.tokens[first]
    made.post_processor = TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B:1"], special_tokens=[(text, first)]
    )
