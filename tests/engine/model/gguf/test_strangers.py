"""Files of strangers: whatever their metadata says, one short line refuses it, or what it says is served."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError, one_line
from pilotfish.engine.model.adapters.peft import read_adapter
from pilotfish.engine.model.checkpoint import check_whole, read_config
from pilotfish.engine.model.gguf.container import Container
from pilotfish.engine.proposers.heads.weights import load_checkpoint
from pilotfish.engine.startup.check import check
from pilotfish.engine.text.codec import Codec
from pilotfish.models import embedded_target
from pilotfish.server.commands import check as command
from tests import gguf_files
from tests.covering import some
from tests.engine.model.gguf.damage import HOSTILE, Parts, array, number, text, texts
from tests.engine.model.gguf.test_tokenizer import QWEN2, byte_level, describing, of_pieces

SECONDS, MEMORY = 5.0, 500 << 20  # of the processor, and bytes above those of an unharmed load
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3moe", "lfm2")
# Fields of a config that a key may change, and how the value of the file becomes that of the field.
MEANT = {
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_parameters rope_theta",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.token_type": "eos_token_id",  # the ends of turns are control tokens
}
EVERY = 17  # of the grid, in `make test`


@lru_cache
def parts_of(folder: Path, family: str) -> Parts:
    """A small model with a tokenizer of its kind."""
    made, kind = (of_pieces(), "llama") if family in ("llama", "gemma3") else (byte_level(QWEN2), "gpt2")
    describe = describing(made, kind, "qwen2" if kind == "gpt2" else None, add_chat_template="{{ bos_token }}")
    config = gguf_files.config_of(family, gguf_files.SMALL | {"vocab_size": made.get_vocab_size()})
    return Parts(gguf_files.write(folder / f"{family}.gguf", config, Type.Q8_0, describe).path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Parts:
    return parts_of(folder, "llama")


def problems(path: Path, *, load: bool = False) -> list[str]:
    return check(EngineConfig(target=str(path), device="cpu", threads=1), load=load).problems


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextmanager
def bounded(what: object) -> Iterator[None]:
    """Fails where the block takes more than a file of a stranger may take."""
    start, before = time.process_time(), peak()
    yield
    assert time.process_time() - start < SECONDS, what
    assert peak() - before < MEMORY, what


def assert_told(problem: str, *named: str) -> None:
    assert len(problem) <= 300
    assert problem.isprintable(), problem
    for name in named:
        assert name in problem


def fields_of(path: Path) -> dict[str, object]:
    """Those of the config, whoever reads it."""
    config = read_config(str(path), None)
    return config.to_dict() if hasattr(config, "to_dict") else vars(config)


@pytest.mark.parametrize(
    "full", [pytest.param(False, id="sample"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", some(FAMILIES, ("llama", "qwen3moe")))
def test_any_value_of_any_key_is_refused_or_served(family: str, full: bool, folder: Path, tmp_path: Path) -> None:
    """It is served where the config is that of the unharmed file, but for the field that this key is."""
    parts = parts_of(folder, family)
    good = parts.written(tmp_path / "good.gguf", {})
    assert not problems(good, load=True)
    unharmed, loaded = fields_of(good), {"[]"}
    for i, (key, name) in enumerate(parts.hostile()):
        if not full and i % EVERY:
            continue
        path = parts.written(tmp_path / f"{i}.gguf", {key: HOSTILE[name]})
        with bounded((key, name)):
            told = problems(path)
        if told:
            for problem in told:
                assert_told(problem)
            continue
        found = fields_of(path)
        changed = {field for field in unharmed if found[field] != unharmed[field]}
        assert changed <= set(MEANT.get(key.removeprefix(f"{family}."), "").split()), (key, name)
        # A load for each config: the engine tests itself as it starts. A tokenizer is made in any case.
        shape = json.dumps(sorted((field, found[field]) for field in changed))
        if shape not in loaded and found["max_position_embeddings"] < 1 << 16:
            loaded.add(shape)
            assert not problems(path, load=True), (key, name)
        path.unlink()


def hundred(byte: str, count: int = 420) -> dict[str, bytes]:
    """A vocabulary of equal tokens."""
    return {"tokenizer.ggml.tokens": texts(*[byte.encode()] * count)}


# A tokenizer over which its library panics, which is no Exception.
PANICS = b"""{"version": "1.0", "added_tokens": [], "pre_tokenizer": null, "post_processor": null, "decoder": null,
"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": {"type": "BPE", "vocab": {}}}"""
KEYS: Mapping[str, tuple[Mapping[str, bytes | None], str]] = {
    "no layers": ({"llama.block_count": number(4, 0)}, "llama.block_count is 0; expected 1 to 512"),
    "fewer layers": (
        {"llama.block_count": number(4, 1)},
        "unexpected tensor blk.1.attn_k.bias in a llama model of 1 layers",
    ),
    "more layers": ({"llama.block_count": number(4, 3)}, "is missing 13 weights, including model.layers.2."),
    "many layers": ({"llama.block_count": number(4, 1 << 20)}, "llama.block_count is 1048576; expected 1 to 512"),
    "no heads": ({"llama.attention.head_count": number(4, 0)}, "llama.attention.head_count is 0; expected 1 to"),
    "odd heads": ({"llama.attention.head_count": number(4, 3)}, "is 2; expected a divisor of 3 heads"),
    "width": ({"llama.embedding_length": number(4, 32)}, "expected ["),
    "keys": ({"llama.attention.key_length": number(4, 7)}, "llama.attention.key_length is 7; expected"),
    "wide heads": (
        {"llama.attention.key_length": number(4, 420)},
        "llama.attention.head_count is 4; expected a value that gives rows of at most 420",
    ),
    "values": ({"llama.attention.value_length": number(4, 8)}, "llama.attention.value_length is 8; expected 16"),
    "rotated": ({"llama.rope.dimension_count": number(4, 8)}, "llama.rope.dimension_count is 8; expected the size of"),
    "one position": ({"llama.context_length": number(4, 1)}, "llama.context_length is 1; expected 2 to"),
    "negative": ({"llama.context_length": number(5, -5)}, "llama.context_length is -5; expected 2 to"),
    "no factor": (
        {"llama.rope.scaling.type": text(b"linear")},
        "llama.rope.scaling.factor is None; expected a positive",
    ),
    "not a number": (
        {"llama.attention.layer_norm_rms_epsilon": number(6, float("nan"))},
        "llama.attention.layer_norm_rms_epsilon is nan; expected a positive number",
    ),
    "3 tokens": ({"tokenizer.ggml.tokens": texts(b"a", b"b", b"c")}, "has 3 tokens; token_embd.weight has 420 rows"),
    "equal tokens": (hundred("a"), "tokenizer.ggml.tokens 0 and 419 are both 'a'"),
    "long token": (
        {"tokenizer.ggml.tokens": texts(b"a" * 400_000, *(b"%d" % i for i in range(419)))},
        "tokenizer.ggml.tokens[0] has 400000 bytes; expected at most 512",
    ),
    "no such end": (
        {"tokenizer.ggml.eos_token_id": number(4, (1 << 32) - 1)},
        "tokenizer.ggml.eos_token_id is 4294967295; expected a token id below 420",
    ),
    "types": (
        {"tokenizer.ggml.token_type": array(5, 1, bytes(4))},
        "420 tokens; token types are 1 int32",
    ),
    "scores": (
        {"tokenizer.ggml.scores": array(6, 420, struct.pack("<f", float("nan")) * 420)},
        "of which 0 are finite",
    ),
    "panic": ({"tokenizer.huggingface.json": text(PANICS)}, "cannot read the tokenizer of"),
    "long name": ({"x" * 3_000_000: struct.pack("<I", 99)}, "has unknown type 99"),
    "escapes": ({"\x1b[2J\r\n": struct.pack("<I", 99)}, r"\x1b[2J"),
    "architecture": ({"general.architecture": text(b"\x1b]0;x\x07" * 99)}, r"\x1b]0;x\x07"),
}


@pytest.mark.parametrize("case", KEYS)
def test_what_contradicts_itself_is_named(case: str, llama: Parts, tmp_path: Path) -> None:
    change, complaint = KEYS[case]
    (problem,) = problems(llama.written(tmp_path / "bad.gguf", change))
    assert_told(problem, "bad.gguf", complaint)


def test_a_template_that_is_none_is_found_before_it_is_served(llama: Parts, tmp_path: Path) -> None:
    for source, complaint in (
        (b"{% for", "the chat template is invalid: line 1"),
        (b"{% for a in b %}" * 30 + b"{% endfor %}" * 30, "is nested too deeply"),
        (b"{{ 'x' }}" * 20_000, "the chat template has 180000 characters; expected at most 131072"),
    ):
        path = llama.written(tmp_path / "bad.gguf", {"tokenizer.chat_template": text(source)})
        report, works = command.run([str(path), "--no-load", "--device", "cpu"], print)
        assert not works
        assert complaint in report
    path = llama.written(tmp_path / "large.gguf", {"tokenizer.chat_template": text(b"{{ '%900000000d' % 1 }}")})
    with bounded("a constant of 900 MB"):
        assert command.run([str(path), "--no-load", "--device", "cpu"], print)[1]


def _sparse(path: Path, entries: bytes, num_values: int, size: int) -> Path:
    """A file whose metadata begins with `entries`, and goes on with zeros that take no room on the disk."""
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, num_values) + entries)
        file.truncate(size)
    return path


def entry(key: str, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + value


def vocabulary(kind: bytes, *tokens: bytes) -> bytes:
    """Two entries."""
    return entry("tokenizer.ggml.model", text(kind)) + entry("tokenizer.ggml.tokens", texts(*tokens))


SPARSE: Mapping[str, tuple[bytes, int, int, str]] = {
    "truths": (entry("a", array(7, 300_000_000, b"")), 1, 300_000_100, "a its header has"),
    "empty keys": (b"", 10_000_000, 130_000_100, "10000000 metadata values; expected at most 65536"),
    "empty texts": (entry("a", array(8, 20_000_000, b"")), 1, 160_000_100, "a has 20000000 strings; expected at most"),
    "as many texts as may be": (entry("a", array(8, 1 << 21, b"")), 1, 1 << 26, ""),
    "long text": (entry("a", struct.pack("<IQ", 8, 1 << 33)), 1, 1 << 34, "a its header has"),
    "tokens": (
        entry("tokenizer.ggml.model", text(b"llama")) + entry("tokenizer.ggml.tokens", array(8, 1 << 21, b"")),
        2, 1 << 26, "tokenizer.ggml.tokens",
    ),
    "ways to merge": (
        vocabulary(b"llama", *(b"%c" % letter * count for letter in range(97, 113) for count in range(1, 513)))
        + entry("tokenizer.ggml.scores", array(6, 8192, bytes(4 * 8192))),
        3, 1 << 23, "expected at most 8 per token",
    ),
    "merges": (
        vocabulary(b"gpt2", b"a", b"b", b"ab", *(b"%0400d" % i for i in range(5_000)))
        + entry("tokenizer.ggml.pre", text(b"gpt-2")) + entry("tokenizer.ggml.merges", texts(*[b"a b"] * 2_000_000)),
        4, 1 << 25, "has 2000000 or more merges; expected at most 8 per token",
    ),
    "tokens that are found first": (
        vocabulary(b"gpt2", *(b"%014x" % (i * 7919**3) for i in range(1 << 17)))
        + entry("tokenizer.ggml.token_type", array(5, 1 << 17, struct.pack("<i", 3) * (1 << 17))),
        3, 1 << 23, "tokens of types 3 and 4 have 1835008 bytes; expected at most 1048576",
    ),
}  # fmt: skip
_READ = """
import json, resource, sys, time
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import Container
from pilotfish.engine.model.gguf.tokenizer import tokenizer_in
from pathlib import Path
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
for name in sys.argv[1:]:
    start, before, told = time.process_time(), peak(), ""
    try:
        tokenizer_in(Container.open(Path(name)))
    except ModelError as error:
        told = str(error)
    print(json.dumps([told, time.process_time() - start, peak() - before]))
