"""Laws of `engine.text.codec`: chunks do not matter, joined pieces are the decoded text, stop strings cut at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pilotfish.engine.errors import ModelError
from pilotfish.engine.text.codec import Codec, OutputText
from pilotfish.engine.text.stops import StopStrings
from pilotfish.models import embedded_target
from tests.pauses import while_counting

END = "<|end|>"


def byte_level() -> Codec:
    """One token per byte, some of several bytes that also split characters, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    space, half_euro, euro_and_a = "Ġ", "âĤ", "¬a"  # "€" is E2 82 AC: these two tokens share it
    merges = [(space, "a"), ("a", "b"), ("âĤ"[0], "âĤ"[1]), ("¬", "a"), ("ab", "ab")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    assert half_euro in vocab
    assert euro_and_a in vocab
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return Codec(tokenizer)


def byte_fallback() -> Codec:
    """A decoder whose text is not monotonic: `A` becomes U+FFFD once an invalid byte stands beside it."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Codec(tokenizer)


CODEC = byte_level()
VOCAB_SIZE = CODEC.tokenizer.get_vocab_size()

any_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
text_tokens = st.text("ab €é\n", max_size=25).map(CODEC.encode).map(list)
stops = st.lists(st.text("ab €", min_size=1, max_size=4), max_size=4)


def in_chunks(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    while start < len(tokens):
        size = data.draw(st.integers(1, 6))
        chunks.append(tokens[start : start + size])
        start += size
    return chunks


def run(chunks: list[list[int]], stop: list[str], codec: Codec = CODEC) -> tuple[str, int, str | None, tuple[str, ...]]:
    """Text, kept tokens, what stopped it, and the text per token."""
    output, texts, hit = OutputText(codec, StopStrings(stop)), (), None
    for chunk in chunks:
        found = output.push(chunk)
        assert len(found) <= len(chunk)
        texts += found
        hit = output.stop
        if hit is not None:
            break
    return "".join(texts) + output.flush(), len(texts), hit, texts


def oracle(tokens: list[int], stop: list[str]) -> tuple[str, int, str | None]:
    """Brute force: decode every prefix, drop what is not settled, look for the stop string that ends first."""
    for count in range(1, len(tokens) + 1):
        settled = CODEC.decode(tokens[:count])
        later = CODEC.decode(tokens)
        while not later.startswith(settled) or settled.endswith("�"):
            settled = settled[:-1]
        ends = [(settled.find(s) + len(s), i) for i, s in enumerate(stop) if s in settled]
        if ends:
            end, i = min(ends)
            return settled[: end - len(stop[i])], count, stop[i]
    return CODEC.decode(tokens), len(tokens), None


@given(st.data(), any_tokens)
def test_pieces_join_to_the_decoded_text(data: st.DataObject, tokens: list[int]) -> None:
    text, kept, stop, _ = run(in_chunks(data, tokens), [])
    assert (text, kept, stop) == (CODEC.decode(tokens), len(tokens), None)


@given(st.data(), st.one_of(text_tokens, any_tokens), stops)
@settings(max_examples=60)
def test_chunks_do_not_matter(data: st.DataObject, tokens: list[int], stop: list[str]) -> None:
    assert run(in_chunks(data, tokens), stop) == run([[token] for token in tokens], stop)


@example(list(CODEC.encode("xxabab")), ["bab", "ab"])  # one token for "ab" brings both: "ab" ends first
@example(list(CODEC.encode("xab")), ["ab", "b"])  # both end with the same character: the first listed
@example(list(CODEC.encode("xab")), ["b", "ab"])
@given(text_tokens, stops)
@settings(max_examples=100)
def test_stop_strings_cut_where_one_by_one_decoding_would(tokens: list[int], stop: list[str]) -> None:
    text, kept, hit, _ = run([tokens] if tokens else [], stop)
    assert (text, kept, hit) == oracle(tokens, stop)


@settings(max_examples=40)
@given(text_tokens, stops)
def test_what_is_shown_is_never_taken_back_and_only_the_needed_is_held(tokens: list[int], stop: list[str]) -> None:
    final = run([tokens], stop)[0]
    output, shown = OutputText(CODEC, StopStrings(stop)), ""
    for count, token in enumerate(tokens, 1):
        shown += "".join(output.push([token]))
        assert final.startswith(shown)
        if output.stop is not None:
            return
        settled = CODEC.decode(tokens[:count]).rstrip("�")
        held = settled[len(shown) :]
        assert held == max((s[:n] for s in stop for n in range(len(s)) if settled.endswith(s[:n])), key=len, default="")


def test_a_truncated_character_is_flushed_as_batch_decoding_shows_it() -> None:
    truncated = list(CODEC.encode("a€"))[:-1]
    output = OutputText(CODEC)
    assert "".join(output.push(truncated)) == "a"
    assert output.flush() == "�"
    assert output.flush() == ""


def test_special_tokens_have_no_text() -> None:
    end = CODEC.encode(END)
    assert len(end) == 1
    assert run([[*CODEC.encode("a"), *end, *CODEC.encode("b")]], [])[0] == "ab"


def test_a_decoder_that_revises_shown_text_starts_anew() -> None:
    """tokenizers raises "Invalid prefix encountered" here, which would kill the request."""
    codec = byte_fallback()
    tokens = [0x41, 0xC3, 256, 0x42, 0xE2, 0x82, 0xAC]
    text, kept, _, _ = run([tokens], [], codec)
    assert kept == len(tokens)
    assert text == run([[token] for token in tokens], [], codec)[0]
    assert text.startswith("A")
    assert text.endswith("€")


@settings(max_examples=40)
@given(st.data(), st.lists(st.integers(0, 256), max_size=30))
def test_chunks_do_not_matter_to_a_byte_fallback_decoder(data: st.DataObject, tokens: list[int]) -> None:
    codec = byte_fallback()
    assert run(in_chunks(data, tokens), [], codec) == run([[token] for token in tokens], [], codec)


def test_padding_and_truncation_of_a_checkpoint_are_turned_off(tmp_path) -> None:
    tokenizer = byte_level().tokenizer
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = Codec.load(str(tmp_path))
    assert codec is not None
    assert len(codec.encode("xyz")) == 3


# ------------------------------------------------------------------------------------------------------ long texts


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("length", [1, 1999, 2000, 2001, 20_000])
def test_texts_of_every_length_get_the_tokens_of_plain_encoding_and_their_text_back(length: int, bare: bool) -> None:
    codec = byte_level()
    codec.tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, codec.tokenizer.token_to_id(END))]
    )
    text = ("ab€ a" * length)[:length]
    tokens = codec.encode(text, bare=bare)
    assert tokens == tuple(codec.tokenizer.encode(text, add_special_tokens=not bare).ids)
    assert (len(codec.encode(text)) - len(codec.encode(text, bare=True))) == 2
    assert codec.decode(tokens) == text


def test_a_long_text_is_encoded_and_decoded_without_the_interpreters_lock() -> None:
    text = "ab€ x" * 100_000
    took, longest = while_counting(lambda: CODEC.decode(CODEC.encode(text)))
    assert longest < took / 2


def spaces() -> Codec:
    """Byte fallback as Llama 2 has it: spaces are written as another character, and one more comes first."""
    codec = byte_fallback()
    longer = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    codec.tokenizer.normalizer = normalizers.Sequence(longer)
    return Codec(codec.tokenizer)


def changed(**parts: object) -> Codec:
    """A byte-level tokenizer with other parts."""
    tokenizer = byte_level().tokenizer
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return Codec(tokenizer)


def with_token(**sides: bool) -> Codec:
    tokenizer = byte_level().tokenizer
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True, **sides)])
    return Codec(tokenizer)


def bytes_of(codec: Codec, size: int, most: int) -> str | None:
    """What is wrong with a text of so many bytes where `most` tokens are allowed."""
    return codec.excess("x" * size, most)


def test_a_text_of_more_bytes_than_the_tokens_can_stand_for_is_refused() -> None:
    longest = len(END)
    assert bytes_of(CODEC, 3 * longest, 3) is None
    said = f"has {3 * longest + 1} bytes, more than 3 tokens can have; the limit is {3 * longest} bytes"
    assert bytes_of(CODEC, 3 * longest + 1, 3) == said


@pytest.mark.parametrize(
    "codec", [CODEC, byte_fallback(), spaces(), with_token()], ids=["level", "fallback", "▁", "turn"]
)
@settings(max_examples=40)
@given(text=st.text(st.one_of(st.sampled_from("ab €▁"), st.characters(exclude_categories=["Cs"])), max_size=40))
def test_no_text_is_refused_by_its_bytes_that_fits(codec: Codec, text: str) -> None:
    assert codec.excess(text, len(codec.encode(text, bare=True))) is None


ENDLESS = {  # tokenizers of which one token can stand for a text of any length
    "characters are deleted": changed(normalizer=normalizers.Strip()),
    "characters are joined": changed(normalizer=normalizers.NFC()),
    "a longer text is replaced": changed(normalizer=normalizers.Replace("   ", " ")),
    "an expression is replaced": changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "white space is dropped": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "words are split at white space": changed(pre_tokenizer=pre_tokenizers.Whitespace()),
    "a token takes the white space before it": with_token(lstrip=True),
    "a token takes the white space after it": with_token(rstrip=True),
    "unknown characters are dropped": Codec(Tokenizer(models.BPE(vocab={"x": 0}, merges=[]))),
    "unknown characters are joined": Codec(
        Tokenizer(models.BPE(vocab={"x": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True, byte_fallback=True))
    ),
    "words are tokens": Codec(Tokenizer(models.WordLevel(vocab={"x": 0, "?": 1}, unk_token="?"))),
}


@pytest.mark.parametrize("why", ENDLESS)
def test_bytes_say_nothing_where(why: str) -> None:
    assert bytes_of(ENDLESS[why], 1_000_000, 1) is None


def test_the_longest_token_counts_where_some_ids_have_no_token() -> None:
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"x" * 9: 1000}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bytes_of(Codec(tokenizer), 18, 2) is None
    assert "the limit is 18 bytes" in (bytes_of(Codec(tokenizer), 19, 2) or "")


_IMPORTED = """
import sys
from pilotfish.engine.text import guided
from pilotfish.engine.text.codec import Codec
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.detect import detect
codec, chat = Codec.load(sys.argv[1]), ChatTemplate.load(sys.argv[1])
detect(chat, codec.added_tokens)
print(*(name for name in ("huggingface_hub", "torch", "transformers") if name in sys.modules))
"""


def test_text_needs_no_library_of_models_and_no_client_of_the_hub() -> None:
    """Each of them takes longer to import than a tokenizer to load."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, str(embedded_target())], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_tokenizer_is_read_again_where_its_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    CODEC.tokenizer.save(str(path))
    codec = Codec.load(tmp_path)
    assert Codec.load(tmp_path) is codec
    byte_fallback().tokenizer.save(str(path))
    os.utime(path, ns=(1, 1))
    assert Codec.load(tmp_path).decode([256]) == "a"


def test_no_tokenizer_is_none_and_a_broken_one_an_error(tmp_path) -> None:
    assert Codec.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(ModelError, match="cannot read"):
        Codec.load(tmp_path)
