"""The wheels of `make wheels`: what is in them, and that they run where there is no compiler, on x86-64 and on aarch64.

`make test-wheels` runs it. aarch64 is emulated: Debian's Python for it is unpacked, not installed, and qemu runs it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo import free_ports
from pilotfish.engine.native import build

pytestmark = pytest.mark.timeout(1500)
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LEVELS = {
    "x86_64": {"sse2", "sse4.2", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16"},
    "aarch64": {"neon", "dotprod"},
}
PIP = [sys.executable, "-m", "pip"]
ARM_PIP = [
    *("--only-binary=:all:", "--python-version=311", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"),
    *(f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 31)),
    "--platform=manylinux2014_aarch64",
]
# The last of PyPI's builds for CPUs with ARM: newer ones are for CUDA, and PyTorch's own index has no place in a test.
ARM_TORCH = "torch==2.10.0"
QEMU = "qemu-aarch64"
HEALTH = [sys.executable, "-m", "pilotfish", "health"]


def run(command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """By machine."""
    folder = tmp_path_factory.mktemp("dist")
    for machine in LEVELS:
        environment = os.environ | {"PILOTFISH_BUILD_MACHINE": machine}
        run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], env=environment)
    return {machine: next(folder.glob(f"*{machine}.whl")) for machine in LEVELS}


@pytest.fixture
def project(tmp_path):
    """A folder of somebody who has packages of his own with the names of ours."""
    for name in ("client", "engine", "server", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not that one')\n")
    return tmp_path


@contextmanager
def serving(command, project, environment):
    """`pilotfish serve` of the embedded pair; yields its address."""
    grpc_port, http_port = free_ports()
    options = ["--grpc-port", grpc_port, "--http-port", http_port, "--warm-up-seconds", 0, "--threads", 1]
    with (project / "log").open("w") as log:
        process = subprocess.Popen([*map(str, [*command, "serve", *options])], cwd=project, env=environment, stderr=log)
        try:
            address = f"127.0.0.1:{grpc_port}"
            until = time.monotonic() + 600
            while subprocess.run([*HEALTH, address], capture_output=True).returncode and time.monotonic() < until:
                assert process.poll() is None, (project / "log").read_text()
                time.sleep(1)
            yield address
        finally:
            process.terminate()
            assert process.wait(60) == 0, (project / "log").read_text()


@pytest.mark.parametrize("machine", LEVELS)
def test_a_wheel_has_one_package_with_kernels_for_every_processor(wheels, machine):
    wheel = zipfile.ZipFile(wheels[machine])
    names = wheel.namelist()
    assert {name.partition("/")[0] for name in names} == {"pilotfish", f"pilotfish-{PROJECT['version']}.dist-info"}
    assert len(set(names)) == len(names)
    assert {
        "pilotfish/client/sync_client.py",
        "pilotfish/v1/generation_pb2.py",
        "pilotfish/models/target/config.json",
    } < set(names)
    manifest = json.loads(wheel.read("pilotfish/engine/native/native.json"))
    assert manifest["libraries"].keys() == LEVELS[machine]
    header = {"x86_64": 62, "aarch64": 183}[machine]  # ELF's numbers of machines
    for built in manifest["libraries"].values():
        library = wheel.read(f"pilotfish/engine/native/{built['file']}")
        assert int.from_bytes(library[18:20], "little") == header
    assert int(re.search(r"manylinux_2_(\d+)_", wheels[machine].name)[1]) <= 28, "torch's own"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this machine is another one")
def test_it_runs_without_a_compiler_beside_folders_of_the_same_names(wheels, project):
    """README's Python. Dependencies are this environment's."""
    venv.create(project / ".venv", with_pip=False)
    python = project / ".venv" / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    run([*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheels["x86_64"]])
    assert {path.name for path in site.iterdir()} == {"pilotfish", f"pilotfish-{PROJECT['version']}.dist-info"}
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    environment = {"PATH": "/nowhere", "HOME": str(project)}
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    with serving([python, "-m", "pilotfish"], project, environment) as address:
        (project / "example.py").write_text(example.replace("127.0.0.1:50051", address))
        assert run([python, "example.py"], cwd=project, env=environment)
    assert "native-" in run([python, "-m", "pilotfish", "check"], cwd=project, env=environment)


@pytest.fixture(scope="module")
def arm_python(wheels, tmp_path_factory):
    """A Python for aarch64 with the wheel and what it needs: a script that has qemu run it."""
    if not all(map(shutil.which, (QEMU, "apt-get", "dpkg"))):
        pytest.skip(f"needs {QEMU}, apt-get and dpkg")
    folder = tmp_path_factory.mktemp("arm")
    root, site = folder / "root", folder / "site"
    for name in ("state/lists/partial", "cache/archives/partial", "etc"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text("deb http://deb.debian.org/debian bookworm main\n")
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
        "Dir::State": folder / "state", "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": folder / "etc",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"])
    run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", "python3", "libstdc++6", "libgomp1"])
    for package in (folder / "cache" / "archives").glob("*.deb"):
        run(["dpkg", "-x", package, root])
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shutil.which(QEMU)} -L {root} -0 "$0" {root}/usr/bin/python3.11 "$@"\n')
    python.chmod(0o755)
    needed = [name for name in PROJECT["dependencies"] if not name.startswith("torch")]
    target = [*PIP, "install", "--quiet", "--no-compile", "--target", site, *ARM_PIP]
    run([*target, *needed, "filelock", "sympy", "networkx", "fsspec"])
    run([*target, "--no-deps", ARM_TORCH, wheels["aarch64"]])
    return python, {"PYTHONHOME": f"{root}/usr", "PYTHONPATH": str(site)}


def test_it_serves_on_aarch64(arm_python, project):
    python, environment = arm_python
    environment = environment | {"PATH": "/bin:/usr/bin", "HOME": str(project)}
    command = [python, "-m", "pilotfish"]
    with serving(command, project, environment) as address:
        out = run(
            [*command, "generate", "--address", address, "--max-tokens", 8, "def mean(values):"],
            cwd=project,
            env=environment,
        )
    assert out.strip()
    assert "native-" in (found := run([*command, "check"], cwd=project, env=environment))
    assert "NEON" in found


@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos", "aarch64-windows-gnu", "x86_64-windows-gnu"])
def test_the_sources_compile_for_other_systems(target, tmp_path):
    """Compiled; nothing of it is run. Nor is it linked: Zig would first make Windows' libraries, for minutes."""
    flags = [flag for flag in build.FLAGS if flag != "-shared"]
    caches = {f"ZIG_{kind}_CACHE_DIR": str(tmp_path) for kind in ("GLOBAL", "LOCAL")}
    for source in build.sources():
        made = tmp_path / f"{source.stem}.o"
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *flags, "-c", source, "-o", made]
        run(command, env=os.environ | caches)
        assert made.stat().st_size > 500
