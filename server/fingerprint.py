"""The fingerprint of a served model, which names the target's files and number types. Loads no weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.config import EngineConfig
from engine.model.bounded import find_file
from engine.model.gguf.files import open_gguf

VERSION = 1  # to be increased when sampling gives other tokens for the same logits, seed and position
_WHOLE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
_SAMPLE = 4096  # bytes that are read of each part of a file with weights
_PART, _MOST_PARTS = 1 << 20, 2048  # bytes of a part at least; parts of a file at most


def fingerprint(config: EngineConfig, dtype: str) -> str:
    """Return 16 hexadecimal digits that depend on the target's files and on the types of weights, activations and K/V.

    Small files are read whole, weights in samples: of each MiB 4 KiB, of large files fewer. Drafts do not count,
    nor does the machine: float results of two kinds of machines may differ in the last bits.
    """
    kept = "" if config.kv_cache_dtype == "auto" else f" {config.kv_cache_dtype}"
    digest = hashlib.blake2b(f"{VERSION} {config.weights} {dtype}{kept}".encode(), digest_size=8)
    gguf = open_gguf(config.target, config.revision)
    if gguf is not None:
        with gguf.path.open("rb") as file:
            digest.update(file.read(gguf.header_bytes))
        for part in gguf.paths:
            digest.update(_sampled(part))
        return digest.hexdigest()
    path = find_file(config.target, "config.json", config.revision)
    folder = Path(config.target) if path is None else path.parent
    for name in _WHOLE:
        found = folder / name
        if found.is_file():
            digest.update(name.encode() + found.read_bytes())
    for found in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(_sampled(found))
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for start in range(0, size, max(_PART, size // _MOST_PARTS)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.digest()
