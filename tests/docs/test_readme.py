"""What the README shows is true: its example runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_client_example_runs(address):
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert example.count("127.0.0.1:50051") == 1
    example = example.replace("127.0.0.1:50051", address)
    done = subprocess.run([sys.executable, "-"], input=example, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^model: \S+$", done.stdout, re.MULTILINE)
    assert re.search(r"^(stop|length); \d+ of \d+ drafts accepted$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("the same tokens: True\n")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document):
    """`engine/verify.py` in backticks is a promise that such a file is there."""
    named = re.findall(
        r"`((?:engine|server|client|models|tests|proto|docs|examples|deploy)/[\w./-]+)`", document.read_text("utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    history = {"CHANGELOG.md", "log.md"}  # which names what there was
    for document in [document for document in DOCUMENTS if document.name not in history]:
        assert set(re.findall(r"`make ([a-z0-9-]+)", document.read_text("utf-8"))) <= targets, document


def modules_of(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}


@pytest.mark.parametrize("package", ["engine", "server", "client", "models", "loadtest", "benchmarks"])
def test_the_architecture_tells_of_every_module(package):
    """A row for each room, with its modules, and one for each module outside of a room."""
    architecture = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    [section] = re.findall(rf"^### {package}\n(.*?)(?=^##|\Z)", architecture, re.MULTILINE | re.DOTALL)
    told = {}
    for owners, modules in re.findall(r"^\| (`.*?`) \|.*\| (.*?) ?\|$", section, re.MULTILINE):
        told |= {owner: set(re.findall(r"`(\w+)`", modules)) for owner in re.findall(r"`([\w./]+)`", owners)}
    rooms = {
        f"{path.parent.relative_to(ROOT / package)}/": path.parent for path in (ROOT / package).rglob("__init__.py")
    }
    here = {f"{name}.py": set() for name in modules_of(ROOT / package)}
    assert told == here | {name: modules_of(folder) for name, folder in rooms.items() if name != "./"}


def test_the_questions_of_readers_lead_somewhere():
    """Every file that an answer names is there, and every `Class.method` in one of them."""
    architecture = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    [section] = re.findall(r"^## Where is ...\?\n(.*?)(?=^##)", architecture, re.MULTILINE | re.DOTALL)
    answers = re.findall(r"^\| Wh.*?\? \| (.*) \|$|^\| What.*?\? \| (.*) \|$", section, re.MULTILINE)
    assert len(answers) >= 10
    for answer in map("".join, answers):
        files = [ROOT / name for name in re.findall(r"`((?:engine|server)/[\w./]+)`", answer)]
        assert files, answer
        source = "".join(file.read_text("utf-8") for file in files if file.is_file())
        methods = [name.partition(".")[2] for name in re.findall(r"`([A-Z]\w+\.\w+)`", answer)]
        known = source + "".join(path.read_text("utf-8") for path in ROOT.glob("engine/*.py"))
        assert [name for name in methods if f"def {name}(" not in known] == []
