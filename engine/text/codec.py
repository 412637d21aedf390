"""Converts text to token ids, and token ids to text incrementally."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from pilotfish.engine.machine.mapped import release_freed
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.gguf.container import Container, open_gguf
from pilotfish.engine.model.gguf.tokenizer import tokenizer_faults, tokenizer_in
from pilotfish.engine.text.spelling import Spelling, steps_of
from pilotfish.engine.text.stops import NO_ASIDES, NO_STOPS, Asides, StopSearch, StopStrings

TOKENIZER_FILE = "tokenizer.json"
# Sample code and prose, for calibration before the first request.
CALIBRATION_TEXT = (Path(__file__).parents[1] / "types.py").read_text("utf-8")[:9000]
_SHORT = 2000  # characters or tokens that are converted within a millisecond


class Codec:
    """A checkpoint's tokenizer. By default special tokens have no text.

    Args:
        added_tokens: ids of the tokens added to the vocabulary, special or not, by text.
        special_tokens: ids of the special tokens, which have no text if they are skipped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A checkpoint may enable padding or truncation, which are for training and wrong for a single prompt.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: i for i, token in added.items()}
        self.special_tokens = frozenset(i for i, token in added.items() if token.special)
        self.spelling = Spelling(tokenizer)
        release_freed()  # building a tokenizer takes several times its memory

    @cached_property
    def longest_token(self) -> int | None:
        """Maximum bytes of text of one token; None if unknown. Reads all tokens."""
        return _longest_token(self.tokenizer, self.tokenizer.get_added_tokens_decoder().values())

    @classmethod
    def load(cls, source: str | Path, revision: str | None = None, *, kept: bool = True) -> Codec | None:
        """Load the tokenizer of a checkpoint; None if there is none.

        `kept`: cache it for later loads.
        """
        of_container, of_file = (_of_container, _of_file) if kept else (_of_container.__wrapped__, _of_file.__wrapped__)
        gguf = open_gguf(source, revision)
        if gguf is not None:
            return of_container(gguf)
        path = find_file(source, TOKENIZER_FILE, revision)
        return None if path is None else of_file(path, path.stat().st_mtime_ns)

    def encode(self, text: str, *, bare: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds, or without them if `bare`."""
        if len(text) <= _SHORT:
            return tuple(self.tokenizer.encode(text, add_special_tokens=not bare).ids)
        # A batch of one, because only batches are encoded without the GIL.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=not bare)
        return tuple(encoding.ids)

    def excess(self, text: str, most: int) -> str | None:
        """Return why a text has certainly more than `most` tokens, without encoding it; None if it may have fewer."""
        if self.least_tokens(text) <= most:
            return None
        limit = most * (self.longest_token or 0)
        return f"has {_size(text)} bytes, more than {most} tokens can have; the limit is {limit} bytes"

    def least_tokens(self, text: str) -> int:
        """The minimum number of tokens of a text, without encoding it; 0 if unknown."""
        return 0 if self.longest_token is None else -(-_size(text) // self.longest_token)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all of these tokens; bytes that are not UTF-8 become U+FFFD."""
        tokens = list(ids)
        if len(tokens) <= _SHORT:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        (text,) = self.tokenizer.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
        return text


def structure_problem(codec: Codec | None, vocab_size: int, end_tokens: Sequence[int]) -> str | None:
    """Why a model does not support structures; None if it does. `vocab_size`: width of its logits."""
    if codec is None:
        return "the checkpoint has no tokenizer"
    if not end_tokens:
        return "eos_token_ids is empty: no output could end"
    if outside := [token for token in end_tokens if not 0 <= token < vocab_size]:
        return f"eos_token_ids has {outside[0]}; expected 0 to {vocab_size - 1}"
    size = codec.tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        return f"the tokenizer has {size} tokens, the model's logits only {vocab_size}"
    return None if codec.spelling.has_bytes else "the tokenizer's decoder is not of bytes"


# Those of target and draft, which are requested several times during loading.
@lru_cache(maxsize=2)
def _of_container(container: Container) -> Codec | None:
    tokenizer = tokenizer_in(container)
    return None if tokenizer is None else Codec(tokenizer)


@lru_cache(maxsize=2)
def _of_file(path: Path, _changed_at: int) -> Codec:
    with tokenizer_faults(path):
        return Codec(Tokenizer.from_file(str(path)))


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _longest_token(tokenizer: Tokenizer, added: Collection[AddedToken]) -> int | None:
    """Maximum bytes of text of one token; None if unknown.

    It is known for byte-level BPE with a token for every byte: each byte of a text is part of one token, which is spelt
    with at least one character per byte. Normalisation must not shorten the text.
    """
    model, normalizer = tokenizer.model, tokenizer.normalizer
    try:
        steps = [*steps_of(normalizer), *steps_of(tokenizer.pre_tokenizer)]
    except Exception:  # noqa: BLE001  # a component in Python; the library raises bare Exception
        return None
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not isinstance(model, BPE) or not (is_of_bytes or model.byte_fallback):
        return None
    every = pre_tokenizers.ByteLevel.alphabet() if is_of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    is_complete = all(model.token_to_id(byte) is not None for byte in every)
    # A token that includes surrounding white space has no maximum length.
    if not is_complete or not all(map(_keeps_length, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    texts = tokenizer.get_vocab(with_added_tokens=False)
    spelt = max(map(len, texts)) if is_of_bytes else max(len(text.encode()) for text in texts)
    normal = (lambda text: text) if normalizer is None else normalizer.normalize_str
    return max([spelt, *(len(normal(token.content).encode()) for token in added)])


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether the step's result has at least as many bytes as its input."""
    match step:
        case {"type": "ByteLevel" | "Digits" | "Metaspace" | "Prepend"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Replace", "pattern": {"String": before}, "content": after}:
            return len(after.encode()) >= len(before.encode())
    return False


class Decoder:
    """Decodes token by token. Bytes of an unfinished character are held back until the character is complete.

    With a byte-level tokenizer the result is exactly that of decoding all tokens at once. Byte-fallback decoders can
    change text that was already returned, for example `A` next to a byte that later proves invalid. Then decoding
    starts again at the token that caused the change, independently of the chunks.
    """

    def __init__(self, codec: Codec, *, skip_special_tokens: bool = True) -> None:
        self._codec, self._skips = codec, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []  # the tokens of the last returned piece: some decoders need them as context
        self._held: list[int] = []  # the tokens since then

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes, usually that of the token itself."""
        piece = self._step(token)
        self._held.append(token)
        if piece:
            self._shown, self._held = self._held, []
        return piece

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._codec.tokenizer, token) or ""
        except Exception as error:  # the tokenizers library raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
        pending = self.flush()
        self._shown, self._stream = [], DecodeStream(skip_special_tokens=self._skips)
        return pending + (self._stream.step(self._codec.tokenizer, token) or "")

    def flush(self) -> str:
        """Return the text of the tokens that are still held back; a truncated character becomes U+FFFD."""
        before, after = self._decoded(self._shown), self._decoded(self._shown + self._held)
        text = after.removeprefix(before) if after.startswith(before) else self._decoded(self._held)
        self._held = []
        return text

    def _decoded(self, tokens: list[int]) -> str:
        return self._codec.decode(tokens, skip_special_tokens=self._skips)


class OutputText:
    """The text of one output, cut where a stop string completes, as if tokens arrived one by one.

    The joined pieces and the final `flush` are the decoded tokens up to the stop string. Only text that may still
    change is held back: bytes of an unfinished character, and the longest end of the text that begins a stop string.
    A token that ends the output by its id has no text and is not pushed. Stop strings that complete within the first
    `min_tokens` tokens, or in `asides`, are ordinary text.
    """

    def __init__(
        self, codec: Codec, stops: StopStrings = NO_STOPS, min_tokens: int = 0, *, skip_special_tokens: bool = True,
        asides: Asides = NO_ASIDES,
    ) -> None:  # fmt: skip
        self._decoder = Decoder(codec, skip_special_tokens=skip_special_tokens)
        self._tokens_too_early = min_tokens
        self._search = StopSearch(stops, asides) if stops else None
        self._held = ""
        self.stop: str | None = None  # the stop string that has cut the text

    def push(self, token_ids: Iterable[int]) -> tuple[str, ...]:
        """Add tokens up to the one that completes a stop string, if any; return the new text after each."""
        if self._search is None:
            return tuple(map(self._decoder.push, token_ids))
        assert self.stop is None, "text after a stop string"
        texts = list[str]()
        for token in token_ids:
            text = self._decoder.push(token)
            self._tokens_too_early -= 1
            is_cut = self._read(self._search, text)
            shown = len(self._held) - (0 if is_cut else self._search.num_held)
            texts.append(self._held[:shown])
            self._held = self._held[shown:]
            if is_cut:
                break
        return tuple(texts)

    def flush(self) -> str:
        """Return the held-back text, after the last token. A truncated character completes no stop string.

        `stop` may be set here, if it was unknown until now whether the text is reasoning.
        """
        if self._search is not None and self.stop is None:
            self._cut(self._search, self._search.end())
        text = self._held if self.stop is not None else self._held + self._decoder.flush()
        self._held = ""
        return text

    def _read(self, search: StopSearch, text: str) -> bool:
        """Read the new characters; return whether a stop string cuts the text: the first complete, ties by the list."""
        if search.ignores(text):
            self._held += text
            return False
        for char in text:
            self._held += char
            if self._cut(search, search.read(char, counts=self._tokens_too_early < 0)):
                return True
        return False

    def _cut(self, search: StopSearch, stop: str) -> bool:
        if stop:
            self._held, self.stop = self._held[: len(self._held) - search.num_held], stop
        return bool(stop)
