"""What is kept from one start to the next: read where it is sound, ignored where it is not, never read from others."""

from __future__ import annotations

import json
import logging
import os
import shutil
from functools import cache
from itertools import count
from types import SimpleNamespace

import pytest

from pilotfish.engine.control import learned
from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.controller import Control
from tests.clockwork import COSTS, READS, Machine

CONFIG = SimpleNamespace(target="none/target", draft=())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "pilotfish"


@cache
def controls() -> dict[str, object]:
    """Which nothing here changes."""
    machine = Machine(next(iter(COSTS.values())), batch=2, acceptance=0.9, prompt=64)
    machine.warm_up()
    return {"plain": machine.control, "rounds": Control()}


def recalled(config=CONFIG) -> AdaptiveK | None:
    fresh = AdaptiveK({"model": READS})
    return fresh if learned.recall(config, {"plain": fresh, "rounds": Control()}) else None


def test_the_next_start_knows_what_this_one_learned(folder):
    assert recalled() is None
    known = controls()
    learned.keep(CONFIG, known)
    again = recalled()
    assert again is not None
    assert again.state() == known["plain"].state()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert file.stat().st_size < learned.MOST_BYTES


def test_another_pair_or_another_option_knows_nothing_of_it(folder, tmp_path):
    learned.keep(CONFIG, controls())
    assert recalled(SimpleNamespace(**{**vars(CONFIG), "target": "none/other"})) is None
    assert recalled(SimpleNamespace(**{**vars(CONFIG), "dtype": "bfloat16"})) is None
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("one")
    local = SimpleNamespace(**{**vars(CONFIG), "target": str(model)})
    learned.keep(local, controls())
    assert recalled(local) is not None
    (model / "weights").write_text("another")
    assert recalled(local) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "null", '{"version": 0}', '{"version": 1}', '{"version": 1, "plain": 3, "rounds": {}}', "\0" * 99],
)
def test_a_damaged_file_is_as_good_as_none(folder, content):
    learned.keep(CONFIG, controls())
    (file,) = folder.iterdir()
    file.write_text(content)
    assert recalled() is None
    learned.keep(CONFIG, controls())
    assert recalled() is not None


def test_a_file_that_is_too_long_and_a_folder_that_others_may_write_are_not_read(folder, monkeypatch):
    learned.keep(CONFIG, controls())
    with monkeypatch.context() as patch:
        patch.setattr(learned, "MOST_BYTES", 100)
        assert recalled() is None
    folder.chmod(0o777)
    assert recalled() is None


def test_a_link_in_place_of_the_folder_or_of_the_file_is_not_followed(folder, tmp_path):
    learned.keep(CONFIG, controls())
    (file,) = folder.iterdir()
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert recalled() is None
    learned.keep(CONFIG, controls())
    assert [path.name for path in elsewhere.iterdir()] == [file.name]
    assert (tmp_path / "tmp" / f"pilotfish-{os.getuid()}" / file.name).exists(), "the other folder serves"
    folder.unlink()
    (folder.mkdir(mode=0o700), file.symlink_to(elsewhere / file.name))
    shutil.rmtree(tmp_path / "tmp")
    assert recalled() is None
    learned.keep(CONFIG, controls())
    assert not file.is_symlink()
    assert recalled() is not None


def test_a_folder_that_is_swapped_after_the_check_is_not_used(folder, tmp_path, monkeypatch):
    dump, theirs = json.dump, tmp_path / "theirs"
    theirs.mkdir()

    def swap(*arguments, **options):
        folder.rename(tmp_path / "checked")
        folder.symlink_to(theirs)
        dump(*arguments, **options)

    monkeypatch.setattr(learned.json, "dump", swap)
    learned.keep(CONFIG, controls())
    assert list(theirs.iterdir()) == []
    assert [path.suffix for path in (tmp_path / "checked").iterdir()] == [".json"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder to others")
def test_another_users_folder_is_not_used(folder):
    learned.keep(CONFIG, controls())
    os.chown(folder, 12345, 12345)
    assert recalled() is None


def test_half_a_state_leaves_a_control_that_works(folder):
    learned.keep(CONFIG, controls())
    (file,) = folder.iterdir()
    state = json.loads(file.read_text())
    state["plain"]["acceptance"] = [{"proposer": "model", "is_found": False, "common": [1], "hits": [], "expected": []}]
    file.write_text(json.dumps(state))
    machine = Machine(next(iter(COSTS.values())), batch=2, acceptance=0.9, prompt=64)
    assert not learned.recall(CONFIG, {"plain": machine.control, "rounds": Control()})
    machine.run(50)
    machine.schedule.check_invariants()


def test_the_folder_does_not_grow_without_end(folder, monkeypatch):
    monkeypatch.setattr(learned, "MOST_FILES", 3)
    known, times = controls(), count(1)
    for name in "abcde":
        learned.keep(SimpleNamespace(**{**vars(CONFIG), "target": name}), known)
        for file in folder.iterdir():
            if file.stat().st_mtime > 1e6:
                os.utime(file, (next(times),) * 2)
    learned.keep(CONFIG, known)
    assert len(list(folder.iterdir())) == 3
    assert recalled() is not None


def test_nowhere_to_write_costs_nothing(monkeypatch, caplog):
    def nowhere(*, writable: bool = False):
        raise FileNotFoundError("nowhere")
        yield

    monkeypatch.setattr(learned, "cache_folders", nowhere)
    with caplog.at_level(logging.INFO, learned.__name__):
        learned.keep(CONFIG, controls())
    assert "what was learned is not kept: nowhere" in caplog.text
