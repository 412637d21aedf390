"""From C to a library in use: how levels are built, which one a start loads, and what it does with a bad one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pilotfish.engine.native import PackedMatrix, build, compiled, instructions, library, matmul
from tests import conftest
from tests.drawn import numbers
from tests.engine.native.test_native import Problem

ROOT = Path(__file__).parents[3]
IS_X86 = len(build.LEVELS) == 7
pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels here")
LIBRARIES = build.read_manifest().libraries if library() else {}
ORDER = [level.name for level in compiled.runnable() if level.name in LIBRARIES]
BEST = LIBRARIES[ORDER[0]].file if ORDER else ""
NONE = {"PILOTFISH_CACHE": "/dev/null", "HOME": "/dev/null"}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A copy of the folder of C, from which the next call loads; compilers that are called leave a file `called`."""
    folder, programs = tmp_path / "native", tmp_path / "bin"
    shutil.copytree(build.HERE, folder)
    programs.mkdir()
    for name in build.COMPILERS:
        (programs / name).write_text(f"#!/bin/sh\ntouch {tmp_path / 'called'}\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("PILOTFISH_NATIVE", raising=False)
    monkeypatch.setattr(compiled, "FOLDER", folder)
    caplog.set_level("WARNING")
    for asked in (compiled.loaded, compiled.function):
        asked.cache_clear()
    yield folder
    assert not (tmp_path / "called").exists(), "a compiler ran"
    for asked in (compiled.loaded, compiled.function):
        asked.cache_clear()


def multiplies_right() -> bool:
    weight, x = numbers(70, 48), numbers(5, 48)
    return torch.allclose(PackedMatrix.of(weight).multiply(x, None, torch.float32), x @ weight.t(), atol=1e-4)


def other_users(folder: Path) -> None:
    (folder / "pilotfish").mkdir(mode=0o777)
    if os.getuid() == 0:
        os.chown(folder / "pilotfish", 12345, 12345)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda folder: folder.chmod(0o500),
        lambda folder: (folder / "pilotfish").write_text("no folder"),
        lambda folder: (folder / "pilotfish").symlink_to("/nonexistent"),
        lambda folder: folder.rmdir(),
        other_users,
    ],
    ids=["read-only", "damaged", "dangling", "none", "another user's"],
)
def test_no_state_of_the_cache_changes_what_is_loaded(
    fresh: Path, prepare: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = fresh.parent / "cache"
    cache.mkdir()
    prepare(cache)
    monkeypatch.setenv("PILOTFISH_CACHE", str(cache))
    assert compiled.loaded().file == BEST
    assert caplog.text == ""
    assert multiplies_right()
    assert list(cache.rglob("*.so")) == []


def test_a_changed_source_is_told_and_compiled_by_nobody(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, change in (("matmul.c", b"\n#error never\n"), ("vectors.h", b"// na\xefve\n")):
        (fresh / name).write_bytes((fresh / name).read_bytes() + change)
        caplog.clear()
        compiled.loaded.cache_clear()
        assert compiled.loaded().file == BEST
        [record] = caplog.records
        assert f"the sources have changed since {BEST} was built" in record.message
        assert "`make install`" in record.message
        assert "`make install`" in instructions()


def truncated(to: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(to) if to > 1 else int(path.stat().st_size * to))


def flipped(at: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1 << int(at * 1000) % 8
        path.write_bytes(content)

    return flip


DAMAGE = {
    **{f"cut to {n}": truncated(n) for n in (0, 10, 64, 1000, 4096, 150_000)},
    "cut to a half": truncated(0.5),
    **{f"a bit at {at}": flipped(at) for at in (0, 0.003, 0.3, 0.77, 1)},
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "removed": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path.name)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_not_loaded_and_the_log_says_what_to_do(
    fresh: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(fresh / BEST)
    found = compiled.loaded()
    assert found.file == (LIBRARIES[ORDER[1]].file if ORDER[1:] else "")
    [record] = caplog.records
    assert BEST in record.message
    assert "fix: reinstall Pilotfish; in a checkout, `make install`" in record.message
    assert BEST in instructions()
    for built in LIBRARIES.values():
        shutil.rmtree(fresh / built.file) if (fresh / built.file).is_dir() else (fresh / built.file).unlink(
            missing_ok=True
        )
    compiled.loaded.cache_clear()
    caplog.clear()
    assert library() is None
    [record] = caplog.records
    assert "using torch (several times slower)" in record.message


def test_no_manifest_however_damaged_makes_a_start_fail(fresh: Path) -> None:
    manifest, draw = fresh / build.MANIFEST, random.Random(3)
    whole = manifest.read_bytes()
    damaged = [whole[: len(whole) * i // 12] for i in range(12)]
    damaged += [b"[]", b"null", b'{"libraries": 3}', b"\xff\xfe", b"9" * 9999, b"[" * 99999]
    size, file = (str(getattr(LIBRARIES[ORDER[0]], name)).encode() for name in ("size", "file"))
    damaged += [whole.replace(size, other) for other in (b"1e999", b"9" * 13, b"9" * 30, b"-2", b"NaN", b"[]")]
    damaged += [whole.replace(file, other) for other in (b"a\\u0000", b"", b"..", b"/dev/zero", b"\\ud800")]
    for _ in range(30):
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(content))
    files = {"", *(built.file for built in LIBRARIES.values())}
    for content in damaged:
        manifest.write_bytes(content)
        compiled.loaded.cache_clear()
        assert compiled.loaded().file in files
        assert instructions()
    manifest.unlink()
    compiled.loaded.cache_clear()
    assert f"no libraries in {fresh}" in instructions()


def test_what_was_checked_is_what_runs(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = build.read_library

    def then_swapped(built: build.BuiltLibrary, folder: Path) -> bytes:
        content = read(built, folder)
        (folder / built.file).write_bytes(b"swapped")  # in place: who maps the file has this now
        return content

    monkeypatch.setattr(build, "read_library", then_swapped)
    assert compiled.loaded().file == BEST
    assert (fresh / BEST).read_bytes() == b"swapped"
    assert multiplies_right()


def test_where_no_memory_may_be_run_the_file_is(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert compiled.loaded().file == BEST
    assert multiplies_right()


def test_without_it_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PILOTFISH_NATIVE", "0")
    caplog.set_level("INFO")
    assert library() is None
    assert "PILOTFISH_NATIVE is 0; using torch (several" in caplog.text
    assert instructions() == "torch (several times slower): C kernels not loaded (PILOTFISH_NATIVE is 0)"
    matmul.multiplies.cache_clear()
    assert not matmul.multiplies(torch.float32)
    matmul.multiplies.cache_clear()
    assert Problem([(4, 9)], 16, (2, 2, 64), torch.float32).solve().isfinite().all()


# ------------------------------------------------------------------------------------------------ which level is loaded

HASWELL = "ssse3 sse4_1 sse4_2 popcnt avx avx2 fma f16c bmi1 bmi2 abm movbe"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.skipif(not IS_X86, reason="flags of x86")
@pytest.mark.parametrize(
    ("processors", "level"),
    [
        ([], "sse2"),
        (["sse2"], "sse2"),
        ([HASWELL.replace("avx2 fma", "")], "sse4.2"),  # Sandy Bridge
        ([HASWELL], "avx2"),
        ([HASWELL.replace(" fma", "")], "sse4.2"),  # as a hypervisor may hide it
        ([f"{HASWELL} avx_vnni gfni vaes vpclmulqdq"], "avx-vnni"),
        ([SKYLAKE], "avx512"),
        ([SKYLAKE.replace(" avx512bw", "")], "avx2"),  # Knights Landing
        ([f"{SKYLAKE} avx512_vnni"], "avx512-vnni"),
        ([f"{SKYLAKE} avx512_vnni avx512_bf16 avx_vnni gfni vaes vpclmulqdq"], "avx512-bf16"),
        ([SKYLAKE, HASWELL], "avx2"),  # a process moves between unequal cores
    ],
)
def test_the_best_level_that_every_core_runs(
    processors: list[str], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("".join(f"processor\t: 0\nflags\t\t: fpu {flags}\n\n" for flags in processors))
    monkeypatch.setattr(compiled, "CPUINFO", tmp_path / "cpuinfo")
    assert compiled.runnable()[0].name == level


@pytest.mark.skipif(not IS_X86 or shutil.which("objdump") is None, reason="needs x86 and objdump")
@pytest.mark.parametrize(
    ("level", "used", "not_used"),
    [
        ("sse2", ["pmaddwd"], ["%ymm", "pmaddubsw"]),
        ("sse4.2", ["pmaddubsw"], ["%ymm"]),
        ("avx2", ["vpmaddubsw", "vfmadd"], ["%zmm", "vpdpbusd"]),
        ("avx-vnni", ["{vex} vpdpbusd"], ["%zmm"]),
        ("avx512", ["%zmm", "vpmaddubsw"], ["vpdpbusd", "vdpbf16ps"]),
        ("avx512-vnni", ["%zmm", "vpdpbusd"], ["vdpbf16ps"]),
        ("avx512-bf16", ["%zmm", "vpdpbusd", "vdpbf16ps"], []),
    ],
)
def test_a_level_has_its_own_instructions_and_no_better_ones(level: str, used: list[str], not_used: list[str]) -> None:
    if level not in LIBRARIES:
        pytest.skip(f"the compiler does not support {level}")
    path = build.HERE / LIBRARIES[level].file
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--no-addresses", path]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [word in code for word in used] == [True] * len(used)
    assert [word for word in not_used if word in code] == []


# ------------------------------------------------------------------------------------------------------------- building

COMPILER = """#!/bin/sh
echo "$*" >>{log}
case "$*" in *{unknown}*) exit 1 ;; *" -E "*) exit 0 ;; *{failing}*) echo "matmul.c:1: error" >&2; exit 1 ;; esac
while [ "$1" != -o ]; do shift; done
{{ echo "{what}"; basename "$2"; }} >"$2"
"""


class Workshop:
    """A folder to build into, and a compiler that writes what it is asked for, not what the sources say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self._log, self._cc = folder / "made", folder / "log", folder / "compiler"
        self.told: list[str] = []
        self.made.mkdir()
        monkeypatch.setenv("CC", str(self._cc))

    def build(self, what: str = "first", *, unknown: str = "nothing", failing: str = "nothing") -> bool:
        """Whether it succeeds; `told` and `num_compiled` are of this build."""
        self._cc.write_text(COMPILER.format(log=self._log, what=what, unknown=unknown, failing=failing))
        self._cc.chmod(0o755)
        self._log.write_text("")
        self.told.clear()
        return build.build(self.made, report=self.told.append)

    @property
    def num_compiled(self) -> int:
        return sum(" -E " not in line for line in self._log.read_text().splitlines())

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.made.glob("native-*")}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def test_all_levels_are_built_once_and_again_when_one_is_damaged(workshop: Workshop) -> None:
    assert workshop.build()
    manifest = build.read_manifest(workshop.made)
    assert manifest.libraries.keys() == set(build.ALL)
    assert [build.read_library(built, workshop.made).decode().split()[0] for built in manifest.libraries.values()] == (
        ["first"] * len(build.ALL)
    )
    assert workshop.num_compiled == len(build.ALL)
    assert workshop.build()
    assert workshop.num_compiled == 0
    (workshop.made / manifest.libraries[build.ALL[-1]].file).write_bytes(b"")
    assert workshop.build()
    assert workshop.num_compiled == len(build.ALL)
    assert workshop.told == []


def test_who_reads_meanwhile_finds_what_its_manifest_names(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for what in ("first", "second", "third"):
        monkeypatch.setattr(build, "fingerprint", lambda what=what: what)
        assert workshop.build(what)
        files.append({built.file for built in build.read_manifest(workshop.made).libraries.values()})
        assert workshop.files == set().union(*files[-2:]), "those of the manifest, and of the one before it"


@pytest.mark.skipif(not IS_X86, reason="levels of x86")
def test_a_level_that_is_not_known_or_fails_costs_itself_alone(workshop: Workshop) -> None:
    assert workshop.build(unknown="march=cooperlake")
    assert [line.split(":")[0] for line in workshop.told] == ["C kernels for avx512-bf16 are not built"]
    assert build.read_manifest(workshop.made).libraries.keys() == set(build.ALL) - {"avx512-bf16"}
    (workshop.made / build.MANIFEST).unlink()
    for _ in range(2):  # an error is told again
        assert not workshop.build(failing="march=haswell")
        assert workshop.told == ["C kernels for avx2 are not built: matmul.c:1: error"]
        assert build.read_manifest(workshop.made).libraries.keys() == set(build.ALL) - {"avx2"}


def test_no_compiler_is_said_in_a_line_and_no_error(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.build(workshop.made, report=workshop.told.append)
    [line] = workshop.told
    assert "no C compiler found" in line
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    assert build.compiler()[:4] == [sys.executable, "-m", "ziglang", "cc"]


def test_make_compiles_a_changed_source_and_tests_refuse_to_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    would_run = ["make", "--dry-run", "--what-if", "engine/native/rows.h", "install"]
    assert "engine/native/build.py" in subprocess.run(would_run, cwd=ROOT, capture_output=True, text=True).stdout
    conftest.refuse_stale_c()
    monkeypatch.setattr(build, "fingerprint", lambda: "of other sources")
    monkeypatch.setattr(conftest.runpy, "run_path", lambda path: vars(build))
    with pytest.raises(pytest.UsageError, match="run `make install`"):
        conftest.refuse_stale_c()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_is_of_its_platform_and_runs_where_there_is_no_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    [wheel] = tmp_path.glob("pilotfish-*-py3-none-*linux*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in inside} == {"pilotfish", wheel.name.partition("-py3")[0] + ".dist-info"}
    names = [Path(name).name for name in inside if name.startswith("pilotfish/engine/native/")]
    assert {built.file for built in LIBRARIES.values()} | {build.MANIFEST} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h"))]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    told = (
        "import json, pilotfish.engine.native.compiled as c; "
        "print(json.dumps([c.__file__, c.loaded().file, c.instructions()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", told], env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", **NONE},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    where, file, said = json.loads(done.stdout)
    assert Path(where).is_relative_to(tmp_path)
    assert file == BEST
    assert said == instructions()
    assert done.stderr == ""
