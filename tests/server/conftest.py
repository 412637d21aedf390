"""The usual server of these tests: a whole one around a fake engine; and certificates, which take a while to make."""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace

import pytest

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"  # found sooner than two primes


@pytest.fixture(scope="session")
def papers(tmp_path_factory):
    """PEM files of an authority, and two pairs that it has signed: for 127.0.0.1 and for a client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path_factory.mktemp("papers")

    def openssl(arguments):
        subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)

    openssl(f"req -x509 {KEY} -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    files = {"authority": folder / "ca.pem"}
    for name in ("server", "client"):
        openssl(f"req {KEY} -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signed = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
        openssl(f"{signed} -out {name}.pem")
        files |= {f"{name}_cert": folder / f"{name}.pem", f"{name}_key": folder / f"{name}.key"}
    return SimpleNamespace(**files)


@pytest.fixture
async def server():
    """The usual one."""
    from tests.serving import serving  # not at the top: the controller of workers reads this file, too

    async with serving() as running:
        yield running
        assert running.engine.load.free_pages == running.engine.facts.total_pages or running.app.driver.live()
