"""Pairs of models of any Llama shape: random weights with the cost of real ones and a planted next token.

    python -m benchmarks.harness.synthetic build/benchmarks/1.1b --target 1.1b --draft 160m --agreement 0.8

The output of a model with random weights depends only on rounding: two programs or two precisions would never give the
same text, and no draft would ever be right. So a rule is planted in the weights. Embeddings are large compared to what
the layers add to them, and row `r` of the output head is the embedding of the token that `r` follows. Every layer does
its full work. The most likely next token is the rule's, by a margin that int4 does not change. Hence every program must
give the same text, which is checked, and a draft with another rule agrees at the chosen rate.

The rule arranges one half of the tokens in one large circle, in which nothing repeats, and the other half in loops of
`LOOP` tokens, in which everything repeats. The last token of a text determines its half.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pilotfish.engine.model.quantize import save_quantised

_BYTES = {"I8": 1, "F16": 2}  # of the numbers of codes and scales

SHAPES = {
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 12, "vocab_size": 32000},
    # Sized for tests: a wider draft would take seconds.
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "tinier": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
               "num_key_value_heads": 4, "vocab_size": 512},
}  # fmt: skip
POSITIONS = 16_384
LOOP = 24  # tokens
_END = "<end>"
_SPREAD = 0.02  # standard deviation of weights, as in Llama
_BLOCK = 32  # tokens; each block has the requested agreement, rounded to whole tokens

Tokens = NDArray[np.int64]


def agreement(count: int, rate: float, seed: int) -> NDArray[np.bool_]:
    """Return `count` booleans that are true at this rate: in random order, but with the right number in every 32.

    Independent draws would give an output of 64 tokens a rate far from the requested one.
    """
    blocks = -(-count // _BLOCK)
    should = np.floor(np.arange(blocks + 1) * _BLOCK * rate + 0.5)
    ranks = np.random.default_rng(seed).permuted(np.tile(np.arange(_BLOCK), (blocks, 1)), axis=1)
    found: NDArray[np.bool_] = (ranks < np.diff(should)[:, None]).reshape(-1)[:count]
    return found


@dataclass(frozen=True)
class Rule:
    """The next token of each token: a permutation, made from a seed."""

    vocab_size: int
    seed: int = 0

    @cached_property
    def order(self) -> Tokens:
        """Return all tokens: first those of the large circle in its order, then loop after loop."""
        return np.random.default_rng(self.seed).permutation(self.vocab_size)

    @property
    def circle(self) -> int:
        """Return the length of the large circle; the other tokens form whole loops."""
        return self.vocab_size - self.vocab_size // 2 // LOOP * LOOP

    @cached_property
    def successor(self) -> Tokens:
        """Return an array in which entry `t` is the token that follows `t`."""
        circle, loops = self.order[: self.circle], self.order[self.circle :].reshape(-1, LOOP)
        after = np.concatenate([np.roll(circle, -1), np.roll(loops, -1, axis=1).reshape(-1)])
        found = np.empty_like(self.order)
        found[self.order] = after
        return found

    def agreeing(self, rate: float) -> Tokens:
        """Return another permutation that agrees with this rule at the given rate, everywhere along the circle."""
        other, odd = self.successor.copy(), self.order[~agreement(self.vocab_size, rate, self.seed + 1)]
        # Each of these tokens gets the successor of the one before it. A single token would keep its own.
        other[odd] = self.successor[np.roll(odd, 1)]
        return other

    def text(self, start: int, count: int) -> list[int]:
        """Return the `count` tokens that follow `start`."""
        tokens = [start]
        while len(tokens) <= count:
            tokens.append(int(self.successor[tokens[-1]]))
        return tokens[1:]

    def prompts(self, count: int, length: int, *, seed: int = 0) -> list[tuple[int, ...]]:
        """Return prompts whose continuations share nothing."""
        chance = np.random.default_rng((self.seed, seed))
        lasts = self.order[(chance.integers(self.circle) + np.arange(count) * (self.circle // count)) % self.circle]
        heads = chance.choice(self.order[: self.circle], (count, length - 1))
        return [(*map(int, head), int(last)) for head, last in zip(heads, lasts, strict=True)]


@dataclass(frozen=True)
class SyntheticPair:
    """The files of a synthetic pair: the same weights in bfloat16, for other programs, and in int8, for ours."""

    folder: Path
    rule: Rule

    @classmethod
    def make(cls, folder: Path, target: str, draft: str, rate: float, seed: int = 0) -> SyntheticPair:
        """Write the missing files; the draft agrees with the target at `rate`."""
        rule = Rule(int(SHAPES[target]["vocab_size"]), seed)
        pair = cls(folder / f"{target}-{draft}-{rate:g}-{seed}", rule)
        write(pair.target, SHAPES[target], rule, rule.successor)
        write(pair.draft, SHAPES[draft], rule, rule.agreeing(rate))
        for model in (pair.target, pair.draft):
            if not _is_written(int8_of(model)):
                save_quantised(str(model), None, int8_of(model))
        return pair

    @property
    def target(self) -> Path:
        """Return the folder of the target in bfloat16."""
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        """Return the folder of the draft in bfloat16."""
        return self.folder / "draft"


def int8_of(model: Path) -> Path:
    """Return the folder of the same model in int8."""
    return model.with_name(f"{model.name}-int8")


def matrix_bytes(model: Path) -> int:
    """Return the bytes of weights that a pass of an int8 model must read: codes and scales, without the embeddings."""
    with safe_open(model / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".weight_" in name and "embed" not in name]  # noqa: SIM118 - no mapping
        parts = [file.get_slice(name) for name in names]
        return sum(math.prod(part.get_shape()) * _BYTES[part.get_dtype()] for part in parts)


def _is_written(folder: Path) -> bool:
    return (folder / "config.json").exists()  # written last


def write(folder: Path, shape: dict[str, int], rule: Rule, successor: Tokens) -> None:
    """Write a checkpoint of this shape with `successor` planted in it, unless there is one already."""
    if _is_written(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    # There is no end token, so that no program stops early.
    no_ends = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": POSITIONS, "dtype": "bfloat16"}
    config = LlamaConfig.from_dict(shape | no_ends)
    save_file(_weights(config, rule.seed, successor), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "rule.json").write_text(json.dumps({"vocab_size": rule.vocab_size, "seed": rule.seed}) + "\n")
    write_tokenizer(folder, rule.vocab_size)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are short words over 26 letters and the space; the last one is an end token.

    No model of ours ends by it, because their configs name no end token.
    """
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "Ġ"]  # "Ġ" is the space in byte-level vocabularies
    words, merges = sorted(ByteLevel.alphabet()), list[tuple[str, str]]()
    growing = deque(letters)  # shortest first
    while len(words) < vocab_size - 1:
        word = growing.popleft()
        for letter in letters[: vocab_size - 1 - len(words)]:
            merges.append((word, letter))
            words.append(word + letter)
            growing.append(word + letter)
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([_END])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(folder)


