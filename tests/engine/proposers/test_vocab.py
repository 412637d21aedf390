"""Tokens of two tokenizers are paired by the bytes they stand for, special ones by their role."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.proposers.sources import DraftSource
from pilotfish.engine.proposers.vocab import DraftVocabulary, MappedRunner, VocabMap
from pilotfish.engine.startup import drafters
from pilotfish.engine.startup.drafters import match_vocabularies
from tests import fakes, zoo

TEXT = ["the cat sat on the mat, the hat that the cat had", "naïve café and the façade", "def add(a, b):\n    return a"]


def byte_level(text: list[str], end: str = "<|end|>", size: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def sentence_piece(text: list[str], size: int = 400) -> Tokenizer:
    """As Llama's: byte tokens, and spaces written as a lower one eighth block."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    plain = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    plain.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    settings = json.loads(plain.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def vocabulary(
    tokenizer: Tokenizer, name: str, begin: str | None, end: str, width: int | None = None
) -> DraftVocabulary:
    ids = [tokenizer.token_to_id(token) if token else None for token in (begin, end)]
    return DraftVocabulary.of(name, width or tokenizer.get_vocab_size(), tokenizer, ids[0], {ids[1]})


def of_bytes(text: list[str] = TEXT, name: str = "target", **how: object) -> DraftVocabulary:
    return vocabulary(byte_level(text, **how), name, None, how.get("end", "<|end|>"))


def of_pieces(text: list[str] = TEXT, name: str = "draft") -> DraftVocabulary:
    return vocabulary(sentence_piece(text), name, "<s>", "</s>")


def test_spaces_bytes_and_the_end_meet_across_spellings() -> None:
    target, draft = of_bytes(), of_pieces()
    found = VocabMap.between(target, draft)
    theirs = {i: piece for piece, i in draft.ids.items()}
    pairs = {"Ġhat": "▁hat", "at": "at", "ĉ": "<0x09>", "Ã": "<0xC3>", "a": "a", "<|end|>": "</s>"}
    assert {ours: theirs.get(found.column_of[target.ids[ours]]) for ours in pairs} == pairs
    used = [column for column in found.column_of if column >= 0]
    assert len(used) == len(set(used)) == found.num_shared > 256
    for token, column in enumerate(found.column_of):
        if column >= 0 and token != target.end:
            assert target.texts[token] == draft.texts[column]


def test_a_token_without_counterpart_is_fed_as_the_longest_that_ends_alike() -> None:
    target, draft = of_bytes(size=330), of_bytes(["had that", "mat"], "draft", size=275)
    found = VocabMap.between(target, draft)
    lonely = [i for i, column in enumerate(found.column_of) if column < 0 and i in target.texts]
    assert lonely
    for token in lonely:
        fed, text = draft.texts[found.draft_of[token]], target.texts[token]
        assert text.endswith(fed)
        assert not any(text.endswith(other) and len(other) > len(fed) for other in draft.texts.values())


def test_a_special_token_meets_its_role_not_its_name() -> None:
    """`<s>` ends in the one and begins in the other; a token that begins and ends is fed as the beginning."""
    target, draft = vocabulary(byte_level(TEXT, end="<s>"), "target", "<s>", "<s>"), of_pieces()
    found = VocabMap.between(target, draft)
    assert found.column_of[target.end] == draft.end != draft.ids["<s>"]
    assert found.draft_of[target.begin] == draft.begin


def test_other_special_tokens_meet_by_name_and_never_as_text() -> None:
    ours, theirs = byte_level(TEXT), byte_level(["other words here"], end="</s>")
    for tokenizer in (ours, theirs):
        tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    theirs.add_tokens([AddedToken("<|user|>", special=False)])
    ours.add_special_tokens([AddedToken("<|user|>", special=True)])
    target, draft = vocabulary(ours, "target", None, "<|end|>"), vocabulary(theirs, "draft", None, "</s>")
    found = VocabMap.between(target, draft)
    assert found.column_of[target.ids["<|tool|>"]] == draft.ids["<|tool|>"]
    assert found.column_of[target.ids["<|user|>"]] == -1


@pytest.mark.parametrize(("ours", "theirs"), [(300, 320), (320, 300)])
def test_one_vocabulary_padded_to_two_widths(ours: int, theirs: int) -> None:
    tokenizer = byte_level(TEXT)
    target, draft = (vocabulary(tokenizer, "x", None, "<|end|>", width) for width in (ours, theirs))
    found = VocabMap.between(target, draft)
    assert found.column_of == (*range(300), *[-1] * (ours - 300))
    assert len(found.draft_of) == ours
    assert max(found.draft_of) < theirs


def test_equal_vocabularies_need_no_map() -> None:
    assert VocabMap.between(of_bytes(), of_bytes(name="draft")) is None


def test_two_files_are_read_only_if_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "read_vocabulary", lambda *_: 1 / 0)
    config, draft = EngineConfig(target=str(tmp_path / "target")), str(tmp_path / "draft")
    for text, told in (([], nullcontext()), (["differently"], pytest.raises(ZeroDivisionError))):
        for folder, texts in ((config.target, TEXT), (draft, [*TEXT, *text])):
            Path(folder).mkdir(exist_ok=True)
            byte_level(texts).save(f"{folder}/tokenizer.json")
        with told:
            assert match_vocabularies(config, DraftSource("model", draft, draft), *[zoo.reference("llama")] * 2) is None


def test_too_few_shared_tokens_are_refused_with_counts() -> None:
    words = Tokenizer(models.WordLevel({"zebra": 0, "</s>": 1}, unk_token="</s>"))
    with pytest.raises(ModelError, match=r"draft 'draft' shares 1 of the 299 tokens of target 'target'; .* least 30"):
        VocabMap.between(of_bytes(), vocabulary(words, "draft", None, "</s>"))


def test_tokens_without_bytes_are_refused() -> None:
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    with pytest.raises(ModelError, match="WordPiece"):
        vocabulary(words, "draft", None, "a")


def test_the_runner_speaks_target_ids(tmp_path: Path) -> None:
    draft = fakes.TableModel(lambda context: torch.tensor([1.0, 2.0, 3.0]) + context[-1], 3, 2, 8)
    runner = MappedRunner(draft, VocabMap((2, 0, 1, 0), (2, -1, 1, -1), 3, 4), torch.device("cpu"))
    logits = runner.forward([Feed([0, 3, 2], 0, [0], num_logits=2), Feed([1], 0, [1])])
    never = float("-inf")
    assert logits.tolist() == [[3, never, 2, never], [4, never, 3, never], [3, never, 2, never]]
    assert [feed.tokens for feed in draft.batches[0]] == [[2, 0, 1], [0]]
