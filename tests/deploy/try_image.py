"""The image without an engine for containers: its install steps in a clean directory, then its commands, as its user.

`make test-image` runs it; it installs everything anew, which takes minutes. torch comes from wherever pip is told.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo import free_ports, wait_until_serving
from tests.deploy.dockerfile import Stage, stages
from tests.deploy.prometheus import DEPLOY

ROOT = DEPLOY.parent
IMAGE = stages()["cpu"]
STOP_SECONDS = 45


@pytest.fixture(scope="module")
def home():
    """A folder that the image's user can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="pilotfish-image-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def installed(home):
    """/opt/pilotfish, made from what the Dockerfile copies by what it runs."""
    sources, prefix = home / "src", home / "opt"
    _copy(stages()["sources"], sources)
    run = stages()["installed-cpu"].last("RUN").replace("/opt/pilotfish", str(prefix))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TORCH_INDEX": ""}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    environment["PIP_NO_COMPILE"] = "1"  # whoever imports a module compiles it, into the cache: few of the many
    done = subprocess.run(["sh", "-c", run], cwd=sources, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(sources)
    return prefix


def _copy(stage: Stage, folder: Path) -> None:
    """Only what git knows: the build context has nothing else (Dockerfile.dockerignore)."""
    for names, destination in stage.copies():
        known = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in known.stdout.splitlines():
            inner = Path(name).relative_to(names[0]) if (ROOT / names[0]).is_dir() else Path(Path(name).name)
            target = folder / destination / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target, follow_symlinks=False)


@pytest.fixture
def container(home, installed):
    """Its environment, user and writable places; the file system is not its own to write, as root owns it."""
    cache = home / "cache"
    cache.mkdir(exist_ok=True, mode=0o700)
    places = {"/opt/pilotfish": str(installed), "/cache": str(cache), "$PATH": "/nowhere"}  # there is no compiler in it
    environment = {}
    for key, value in IMAGE.environment().items():
        for place, real in places.items():
            value = value.replace(place, real)
        environment[key] = value
    grpc_port, http_port = free_ports()
    environment |= {"PILOTFISH_GRPC_PORT": str(grpc_port), "PILOTFISH_HTTP_PORT": str(http_port)}
    environment |= {"PILOTFISH_HOST": "127.0.0.1", "PILOTFISH_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "compiled")}
    user = {}
    if os.getuid() == 0 and _others_reach((installed / "bin" / "python").resolve()):
        number = int(IMAGE.last("USER").split(":")[0])
        os.chown(cache, number, number)
        user = {"user": number, "group": number, "extra_groups": []}
    return {"env": environment, "cwd": home, **user}


def _others_reach(program: Path) -> bool:
    """Not so an interpreter in root's own folder; then the server runs as root, too."""
    return all(path.stat().st_mode & 0o001 for path in (program, *program.parents))


@contextmanager
def started(container):
    """ENTRYPOINT with CMD, once it serves and HEALTHCHECK says so."""
    command = IMAGE.command("ENTRYPOINT") + IMAGE.command("CMD")
    with tempfile.TemporaryFile("w+") as log:
        process = _start(command, container, stdout=log, stderr=log)
        try:
            wait_until_serving(process, f"127.0.0.1:{container['env']['PILOTFISH_GRPC_PORT']}")
            assert _run(IMAGE.command("HEALTHCHECK"), container).returncode == 0
            yield process
        except BaseException:
            log.seek(0)
            print(log.read())
            raise
        finally:
            process.kill()
            process.wait()


def _start(command, container, **options):
    program = shutil.which(command[0], path=container["env"]["PATH"])
    return subprocess.Popen([program, *command[1:]], **container, **options)


def _run(command, container):
    process = _start(command, container, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.mark.timeout(900)
def test_it_holds_what_serving_needs_and_no_more(installed):
    site = next(installed.glob("lib/python3*/site-packages"))
    assert (site / "pilotfish" / "models" / "target" / "model.safetensors").exists()
    for unwanted in ("pytest", "mypy", "tests", "benchmarks", "deploy", "engine", "server", "client", "models"):
        assert not (site / unwanted).exists()
    weights = [p for p in site.rglob("*.safetensors") if site / "pilotfish" / "models" not in p.parents]
    assert weights == [], "no model but the embedded pair"


@pytest.mark.timeout(600)
def test_it_serves_as_its_user_and_drains_on_sigterm(container):
    assert _run(IMAGE.command("HEALTHCHECK"), container).returncode == 1
    with started(container) as process:
        address = f"127.0.0.1:{container['env']['PILOTFISH_GRPC_PORT']}"
        made = _run(
            ["pilotfish", "generate", "--address", address, "--max-tokens", "16", "def mean(values):"], container
        )
        assert made.returncode == 0, made.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0
    assert list(Path(container["env"]["PILOTFISH_CACHE"]).rglob("*.so")) == []


@pytest.mark.timeout(600)
def test_it_has_our_c_for_each_level(container):
    checked = _run(["pilotfish", "check"], container)
    assert checked.returncode == 0, checked.stdout
    assert re.search(r"C \(native-.*\.so, verified\)", checked.stdout), checked.stdout