"""


def test_a_small_file_that_claims_much_is_read_in_time(tmp_path: Path) -> None:
    """In a process of its own, which would be ended before it takes the machine's memory."""
    paths = [str(_sparse(tmp_path / f"{i}.gguf", *case[:3])) for i, case in enumerate(SPARSE.values())]
    limits = {resource.RLIMIT_DATA: 4 << 30, resource.RLIMIT_CPU: 60}
    done = subprocess.run(
        [sys.executable, "-c", _READ, *paths],
        preexec_fn=lambda: [resource.setrlimit(what, (most, most)) for what, most in limits.items()],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    for path, (name, case), line in zip(paths, SPARSE.items(), done.stdout.splitlines(), strict=True):
        told, seconds, memory = json.loads(line)
        assert seconds < SECONDS, name
        assert memory < MEMORY, name
        if case[3]:
            assert_told(told, path, case[3])


def _table(path: Path, *tensors: tuple[str, tuple[int, ...], int]) -> Path:
    """A file of float32 tensors: their names, shapes and offsets."""
    rows = (
        entry(name, struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)) for name, shape, offset in tensors
    )
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0) + b"".join(rows)
    path.write_bytes(header + bytes(-len(header) % 32 + 256))
    return path


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([("a", (8, 4), 0), ("b", (8, 4), 64)], "a overlaps b"),
        ([("a", (0, 1 << 60), 0)], r"a has shape \[1152921504606846976, 0\]; expected dimensions of 1 or more"),
        ([("a\x1b[31m", (8,), 0), ("a\x1b[31m", (8,), 32)], r"duplicate tensor a\\x1b\[31m"),
        ([("n" * 3_000_000, (1,) * 4, 1)], "is at offset 1; expected a multiple of 32"),
    ],
)
def test_a_table_of_tensors_that_contradicts_itself(tensors: list[Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=complaint) as raised:
        Container.open(_table(tmp_path / "bad.gguf", *tensors))
    assert_told(str(raised.value), "bad.gguf")


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    twice = entry("a", number(4, 1)) * 2
    with pytest.raises(ModelError, match="duplicate key a"):
        Container.open(_sparse(tmp_path / "bad.gguf", twice, 2, 1000))


def test_a_file_is_read_once_for_all_that_is_wanted_of_it(llama: Parts, tmp_path: Path) -> None:
    container = Container.open(llama.written(tmp_path / "good.gguf", {}))
    assert not container.get("tokenizer.ggml.scores", np.ndarray).flags.owndata, "a view of the file"
    codec = Codec.load(container.path)
    assert codec is Codec.load(container.path)
    assert codec.decode(codec.encode("x")) == "x"


def folder_with(path: Path, key: str, value: object) -> Path:
    """The embedded target with another value in its config."""
    source = embedded_target()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text("utf-8")) | {key: value}
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("num_hidden_layers", 1 << 20, "config field num_hidden_layers is 1048576; expected 1 to 512"),
        ("num_hidden_layers", 0, "config field num_hidden_layers is 0; expected 1 to 512"),
        ("num_attention_heads", 0, "config field num_attention_heads is 0; expected 1 to"),
        ("num_attention_heads", "x" * 1_000_000, "num_attention_heads"),
        ("hidden_size", -1, "config field hidden_size is -1; expected 1 to"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("inf")}, "config field rope_theta is inf"),
        ("num_key_value_heads", 0, "config field num_key_value_heads is 0; expected 1 to"),
        ("max_position_embeddings", 1, "config field max_position_embeddings is 1; expected 2 to"),
        ("rms_norm_eps", float("nan"), "config field rms_norm_eps is nan; expected a positive number"),
        ("vocab_size", 1 << 40, "config field vocab_size is 1099511627776; expected 1 to"),
        ("hidden_act", "\x1b[31m" * 99, "cannot load model"),
    ],
)
def test_configs_of_folders_are_bounded_too(key: str, value: object, complaint: str, tmp_path: Path) -> None:
    with bounded(key):
        (problem,) = problems(folder_with(tmp_path, key, value))
    assert_told(problem, str(tmp_path), complaint)


