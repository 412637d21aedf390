"""Threads that claim pieces: the same bits on any number of them, and nobody waits for who has claimed nothing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.native import PackedMatrix, compiled, library, threads_in_use
from tests.drawn import numbers

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")

PIECE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)


class Choice(ctypes.Structure):
    """As pool.h has it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("most", "now", "home", "step")),
        *((name, ctypes.c_double) for name in ("rate", "seconds", "work", "lost", "due")),
    )


@contextmanager
def several(threads: int) -> Iterator[None]:
    """So many of our C, and torch on one: its own threads do not survive a fork."""
    with exactly(threads):
        torch.set_num_threads(1)
        yield


def product(packed: PackedMatrix, x: Tensor) -> Tensor:
    return packed.multiply(x, None, torch.float32)


def run(threads: int, pieces: int, piece: object) -> int:
    """A stage; `piece` is called with its number and the worker's. Returns the bound on the workers."""
    native = library()
    native.pool_leave.argtypes = (ctypes.c_double,)
    native.pool_run.argtypes = (PIECE, ctypes.c_void_p, ctypes.c_int64)
    workers: int = native.pool_enter(threads)
    try:
        native.pool_run(PIECE(lambda _, i, worker: piece(i, worker)), None, pieces)
    finally:
        native.pool_leave(0.0)
    return workers


# ------------------------------------------------------------------------------------------------------------- pieces


@settings(max_examples=40)
@given(st.integers(1, 9), st.lists(st.integers(0, 70), min_size=1, max_size=8))
def test_every_piece_is_done_once(threads: int, stages: list[int]) -> None:
    for pieces in stages:
        done: list[int] = []
        workers: set[int] = set()

        def piece(i: int, worker: int, done: list[int] = done, workers: set[int] = workers) -> None:
            done.append(i)
            workers.add(worker)

        bound = run(-threads, pieces, piece)
        assert sorted(done) == list(range(pieces))
        assert all(0 <= worker < bound for worker in workers)


def test_a_stage_waits_for_no_one_who_has_claimed_nothing() -> None:
    """One helper of two never comes back from its piece until the caller has done everything else."""
    others_done, held = threading.Event(), threading.Event()
    done: list[int] = []

    def piece(i: int, worker: int) -> None:
        if worker and not held.is_set():
            held.set()
            assert others_done.wait(30)
        elif not worker:
            assert held.wait(30)  # so that somebody holds one
        done.append(i)
        if len(done) == 39:
            others_done.set()

    run(-3, 40, piece)
    assert sorted(done) == list(range(40))


def test_helpers_sleep_when_there_is_nothing_to_do() -> None:
    run(-4, 40, lambda _i, _worker: time.sleep(0.001))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25, "threads that wait take cores"


def test_the_bits_do_not_depend_on_who_multiplies() -> None:
    packed, x = PackedMatrix.of(numbers(1000, 256)), numbers(300, 256)
    with several(1):
        want = product(packed, x)
    for threads in (2, 3, 8):
        with several(threads):
            for _ in range(10):
                assert torch.equal(product(packed, x), want)


# ------------------------------------------------------------------------------------------------ several, and children


def test_several_callers_at_once() -> None:
    """One has the pool, the others compute alone meanwhile."""
    packed, x = PackedMatrix.of(numbers(500, 128)), numbers(20, 128)
    wrong: list[int] = []
    with several(3):
        want = product(packed, x)

        def call(number: int) -> None:
            wrong.extend(number for _ in range(200) if not torch.equal(product(packed, x), want))

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    packed, x = PackedMatrix.of(numbers(500, 128)), numbers(20, 128)
    with several(3):
        want = product(packed, x)
        child = os.fork()
        if not child:
            same = torch.equal(product(packed, x), want)
            started = len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 3
            os._exit(0 if same and started >= 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(product(packed, x), want)


# --------------------------------------------------------------------------------------------------- how many take part


class Machine:
    """Passes of a hundredth of a second's work, and how fast each number of threads does it."""

    def __init__(self, most: int, speed: dict[int, float], lost: dict[int, float]) -> None:
        self.choice = Choice(most=most, now=most, home=most, step=1)
        self.clock, self.speed, self.lost = 0.0, speed, lost
        self.spent: dict[int, float] = {}
        self._choose = library().choose_threads
        self._choose.argtypes = (ctypes.POINTER(Choice), *4 * (ctypes.c_double,))

    def run(self, seconds: float) -> dict[int, float]:
        """Seconds that each number of threads had."""
        end, self.spent = self.clock + seconds, {}
        while self.clock < end:
            n = self.choice.now
            took = 0.01 / self.speed[n]
            self.clock += took
            self.spent[n] = self.spent.get(n, 0.0) + took
            self._choose(self.choice, self.clock, took, 1.0, took * self.lost.get(n, 0.0))
        return self.spent

    def work(self) -> float:
        return sum(seconds * self.speed[n] for n, seconds in self.spent.items())


def test_a_neighbour_comes_and_goes() -> None:
    machine = Machine(2, {1: 1.0, 2: 1.8}, {})
    assert set(machine.run(5)) == {2}
    machine.speed, machine.lost = {1: 1.0, 2: 0.3}, {2: 0.6}
    machine.run(30)
    assert machine.work() > 0.95 * 30
    machine.speed, machine.lost = {1: 1.0, 2: 1.8}, {}
    machine.run(20)
    assert machine.work() > 0.85 * 1.8 * 20


@pytest.mark.parametrize("best", range(1, 9))
def test_the_best_of_many_is_found(best: int) -> None:
    """Each thread more is worth as much until the cores are all taken; from then on all wait for one."""
    speed = {n: float(n) if n <= best else best / 3 for n in range(1, 9)}
    machine = Machine(8, speed, {n: 0.0 if n <= best else 0.6 for n in speed})
    machine.run(5)
    machine.run(20)
    assert machine.work() > 0.9 * best * 20


def test_a_number_is_left_only_for_one_that_is_better_by_more_than_noise() -> None:
    assert set(Machine(4, dict.fromkeys(range(1, 5), 1.0), {4: 0.05}).run(20)) == {4}, "nobody waits"
    machine = Machine(2, {1: 1.0, 2: 0.95}, {2: 0.3})
    machine.run(10)
    assert machine.choice.home == 2, "all lose a little"


# ----------------------------------------------------------------------------------------------------- memory ordering


@pytest.mark.slow
def test_a_race_detector_finds_none(tmp_path: Path) -> None:
    """`racing.c` against the pool under ThreadSanitizer: stages that read what others wrote, three callers."""
    here, native = Path(__file__).parent, Path(compiled.__file__).parent
    compiler = shutil.which("gcc") or shutil.which("clang")
    sources = [str(here / "racing.c"), str(native / "pool.c"), str(native / "choice.c")]
    command = [str(compiler), "-O1", "-g", "-fsanitize=thread", "-pthread", "-std=gnu11", f"-I{native}", *sources]
    made = tmp_path / "racing"
    if compiler is None or subprocess.run([*command, "-o", str(made)], capture_output=True, check=False).returncode:
        pytest.skip("no ThreadSanitizer here")
    done = subprocess.run([str(made)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------- who says so


def test_an_operator_sees_how_many_take_part() -> None:
    packed, x = PackedMatrix.of(numbers(500, 128)), numbers(20, 128)
    for threads in (3, 1):
        with several(threads):
            product(packed, x)
        assert threads_in_use() == threads
