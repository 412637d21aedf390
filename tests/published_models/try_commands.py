"""`pilotfish verify` and `bench` with a published model: they obey their time, and test something in it.

`make test-published` runs it. No speed is asserted: only that no work begins that would end too late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.process import ServerProcess
from pilotfish.models import published
from pilotfish.server import cli

pytestmark = pytest.mark.timeout(600)
SECONDS = 45  # the default


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(str(published.model("smollm2")), "--threads", "2", log=log) as running:
        yield running


def test_verify_covers_every_setting_in_its_time(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", server.address, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert report["compared"] == sum(sum(row["compared"].values()) for row in report["rows"]) <= report["planned"]
    assert {row["proposer"] for row in report["rows"]} == {"none", "ngram", "suffix"}
    assert all(row["compared"]["alone"] for row in report["rows"]), "every setting, whatever the time"
    # What began last may end late, by about the time of one batch.
    assert report["seconds"] < 2 * SECONDS


def test_bench_ends_with_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(published.model("smollm2")), "--threads", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["speculation"] for row in rows if row["batch"] == 1] == ["off", "fixed", "auto"]
    assert all(row["rounds"] >= 1 and row["same_tokens"] for row in rows)


def test_a_head_is_no_larger_than_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target's matrices are neither copied into the run's folder nor into the head's."""
    out = tmp_path / "head"
    small = ("--texts", "16", "--tokens", "32", "--steps", "2", "--batch-tokens", "320", "--vocab", "2000")
    assert cli.main(["train-draft", str(published.model("smollm2")), "--out", str(out), *small]) == 0
    sizes = {path.name: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert {name for name, size in sizes.items() if size > 10_000} == {"model.safetensors"}
    assert sizes["model.safetensors"] < 20e6, "the target's vocabulary alone has 57 MB"
    assert "disk: about " in capsys.readouterr().err