def _weights(config: LlamaConfig, seed: int, successor: Tokens) -> dict[str, Tensor]:
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    chance = torch.Generator().manual_seed(seed)
    weights = {name: _drawn(name, meta.shape, config, chance) for name, meta in shapes.items()}
    # Row r is the embedding of the token that r follows.
    predecessor = np.argsort(successor)
    head = weights["model.embed_tokens.weight"][torch.from_numpy(predecessor)]
    weights["lm_head.weight"] = (head * _SPREAD).contiguous()
    return weights


def _drawn(name: str, shape: Sequence[int], config: LlamaConfig, chance: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(*shape, dtype=torch.bfloat16)
    if name == "lm_head.weight":
        return torch.empty(0)  # computed from the embedding
    spread = 1.0 if "embed" in name else _SPREAD
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        spread /= (2 * config.num_hidden_layers) ** 0.5  # as in GPT-2: the sum of what all layers add stays small
    return torch.randn(*shape, generator=chance).mul_(spread).bfloat16()


def main() -> None:
    """Write a pair and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", choices=SHAPES, default="1.1b")
    parser.add_argument("--draft", choices=SHAPES, default="160m")
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = SyntheticPair.make(options.folder, options.target, options.draft, options.agreement, options.seed)
    print(f"{pair.folder}: target, draft, and both in int8")


if __name__ == "__main__":
    main()
