"""The folder of a run: texts with the target's hidden states, the training state, and the settings of the run.

A run refuses a folder with other content, or of a run with other settings.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from pilotfish.engine.errors import ModelError

STATE = ".training"  # the folder of a run's own files, in that of the head
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """The texts to generate. A text is a prompt and the target's continuation."""

    texts: int = 4096
    tokens: int = 128  # of each continuation
    prompt_tokens: int = 384  # maximum tokens of a prompt; the last ones are kept
    greedy: float = 0.75  # share of greedy texts; the rest is sampled at `temperature`
    temperature: float = 1.0
    held_out: int = 32  # prompts whose greedy continuations measure acceptance, never trained on
    held_out_tokens: int = 64
    together: int = 64  # texts per file, generated concurrently
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The training schedule. Learning rates warm up, stay constant, and fall to zero over the last 60 % of steps."""

    steps: int = 4000
    batch_tokens: int = 2048
    window: int = 320  # positions of a training sequence
    unroll: int = 4  # consecutive drafts simulated in training ("training-time test")
    early_unroll: int = 1  # the same in the first steps, which learn more from more text than from deeper drafts
    early: float = 0.65  # share of these steps
    decay: float = 0.9  # loss weight per depth: a draft is used only if all before it were accepted
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 1e-3  # AdamW: output matrix and norms
    warmup: int = 50
    seed: int = 0

    def unroll_at(self, step: int) -> int:
        return min(self.unroll, self.early_unroll) if step < self.early * self.steps else self.unroll

    def rate_at(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.6 * self.steps))


@dataclass(frozen=True, slots=True)
class WrittenText:
    """One generated text.

    Attributes:
        tokens: int64 `[n]`, the prompt first.
        prompt: number of prompt tokens.
        rows: bfloat16 `[n - 1, (places + 1) * hidden]`, the target's hidden states at all positions except the last.
    """

    tokens: Tensor
    prompt: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of the target for training: two matrices in bfloat16, `[vocab, hidden]` each, and logits scaling.

    Logits are x * factor, then cap * tanh(x / cap), where x is the product of features and the output matrix.
    """

    embedding: Tensor
    output: Tensor
    factor: float = 1.0
    cap: float | None = None

    def logits(self, features: Tensor, matrix: Tensor) -> Tensor:
        """float32 `[..., n]` of features `[..., hidden]` and rows `[n, hidden]` of the output matrix."""
        made = F.linear(features, matrix).float() * self.factor
        return made if self.cap is None else self.cap * (made / self.cap).tanh()


class RunFolder:
    """Files of one run below `out`."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Open or create the folder. Raises ModelError if it has anything but a run with these settings."""
        self.out, self.folder = out, out / STATE
        manifest = self.folder / "run.json"
        if not manifest.exists() and not _is_hardly_begun(out):
            raise ModelError(f"{str(out)!r} is not the folder of a training run; choose a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            _replace(manifest, json.dumps(settings, indent=1, sort_keys=True))
        try:
            found = json.loads(manifest.read_text("utf-8"))
        except ValueError as error:
            raise ModelError(f"cannot read {manifest}: {error}; remove {str(self.folder)!r} to start over") from error
        asked = json.loads(json.dumps(settings))
        other = list(_differences(found, asked))
        if other:
            changes = ", ".join(other[:4])
            raise ModelError(f"{str(out)!r} has a run with other settings: {changes}; use a new folder or remove it")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context that holds the lock of the folder, which the system releases when this process ends.

        Raises:
            ModelError: another run holds it.
        """
        with (self.folder / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ModelError(f"another run is using {str(self.out)!r}") from error
            yield

    def save_texts(self, name: str, texts: list[WrittenText]) -> None:
        """Write texts as one file, atomically. Raises ModelError if there are none."""
        if not texts:
            raise ModelError("the target generates only empty texts: use other prompts")
        tensors = {
            "tokens": torch.cat([text.tokens for text in texts]).int(),
            "rows": torch.cat([text.rows for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
        }
        self.save(f"{name}.texts", tensors)

    def load_texts(self, name: str) -> Iterator[WrittenText]:
        """The texts of this name; rows are memory-mapped."""
        tensors, _ = self.load(f"{name}.texts")
        lengths: list[int] = tensors["lengths"].tolist()
        tokens = tensors["tokens"].long().split(lengths)
        rows = tensors["rows"].split([length - 1 for length in lengths])
        for text, prompt, hidden in zip(tokens, tensors["prompts"].tolist(), rows, strict=True):
            yield WrittenText(text, prompt, hidden)

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").exists()

    def save(self, name: str, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
        """Write a file of tensors atomically."""
        path = self.folder / f"{name}.safetensors"
        unfinished = path.with_suffix(".unfinished")
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, notes or {})
        unfinished.replace(path)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of a file, memory-mapped. Raises ModelError if it cannot be read."""
        path = self.folder / f"{name}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except Exception as error:
            raise ModelError(f"cannot read {path}: {error}") from error


def _is_hardly_begun(out: Path) -> bool:
    """Whether the folder is missing, empty, or of a run that was interrupted before writing its settings."""
    if not out.exists():
        return True
    inside = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    return inside <= {STATE, f"{STATE}/{_LOCK}", f"{STATE}/run.unfinished"}


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text + "\n", "utf-8")
    unfinished.replace(path)


def _differences(found: dict[str, Any], asked: dict[str, Any]) -> Iterator[str]:
    """List the settings that differ, including nested ones: `schedule.steps 6, not 7`."""
    for key in sorted({*found, *asked}):
        old, new = found.get(key), asked.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{key}.{inner}" for inner in _differences(old, new))
        elif old != new:
            yield f"{key} {old!r}, not {new!r}"
