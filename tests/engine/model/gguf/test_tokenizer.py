"""Tokenizers in GGUF files give the ids of the tokenizers that were written into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import Container
from pilotfish.engine.model.gguf.tokenizer import (
    chat_template_in,
    end_tokens_in,
    merges_of,
    special_tokens_in,
    tokenizer_in,
)
from pilotfish.engine.text.codec import Codec
from pilotfish.models import embedded_target
from pilotfish.server.chat import ChatTemplate

TEXTS = (
    "def sort(items):\n    return sorted(items, key=len)[::-1]\n\n\n# 1234567 things",
    "  Two  spaces, tabs\t\tand\r\nlines; it's, WE'LL, naïve café — Ünïcödé 漢字 🙂 ½",
    "<|im_start|>user\nHi<|im_end|>",
    "HTTPServer parseJSON 3.14159 a_b_c foo/bar//baz",
    "x",
    " ",
    "",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Describe = Callable[[gguf.GGUFWriter], None]


def written(path: Path, describe: Describe, architecture: str = "llama") -> Container:
    """A file with metadata and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Container.open(path)


def byte_level(pattern: str) -> Tokenizer:
    """A small vocabulary of bytes, trained on the texts, whose pieces are the matches of `pattern`."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


def of_pieces() -> Tokenizer:
    """A small vocabulary of SentencePiece's kind, as in a Llama 2."""
    made = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    made.decoder = decoders.Sequence(steps)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, limit_alphabet=60, show_progress=False)
    made.train_from_iterator(TEXTS * 3, trainer)
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(state))


def read_back(folder: Path, describe: Describe, architecture: str = "llama") -> Tokenizer | None:
    return tokenizer_in(written(folder / "a.gguf", describe, architecture))


def tokens_of(made: Tokenizer) -> list[str]:
    return [token for token, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]


def describing(made: Tokenizer, kind: str, rule: str | None, **more: object) -> Describe:
    """Write a tokenizer as llama.cpp's converter does; `more` are further values of the metadata."""

    def describe(writer: gguf.GGUFWriter) -> None:
        tokens, merges = tokens_of(made), json.loads(made.to_str())["model"]["merges"]
        types = [
            _type(token, {added.content for added in made.get_added_tokens_decoder().values()}) for token in tokens
        ]
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if kind == "gpt2":
            writer.add_token_merges([" ".join(pair) for pair in merges])
        else:  # the converter writes scores alone; in a trained vocabulary they are in the order of the merges
            writer.add_token_scores([-float(i) for i in range(len(tokens))])
        if rule is not None:
            writer.add_tokenizer_pre(rule)
        for method, value in more.items():
            getattr(writer, method)(value)

    return describe


def _type(token: str, added: set[str]) -> TokenType:
    if token == "<unk>":
        return TokenType.UNKNOWN
    return TokenType.BYTE if token.startswith("<0x") else TokenType.CONTROL if token in added else TokenType.NORMAL


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(("rule", "pattern"), [("qwen2", QWEN2), ("dbrx", LLAMA3), ("gpt-2", GPT2)])
def test_byte_level_tokenizers_are_the_same(rule: str, pattern: str, tmp_path: Path) -> None:
    original = byte_level(pattern)
    found = read_back(tmp_path, describing(original, "gpt2", rule), "qwen2")
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids
        for skips in (True, False):
            assert found.decode(ids, skip_special_tokens=skips) == original.decode(ids, skip_special_tokens=skips)


def test_tokenizers_of_pieces_are_the_same(tmp_path: Path) -> None:
    original = of_pieces()
    found = read_back(tmp_path, describing(original, "llama", None, add_bos_token_id=1))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.encode(text).ids == [1, *ids], "texts begin with the first token"
        assert found.decode(ids) == original.decode(ids)


def test_leading_spaces_are_added_only_if_the_file_has_the_flag(tmp_path: Path) -> None:
    found = read_back(tmp_path, describing(of_pieces(), "llama", None, add_add_space_prefix=False))
    assert found.decode(found.encode("e").ids) == "e"
    assert found.encode("e").tokens == ["e"]


@pytest.mark.parametrize(
    ("rule", "asked", "begins"),
    [("llama-bpe", None, True), ("qwen2", None, False), ("llama-bpe", False, False), ("qwen2", True, True)],
)
def test_the_first_token(rule: str, asked: bool | None, begins: bool, tmp_path: Path) -> None:
    more = {"add_bos_token_id": 0} | ({} if asked is None else {"add_add_bos_token": asked})
    found = read_back(tmp_path, describing(byte_level(LLAMA3), "gpt2", rule, **more))
    assert (found.encode("x").ids[0] == 0) is begins


def test_whole_words_of_a_llama_3_need_no_merges(tmp_path: Path) -> None:
    original = byte_level(LLAMA3)
    state = json.loads(original.to_str())
    state["model"]["merges"] = []  # now no token longer than a byte can be merged
    found = read_back(tmp_path, describing(Tokenizer.from_str(json.dumps(state)), "gpt2", "llama-bpe"))
    word = max((token for token in tokens_of(original) if token.isascii() and token.isalpha()), key=len)
    assert len(word) > 1
    assert found.encode(word).tokens == [word]


