"""Commands as processes that get a signal, while they load and while they work: one sentence, and no traceback."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.process import ServerProcess
from pilotfish.models import embedded_target
from tests.processes import alive_in

PROGRAM = "from pilotfish.server.cli import main; raise SystemExit(main())"
QUICK = ("--threads", "1", "--warm-up-seconds", "0")
LONG = {
    "bench": ("bench", *QUICK, "--batches", "1", "--tokens", "200", "--seconds", "600", "--rounds", "900"),
    "quality": ("quality", *QUICK, "--seconds", "600", "--tokens", "100000", "--length", "128"),
    "train-draft": ("train-draft", *QUICK, "--texts", "64", "--tokens", "64", "--kv-memory", "0.1"),
    "check": ("check", *QUICK),
}
KEPT = {
    "bench": "the table has the rounds so far",
    "quality": "the table has the texts so far",
    "verify": "answers were compared",
    "train-draft": "run the same command again to resume",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess("--max-model-len", "256", "--warm-up-seconds", "0", log=log) as running:
        yield running


@contextmanager
def stopped(command: Sequence[str], seen: str, number: signal.Signals) -> Iterator[tuple[int, str, str]]:
    """Run a command, send the signal after a line with `seen`; yield its exit code and output. It leaves no process."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    read = b""
    try:
        while seen.encode() not in read:
            assert select.select([process.stderr], [], [], 60)[0], f"no {seen!r} in {read!r}"
            more = os.read(process.stderr.fileno(), 1 << 16)
            assert more, f"ended: {read!r}"
            read += more
        process.send_signal(number)
        out, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    yield process.returncode, out.decode(), (read + rest).decode()
    assert not alive_in(process.pid)


CASES = [
    ("bench", "loading", signal.SIGINT),
    ("bench", "measuring: ", signal.SIGINT),
    ("bench", "tokens/s", signal.SIGTERM),
    ("verify", "connecting", signal.SIGINT),
    ("verify", "comparing single requests: ", signal.SIGTERM),
    ("verify", "comparing requests", signal.SIGINT),
    ("quality", "loading", signal.SIGTERM),
    ("quality", "KL", signal.SIGINT),
    ("train-draft", "disk:", signal.SIGINT),
    ("train-draft", "generating", signal.SIGTERM),
    ("check", "checking", signal.SIGINT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seen", "number"), CASES, ids=[f"{n}, {s}" for n, s, _ in CASES])
def test_one_sentence_and_an_exit_code(
    name: str, seen: str, number: signal.Signals, server: ServerProcess, tmp_path: Path
) -> None:
    command = ("verify", server.address, "--seconds", "20", "--tokens", "4") if name == "verify" else LONG[name]
    if name == "train-draft":
        command += ("--out", str(tmp_path / "head"))
    with stopped(["-c", PROGRAM, *command], seen, number) as (code, out, err):
        assert code == 128 + number, err
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith(f"pilotfish {name}: stopped; ")
        if seen in ("tokens/s", "KL", "comparing requests", "generating", "disk:"):
            assert KEPT[name] in err.splitlines()[-1]
        assert ("off" in out) == (seen in ("tokens/s", "comparing requests"))
        assert ("perplexity" in out) == (seen == "KL")


@pytest.mark.slow
def test_a_load_ends_with_its_report_and_its_server(tmp_path: Path) -> None:
    """Also while its server loads."""
    command = ["-m", "loadtest", "load", "--callers", "2", "--out", str(tmp_path)]
    for seen, number in (("starting a server", signal.SIGTERM), ("2 callers: ", signal.SIGINT)):
        with stopped(command, seen, number) as (code, out, err):
            assert code == 128 + number
            assert "Traceback" not in err
            assert err.splitlines()[-1].startswith("python -m loadtest load: stopped; ")
            assert ("tokens/s" in out) == (number == signal.SIGINT)


@pytest.mark.slow
def test_a_result_can_be_piped(tmp_path: Path) -> None:
    """stdout has the JSON only; the progress on stderr has no control characters."""
    command = ["bench", *QUICK, "--batches", "1", "--tokens", "8", "--rounds", "1", "--json", str(embedded_target())]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 3
    assert "measuring: 0/3" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
