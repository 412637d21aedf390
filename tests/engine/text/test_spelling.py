"""The law of `engine.text.spelling`: the bytes of tokens, joined, are those of the text that decoding makes of them."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pilotfish.engine.text.codec import Codec
from pilotfish.engine.text.spelling import Spelling
from tests.engine.text.test_codec import CODEC, END, byte_fallback

SPACE, WORDS = "▁", ["▁", "▁a", "a", "b", "▁b▁", "€", "▁▁"]
_OF_PIECES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "llama": decoders.Sequence([*_OF_PIECES, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(_OF_PIECES),
    "metaspace": decoders.Metaspace(SPACE, prepend_scheme="always"),
    "metaspace without a prefix": decoders.Metaspace(SPACE, prepend_scheme="never"),
}


def of_pieces(decoder: decoders.Decoder) -> Codec:
    vocab = {piece: i for i, piece in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken("<tool▁call>", special=False)])
    return Codec(tokenizer)


CODECS = {"bytes": CODEC} | {name: of_pieces(decoder) for name, decoder in DECODERS.items()}


def joined(codec: Codec, tokens: list[int]) -> bytes:
    return b"".join(codec.spelling.bytes_of(token, leads=i == 0) or b"" for i, token in enumerate(tokens))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60)
@given(data=st.data())
def test_joined_bytes_are_the_text(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    has_bytes = "metaspace" not in name  # whose decoder writes the names of bytes
    size = codec.tokenizer.get_vocab_size() if name == "bytes" else len(WORDS)
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    if has_bytes and name != "bytes":  # a character of several bytes in the middle
        at = data.draw(st.integers(0, len(tokens)))
        tokens[at:at] = [len(WORDS) + byte for byte in data.draw(st.sampled_from([" ", "\n", "é", "€", "🎉"])).encode()]
    tokens.append(codec.tokenizer.get_vocab_size() - 1)  # an added token
    text = codec.decode(tokens, skip_special_tokens=False)
    assert joined(codec, tokens).decode(errors="replace") == text


@settings(max_examples=40)
@given(st.text("ab é€🎉\n\U000e0041", max_size=20))
@example("🎉")
def test_parts_of_a_character_have_their_own_bytes(text: str) -> None:
    for codec in (CODEC, byte_fallback()):
        tokens = list(codec.encode(text, bare=True))
        assert [len(codec.spelling.bytes_of(token) or b"") > 0 for token in tokens] == [True] * len(tokens)
        assert joined(codec, tokens) == text.encode()


def test_what_a_decoder_of_another_kind_or_no_token_writes_is_known_where_it_is_text() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert [Spelling(tokenizer).bytes_of(token) for token in (0, 3)] == [b"a", None]
    assert Spelling(CODEC.tokenizer).bytes_of(10**6) is None