def test_a_config_that_is_larger_than_its_files_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with bounded("a large vocabulary"):
        told = problems(folder_with(tmp_path, "vocab_size", 1 << 26), load=True)
    assert re.search(r"has shape \[\d+, \d+\]; expected \[67108864, \d+\]", told[0])


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
             "special_tokens_map.json", "model.safetensors.index.json"],
)  # fmt: skip
def test_files_of_folders_are_no_pipes_and_bounded(name: str, tmp_path: Path) -> None:
    path = folder_with(tmp_path, "torch_dtype", "float32") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert problems(tmp_path) == [f"{path} is not a regular file"]
    path.unlink()
    path.write_bytes(PANICS)
    if name == "tokenizer.json":
        (problem,) = problems(tmp_path)
        assert_told(problem, f"cannot read the tokenizer of {path}")
    os.truncate(path, 1 << 40)
    (problem,) = problems(tmp_path)
    assert_told(problem, f"{path} has 1099511627776 bytes; expected at most")


def test_nor_are_those_of_adapters_and_heads(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    reads = {"adapter_config.json": read_adapter, "config.json": lambda path: load_checkpoint(str(path), None)}
    for name, read in reads.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelError, match=f"{name} is not a regular file"):
            read(tmp_path)


def test_a_long_header_of_safetensors_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 32))
        file.truncate(1 << 33)
    with pytest.raises(ModelError, match="its header has 4294967304 bytes; expected at most 16777216"):
        check_whole(tmp_path / "model.safetensors")


def test_one_line() -> None:
    assert one_line("a\n b\x1b\u202e") == r"a b\x1b\u202e"
    assert one_line("x" * 300) == "x" * 300
    for text_ in ("x" * 301, "\x1b" * 10_000_000, "ab\n" * 400):
        line = one_line(text_)
        assert len(line) <= 300
        assert "…" in line
