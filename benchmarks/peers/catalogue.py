"""The list of programs, the settings of each, and the conversion of a synthetic pair to each program's model format."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.synthetic import SyntheticPair, int8_of
from benchmarks.peers.remote import NotMeasured, Remote

OURS = "pilotfish int8"
_GGUF = ("q8_0", "q4_0")  # weights in llama.cpp's files
_CACHE = 4  # GB of K/V cache for programs that need a fixed size


@dataclass(frozen=True)
class PeerSetting:
    """The settings that all programs share."""

    pair: SyntheticPair
    pythons: Mapping[str, str]  # Python interpreters that have the peers installed, by module; "" is the default
    threads: int
    batch: int  # maximum number of sequences at once
    length: int  # maximum number of tokens of a sequence
    logs: Path

    def python(self, module: str) -> str:
        """Return the Python interpreter of this module."""
        # transformers is a dependency of Pilotfish, so it runs in the same interpreter.
        if module in ("ours", "transformers"):
            return sys.executable
        return self.pythons.get(module, self.pythons[""])


@dataclass(frozen=True)
class Peer:
    """One program with one kind of weights, in one process."""

    name: str
    module: str  # in this package
    weights: str  # in the program's own terms
    draft_weights: str = ""  # the same as `weights` if empty
    speculates: bool = False  # can decode with its own draft model
    plain: bool = True  # can decode without drafts
    auto: bool = False  # chooses the number of drafts by itself
    most: int = 64  # sequences; some programs take only one at a time
    is_ours: bool = False
    drafts: int = 0  # the fixed number of drafts, for programs that need it at the start
    how: str = ""

    def start(self, setting: PeerSetting) -> Remote:
        """Convert the model if needed, and start the process, which loads it.

        Raises:
            NotMeasured: The program is not installed, or cannot load the model.
        """
        settings = _SETTINGS[self.module](self, setting)
        log = setting.logs / f"{self.name.replace(' ', '-')}.log"
        python, module = setting.python(self.module), f"benchmarks.peers.{self.module}"
        return Remote(python, module, settings | {"threads": setting.threads}, log)


# Ours come first. One process covers all modes that it can: OpenVINO's pipeline either always speculates or never.
PEERS = (
    Peer(OURS, "ours", "int8", speculates=True, is_ours=True),
    Peer(f"{OURS} AUTO", "ours", "int8", plain=False, auto=True, is_ours=True),
    Peer(f"{OURS}, draft int4", "ours", "int8", "int4", speculates=True, plain=False, is_ours=True),
    Peer("pilotfish int4", "ours", "int4", speculates=True, is_ours=True),
    Peer("pilotfish int4 AUTO", "ours", "int4", plain=False, auto=True, is_ours=True),
    Peer("pilotfish bf16", "ours", "native", speculates=True, is_ours=True),
    Peer("pilotfish q8_0", "ours", "q8_0", speculates=True, is_ours=True),  # llama.cpp's files
    Peer("pilotfish q4_0", "ours", "q4_0", speculates=True, is_ours=True),
    Peer("openvino int8", "openvino", "int8"),
    Peer("openvino int8 + draft", "openvino", "int8", speculates=True, plain=False),
    Peer("openvino int4", "openvino", "int4"),
    Peer("openvino int4 + draft", "openvino", "int4", speculates=True, plain=False),
    Peer("llama.cpp q8_0", "llama", "q8_0", speculates=True),
    Peer("llama.cpp q4_0", "llama", "q4_0", speculates=True),
    Peer("ik_llama.cpp q8_0", "ik_llama", "q8_0", speculates=True, how="repack"),
    Peer("ik_llama.cpp q4_0", "ik_llama", "q4_0", speculates=True, how="repack"),
    Peer("vllm int8", "vllm", "int8"),
    Peer("vllm int8 + draft", "vllm", "int8", speculates=True, plain=False, drafts=4),
    Peer("vllm bf16", "vllm", "bf16"),
    Peer("vllm f32", "vllm", "f32"),
    Peer("transformers bf16", "transformers", "bf16", how="generate"),
    Peer("transformers bf16 + draft", "transformers", "bf16", speculates=True, plain=False, most=1, how="generate"),
    Peer("transformers bf16 batch", "transformers", "bf16", how="generate_batch"),
)


def _ours(peer: Peer, setting: PeerSetting) -> dict[str, Any]:
    target, draft = setting.pair.target, setting.pair.draft
    weights, draft_weights, dtype = peer.weights, peer.draft_weights or peer.weights, "bfloat16"
    if peer.weights in _GGUF:
        target, draft = _gguf_files(peer, setting)
        weights, draft_weights, dtype = "native", "native", "auto"
    # int4 weights are quantised at load; int8 weights are stored on disk.
    return {
        "target": str(int8_of(target) if weights == "int8" else target),
        "draft": str(int8_of(draft) if draft_weights == "int8" else draft),
        "weights": weights,
        "draft_weights": draft_weights,
        "dtype": dtype,
        "proposer": "model",
        "num_draft_tokens": 16,
        "max_batch_size": setting.batch,
        "max_model_len": setting.length,
        "kv_memory": _CACHE,
    }


def _openvino(peer: Peer, setting: PeerSetting) -> dict[str, Any]:
    bits = peer.weights.removeprefix("int")
    models = [model.with_name(f"{model.name}-openvino-{peer.weights}") for model in _both(peer, setting.pair)]
    for source, out in zip(_both(peer, setting.pair), models, strict=True):
        if not (out / "config.json").exists():
            _convert(setting, "openvino", "export", str(source), str(out), bits)
    return {**_named(models), "batch": setting.batch, "cache": _CACHE}


def _gguf_files(peer: Peer, setting: PeerSetting) -> list[Path]:
    """Return the target and the draft, if the program has one, rounded by llama.cpp."""
    models = [model.with_name(f"{model.name}-llama-{peer.weights}.gguf") for model in _both(peer, setting.pair)]
    for source, out in zip(_both(peer, setting.pair), models, strict=True):
        if not out.exists():
            whole = source.with_name(f"{source.name}-f16.gguf")
            _convert(setting, "llama", "export", str(source), str(whole))
            _convert(setting, "llama", "quantize", str(whole), str(out), peer.weights)
            whole.unlink()
    return models


def _llama(peer: Peer, setting: PeerSetting) -> dict[str, Any]:
    models = _gguf_files(peer, setting)
    return {**_named(models), "batch": setting.batch, "length": setting.length, "how": peer.how}


def _vllm(peer: Peer, setting: PeerSetting) -> dict[str, Any]:
    models = _both(peer, setting.pair)
    if peer.weights == "int8":
        models = [model.with_name(f"{model.name}-vllm-int8") for model in models]
        for source, out in zip(_both(peer, setting.pair), models, strict=True):
            if not (out / "config.json").exists():
                _convert(setting, "vllm", "export", str(source), str(out))
    dtype = {"bf16": "bfloat16", "f32": "float32", "int8": None}[peer.weights]
    sizes = {"batch": setting.batch, "length": setting.length, "cache": _CACHE}
    return {**_named(models), **sizes, "drafts": peer.drafts, "dtype": dtype}


def _transformers(peer: Peer, setting: PeerSetting) -> dict[str, Any]:
    return {**_named(_both(peer, setting.pair)), "batch": setting.batch, "length": setting.length, "how": peer.how}


_SETTINGS = {
    "ours": _ours,
    "openvino": _openvino,
    "llama": _llama,
    "ik_llama": _llama,  # the same files
    "vllm": _vllm,
    "transformers": _transformers,
}


def pythons(given: Sequence[str]) -> dict[str, str]:
    """Parse `["a/python", "vllm=b/python"]` to `{"": "a/python", "vllm": "b/python"}`.

    Raises:
        ValueError: A module is unknown.
    """
    found = {"": sys.executable}
    for one in given:
        module, _, python = one.rpartition("=")
        if module and module not in _SETTINGS:
            raise ValueError(f"peers_python: {one!r} is for {module!r}; there are {', '.join(_SETTINGS)}")
        found[module] = python
    return found


def _both(peer: Peer, pair: SyntheticPair) -> list[Path]:
    return [pair.target, pair.draft] if peer.speculates else [pair.target]


def _named(models: list[Path]) -> dict[str, str | None]:
    return {"model": str(models[0]), "draft": str(models[1]) if len(models) > 1 else None}


def _convert(setting: PeerSetting, module: str, *arguments: str) -> None:
    command = [setting.python(module), "-m", f"benchmarks.peers.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotMeasured(f"converting failed: {done.stderr.strip().splitlines()[-1]}")