def test_the_embedded_tokenizer_goes_through_whole(tmp_path: Path) -> None:
    source = embedded_target()
    whole, template = (
        (source / "tokenizer.json").read_text("utf-8"),
        (source / "chat_template.jinja").read_text("utf-8"),
    )

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_string("tokenizer.huggingface.json", whole)
        writer.add_chat_template(template)

    path = written(tmp_path / "a.gguf", describe).path
    original, found = Codec.load(source), Codec.load(path)
    assert original is not None and found is not None  # noqa: PT018 - for the types
    assert [found.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    chats = [ChatTemplate.load(str(name)) for name in (source, path)]
    assert len({chat.render([{"role": "user", "content": "Hi"}]) for chat in chats if chat}) == 1


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    more = {"add_bos_token_id": 1, "add_eos_token_id": 0, "add_chat_template": "{{ bos_token }}!{{ eos_token }}"}
    container = written(tmp_path / "a.gguf", describing(byte_level(QWEN2), "gpt2", "qwen2", **more))
    assert special_tokens_in(container) == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert end_tokens_in(container) == [0, 2], "<|endoftext|>, and the end of a turn"
    assert chat_template_in(container) == more["add_chat_template"]
    chat = ChatTemplate.load(str(container.path))
    assert chat.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>!<|endoftext|>"


@pytest.mark.parametrize(
    ("texts", "ends"), [(("<|end|>", "<|return|>", "<|call|>"), [1, 2]), (("<|end|>", "<|return|>"), [0])]
)
def test_the_end_of_a_message_is_no_end_where_answers_have_several(
    texts: tuple[str, ...], ends: list[int], tmp_path: Path
) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(texts)
        writer.add_token_types([TokenType.CONTROL] * len(texts))

    assert end_tokens_in(written(tmp_path / "a.gguf", describe)) == ends


def test_no_tokenizer(tmp_path: Path) -> None:
    container = written(tmp_path / "a.gguf", lambda writer: writer.add_tokenizer_model("none"))
    assert tokenizer_in(container) is None
    assert end_tokens_in(container) == []
    assert Codec.load(container.path) is None
    assert ChatTemplate.load(str(container.path)) is None


@pytest.mark.parametrize(
    ("describe", "complaint"),
    [
        (describing(byte_level(GPT2), "gpt2", None), r"tokenizer\.ggml\.pre is None; expected one of gpt-2"),
        (describing(byte_level(GPT2), "gpt2", "grok-2"), r"tokenizer\.ggml\.pre is 'grok-2'"),
        (describing(byte_level(GPT2), "rwkv", None), r"tokenizer\.ggml\.model is 'rwkv'; expected gpt2 or llama"),
        (lambda writer: writer.add_tokenizer_model("llama"), r"has no tokenizer\.ggml\.tokens"),
        (lambda writer: writer.add_string("tokenizer.huggingface.json", "{"), "cannot read the tokenizer of"),
    ],
)
def test_what_is_not_known_is_named(describe: Describe, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=complaint):
        Codec.load(written(tmp_path / "a.gguf", describe).path)


def test_rules_are_those_that_transformers_knows() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if known is None:
        pytest.skip("transformers before 5.20")
    from pilotfish.engine.model.gguf.tokenizer import _RULES

    ours = {name: rule.pattern for name, rule in _RULES.items() if rule.pattern is not None}
    assert ours == {name: known.get(name, ours[name]) for name in ours}
    assert ours.keys() - known.keys() == {"chatglm-bpe", "glm4", "seed-coder", "stablelm2"}, "of llama.cpp alone"


def test_gemma_writes_runs_of_spaces_as_they_are(tmp_path: Path) -> None:
    original = of_pieces()
    found = read_back(tmp_path, describing(original, "llama", None, add_bos_token_id=1), "gemma3")
    assert found.encode("  x").tokens[1:] != found.encode("x").tokens[1:]
    assert found.decode(found.encode("  x").ids) == "  x"


@given(
    st.dictionaries(st.text("ab▁🙂", max_size=5), st.integers(0, 99), max_size=40).filter(bool),
    st.lists(st.integers(-3, 3), min_size=100, max_size=100),
)
def test_merges_are_all_pairs_of_tokens_that_make_a_token(ids: dict[str, int], scores: list[int]) -> None:
    ids = {text: i for i, text in {i: text for text, i in ids.items()}.items()}
    pairs = ((text, text[:cut], text[cut:]) for text in ids for cut in range(1, len(text)))
    found = [[ids[part] for part in pair] for pair in pairs if ids.keys() >= {*pair}]
    first, second = merges_of(ids, np.array(scores))
    expected = sorted(found, key=lambda pair: (-scores[pair[0]], *pair[1:]))
    assert [*zip(first, second, strict=True)] == [(before, after) for _, before, after in expected]
