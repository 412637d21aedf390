"""The tokenizer of the embedded models, and the corpus as tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pilotfish.models import corpus

END = "<|endoftext|>"  # between files; the models are trained to stop at it
VOCAB = 2048
# A newline is joined with the indentation after it, a word with the space before it; each digit is a separate token.
SPLIT = r"\n *| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+"


def train_tokenizer(files: Iterable[Path], out: Path, max_length: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text and needs no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text("utf-8") for path in files), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": max_length}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def token_stream(tokenizer: Tokenizer, text: corpus.Corpus, seed: int) -> np.ndarray:
    """Return one long int32 array: library files twice, tests once, in shuffled order, `END` before each file."""
    files = [*text.library, *text.library, *text.tests]
    random.Random(seed).shuffle(files)  # noqa: S311 - data order, no secret
    return np.concatenate([encode(tokenizer, path) for path in files])


def encode(tokenizer: Tokenizer, path: Path) -> np.ndarray:
    """Return a file's tokens as int32, with `END` before them."""
    return np.array([0, *tokenizer.encode(path.read_text("utf-8")).ids], dtype=np.int32)
