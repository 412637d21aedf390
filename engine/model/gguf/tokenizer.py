"""The tokenizer in a GGUF file, its special tokens and its chat template.

A file holds a vocabulary, merges or scores, and the name of the rule by which text is split first. What else a
tokenizer needs belongs to its kind, and llama.cpp knows it by the names (`llama-vocab.cpp`): so does this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from engine.errors import ModelError
from engine.model.gguf.container import Container

_NONE = (None, "none", "no_vocab")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_SPACE = "▁"  # stands for the space in vocabularies of SentencePiece
# Texts of control tokens that end a turn; few files name them beside the end of a text.
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
_HARMONY = frozenset({"<|return|>", "<|call|>"})  # the ends of gpt-oss, whose `<|end|>` only ends a message of several

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
    """How a byte-level tokenizer splits text before it merges."""

    pattern: str | None = None  # a piece for each match; None for GPT-2's own pattern
    digits: bool = False  # each digit is a piece of its own before that
    whole_words: bool = False  # a piece that is a token needs no merges
    begins: bool = False  # texts begin with the first token where the file does not say

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


def tokenizer_in(container: Container) -> Tokenizer | None:
    """The tokenizer of a file; None if it has none.

    Raises:
        ModelError: its kind, or its rule of splitting, is not known.
    """
    kind, whole = container.get("tokenizer.ggml.model", str), container.get("tokenizer.huggingface.json", str)
    if whole is None and kind in _NONE:
        return None
    try:
        if whole is not None:
            return Tokenizer.from_str(whole)
        vocabulary = _Vocabulary.of(container)
        if kind == "gpt2":
            return _byte_level(container, vocabulary)
        if kind == "llama":
            return _of_pieces(container, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"cannot read the tokenizer of {container.path}: {error}") from error
    raise ModelError(f"{container.path}: tokenizer.ggml.model is {kind!r}; expected gpt2 or llama")


def chat_template_in(container: Container) -> str | None:
    """The chat template of a file; None if it has none."""
    return container.get("tokenizer.chat_template", str)


def special_tokens_in(container: Container) -> dict[str, str]:
    """Texts of the special tokens that a chat template may use: `bos_token`, `eos_token`."""
    tokens = container.strings("tokenizer.ggml.tokens")
    ids = {f"{name}_token": container.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos")}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def end_tokens_in(container: Container) -> list[int]:
    """Tokens at which the model was trained to stop: those that the metadata names, and known ends of turns."""
    ids = (container.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    found = {i for i in ids if i is not None}
    if container.get("tokenizer.ggml.model", str) in _NONE:
        return sorted(found)
    kinds = container.get("tokenizer.ggml.token_type", list) or []
    typed = enumerate(zip(kinds, container.strings("tokenizer.ggml.tokens"), strict=False))
    control = {text: i for i, (kind, text) in typed if kind == _CONTROL}
    ends = _ENDS - {"<|end|>"} | _HARMONY if control.keys() >= _HARMONY else _ENDS
    return sorted(found | {i for text, i in control.items() if text in ends})


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens in the order of their ids, and their types."""

    tokens: list[str]
    kinds: list[int]

    @classmethod
    def of(cls, container: Container) -> _Vocabulary:
        tokens = container.strings("tokenizer.ggml.tokens")
        kinds = container.get("tokenizer.ggml.token_type", list) or [1] * len(tokens)
        if not tokens or len(tokens) != len(kinds):
            raise ModelError(f"{container.path} has {len(tokens)} tokens and types of {len(kinds)}")
        return cls(tokens, kinds)

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def add_to(self, made: Tokenizer) -> None:
        """Have tokens that are no text, and those that are never cut, found before anything else is done."""
        typed = list(zip(self.tokens, self.kinds, strict=True))
        made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in typed if k == _CONTROL])
        made.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _byte_level(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """A tokenizer whose tokens are bytes, spelt with printable characters as in GPT-2."""
    name = container.get("tokenizer.ggml.pre", str)
    if name not in _RULES:
        raise ModelError(f"{container.path}: tokenizer.ggml.pre is {name!r}; expected one of {', '.join(_RULES)}")
    rule = _RULES[name]
    pairs = (merge.partition(" ") for merge in container.strings("tokenizer.ggml.merges"))
    merges = [(first, second) for first, _, second in pairs]
    made = Tokenizer(BPE(vocabulary.ids, merges, ignore_merges=rule.whole_words))
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    vocabulary.add_to(made)
    _begin(container, vocabulary, made, otherwise=rule.begins)
    return made


def _of_pieces(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """A tokenizer of SentencePiece, whose spaces are a character of their own and whose other bytes are tokens."""
    family = container.get("general.architecture", str) or ""
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == _UNKNOWN), None)
    scores = container.get("tokenizer.ggml.scores", list)
    if family.startswith("gemma"):  # blank tokens are written with real spaces, and ids are in the order of merges
        blank = [_SPACE * len(t) if not t.strip(" ") else t for t in vocabulary.tokens]
        vocabulary, scores = _Vocabulary(blank, vocabulary.kinds), [-float(i) for i in range(len(blank))]
    if not scores or len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{container.path} has {len(vocabulary.tokens)} tokens and scores of {len(scores or [])}")
    made = Tokenizer(
        BPE(vocabulary.ids, _merges(vocabulary.ids, scores), fuse_unk=True, byte_fallback=True, unk_token=unknown)
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


def _merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary with scores implies: of each token any two that make it, the best tokens first.

    Tokens a 0, b 0, ab -1, aba -2 -> (a, b), (ab, a).
    """
    found = list[tuple[float, int, int, str, str]]()
    for token, i in ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                found.append((-scores[i], ids[first], ids[second], first, second))
    return [(first, second) for *_, first, second in sorted(found)]


def _begin(container: Container, vocabulary: _Vocabulary, made: Tokenizer, *, otherwise: bool) -> None:
    """Have each text begin with the first token where the file says so, or `otherwise` where it does not say."""
    asked, first = (
        container.get("tokenizer.ggml.add_bos_token", bool),
        container.get("tokenizer.ggml.bos_token_id", int),
    )
    if first is None or not (otherwise if asked is None else asked):
        return
    if not 0 <= first < len(vocabulary.tokens):
        raise ModelError(f"{container.path}: tokenizer.ggml.bos_token_id is {first} of {len(vocabulary.tokens)} tokens")
    text = vocabulary.tokens[first]
    made.post_processor = TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B:1"], special_tokens=[(text, first)]
    )
