"""The training text: Python's own standard library, read from wherever this interpreter keeps it.

Knows files and splits; knows nothing of models. Whole modules, with their tests, are held out: nothing of
them is ever trained on, so a completion of one of their functions is a completion of unseen code.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (
    "argparse",
    "bisect",
    "calendar",
    "colorsys",
    "configparser",
    "csv",
    "fractions",
    "graphlib",
    "heapq",
    "json",
    "sched",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "zipfile",
)
"""Modules and packages kept for evaluation, together with every test file that names one of them."""

# Tables and generated text teach a language model nothing about code.
_SKIPPED = ("site-packages", "encodings", "pydoc_data", "__pycache__", "lib2to3/tests/data", "test/cjkencodings")


@dataclass(frozen=True)
class Corpus:
    """Files by split; `library` is repeated more often in training than `tests`."""

    library: tuple[Path, ...]
    tests: tuple[Path, ...]
    held_out: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Hash of every training file's content: the same text, or not the same model."""
        digest = hashlib.sha256()
        for path in self.library + self.tests:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def stdlib() -> Path:
    """Folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find(root: Path | None = None) -> Corpus:
    """Sort every readable source file of the standard library into its split."""
    root = root or stdlib()
    library, tests, held_out = [], [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in _SKIPPED) or not _is_utf8(path):
            continue
        if is_held_out(name):
            held_out.append(path)
        elif "test" in name:
            tests.append(path)
        else:
            library.append(path)
    return Corpus(tuple(library), tuple(tests), tuple(held_out))


def is_held_out(name: str) -> bool:
    """`json/decoder.py`, `test/test_json/test_dump.py`, `test/test_heapq.py` -> True; `ast.py` -> False."""
    parts = name.removesuffix(".py").split("/")
    words = {word for part in parts for word in (part, part.removeprefix("test_"))}
    return any(held in words for held in HELD_OUT)


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Starts of functions from the held-out modules (tests excluded), cut after signature and docstring.

    Each prompt carries up to 600 characters of what stands before the function, as an editor would send.
    """
    root = stdlib()
    paths = [p for p in find().held_out if "test" not in p.relative_to(root).as_posix()]
    prompts = [prompt for path in paths for prompt in _function_starts(path.read_text("utf-8"))]
    random.Random(seed).shuffle(prompts)  # noqa: S311 - a sample of prompts, no secret
    return prompts[:count]


def _function_starts(source: str) -> list[str]:
    lines = source.splitlines(keepends=True)
    starts = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 3:
            continue
        body = node.body[1] if ast.get_docstring(node) else node.body[0]
        before = _whole_lines("".join(lines[: node.lineno - 1])[-600:])
        starts.append(before + "".join(lines[node.lineno - 1 : body.lineno - 1]))
    return starts


def _whole_lines(text: str) -> str:
    """Without the line that a cut began in the middle of."""
    return text[text.find("\n") + 1 :]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError:
        return False  # a few tests of the interpreter are deliberately no UTF-8
    return True
