"""The training text: Python's standard library, read from the folder of the running interpreter.

It contains files and splits only. Whole modules and their tests are held out from training, so that completing one of
their functions is a completion of unseen code.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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

# Tables and generated text do not help a language model to learn code.
_SKIPPED = ("site-packages", "encodings", "pydoc_data", "__pycache__", "lib2to3/tests/data", "test/cjkencodings")


@dataclass(frozen=True)
class Corpus:
    """Files by split; `library` is repeated more often in training than `tests`."""

    library: tuple[Path, ...]
    tests: tuple[Path, ...]
    held_out: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Return a hash of all training files: if it differs, the trained model differs too."""
        digest = hashlib.sha256()
        for path in self.library + self.tests:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def stdlib() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


@cache
def find() -> Corpus:
    """Assign every readable source file of the standard library to its split."""
    root = stdlib()
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
    """Return starts of functions from the held-out modules (without tests), cut after signature and docstring.

    Each prompt includes up to 600 characters of text before the function, as an editor would send.
    """
    root = stdlib()
    paths = [p for p in find().held_out if "test" not in p.relative_to(root).as_posix()]
    prompts = [prompt for path in paths for prompt in _function_starts(path.read_text("utf-8"))]
    random.Random(seed).shuffle(prompts)  # noqa: S311 - a sample of prompts, no secret
    return prompts[:count]


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """Return starts of functions from the modules that are trained on, cut in the same way; the library's first."""
    found = find()
    prompts: list[str] = []
    for paths in (found.library, found.tests):
        some = [prompt for path in paths for prompt in _starts_of(path)]
        random.Random(seed).shuffle(some)  # noqa: S311 - a sample of prompts, no secret
        prompts += some
    return prompts[:count]


def _starts_of(path: Path) -> list[str]:
    try:
        return _function_starts(path.read_text("utf-8"))
    except SyntaxError:
        return []  # a few tests of the interpreter are deliberately invalid


def _function_starts(source: str) -> list[str]:
    lines = source.splitlines(keepends=True)
    begins = list(accumulate(map(len, lines), initial=0))  # of each line, in the source
    starts = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 3:
            continue
        body = node.body[1] if ast.get_docstring(node) else node.body[0]
        begin = begins[node.lineno - 1]
        before = _whole_lines(source[max(0, begin - 600) : begin])
        starts.append(before + "".join(lines[node.lineno - 1 : body.lineno - 1]))
    return starts


def _whole_lines(text: str) -> str:
    """Drop the first line, which may be incomplete after a cut."""
    return text[text.find("\n") + 1 :]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError:
        return False  # a few tests of the interpreter are deliberately not UTF-8
    return True
