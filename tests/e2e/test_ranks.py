"""A server whose target two processes hold, in the environment that torchrun sets: tokens, ends, a share that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from examples.demo import free_ports
from pilotfish import client
from pilotfish.engine.llm import LLM
from pilotfish.engine.params import SamplingParams
from pilotfish.models import embedded_target

PROGRAM = "from pilotfish.server.cli import main; raise SystemExit(main())"
OPTIONS = ("--tensor-parallel-size", "2", "--max-model-len", "1000", "--warm-up-seconds", "0", "--speculation", "fixed")
PROMPT = "def mean(values):\n"
SIZE = 2


class Group:
    """Two ranks of one server of the embedded pair."""

    def __init__(self, folder: Path) -> None:
        (self.port, http_port), (meeting, _) = free_ports(), free_ports()
        self._logs = [folder / f"{rank}.log" for rank in range(SIZE)]
        front_ends = ("--grpc-port", str(self.port), "--http-port", str(http_port))
        command = [sys.executable, "-c", PROGRAM, "serve", *OPTIONS, *front_ends]
        ours = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}
        ours |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        self._open = ExitStack()
        self.ranks = [
            subprocess.Popen(
                command,
                env=os.environ | ours | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=self._open.enter_context(log.open("wb")),
            )
            for rank, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
        self._open.close()

    def connect(self) -> client.Client:
        """To its doors, once they serve."""
        connection = client.Client(f"127.0.0.1:{self.port}", retry=None)
        end = time.monotonic() + 150
        while True:
            assert all(process.poll() is None for process in self.ranks), self.log()
            try:
                connection.wait_until_serving(deadline=1.0)
            except TimeoutError:
                assert time.monotonic() < end, self.log()
            else:
                return connection

    def codes(self) -> list[int]:
        """How each of them ends."""
        return [process.wait(40) for process in self.ranks]

    def log(self) -> str:
        return "\n".join(log.read_text("utf-8") for log in self._logs)


@pytest.mark.slow
def test_its_tokens_are_those_of_one_process_and_its_end_is_that_of_all(tmp_path):
    alone = LLM(embedded_target(), proposer="none", dtype="float32", max_model_len=1000, threads=1, device="cpu")
    [want] = alone.generate(PROMPT, SamplingParams(max_tokens=24))
    with Group(tmp_path) as group, group.connect() as connection:
        got = connection.generate(PROMPT, max_tokens=24)
        assert (got.outputs[0].token_ids, got.outputs[0].text) == (want.token_ids, want.text)
        stats = got.outputs[0].finished.speculation_stats
        assert stats.accepted > 0
        for process in group.ranks:  # as torchrun does, to all at once
            process.send_signal(signal.SIGTERM)
        assert group.codes() == [0, 0], group.log()
        assert "rank 0 ended" in group.log()


@pytest.mark.slow
def test_a_share_that_dies_ends_streams_and_server(tmp_path):
    with Group(tmp_path) as group, group.connect() as connection:
        stream = connection.stream(PROMPT, max_tokens=900, ignore_eos=True)
        next(stream)
        group.ranks[1].kill()
        with pytest.raises(client.UnavailableError):
            for _ in stream:
                pass
        assert group.codes() == [1, -signal.SIGKILL], group.log()
        assert "the engine has failed too often" in group.log()
