"""A target in shares: what is refused, what is said to the other ranks, and what becomes of a pass that fails."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pilotfish.engine import parallel
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError, RankLost
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.rank import RankInfo
from pilotfish.engine.parallel import Ranks, ShardedRunner, worker_loop
from pilotfish.engine.types import StateSpan

NUMBERS = st.integers(0, 2**31)
STATES = st.none() | st.builds(StateSpan, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | st.tuples(NUMBERS, NUMBERS))
FEEDS = st.builds(
    Feed, st.lists(NUMBERS, min_size=1, max_size=9), NUMBERS, st.lists(NUMBERS, max_size=9), NUMBERS, st.integers(0, 1),
    STATES, NUMBERS,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    """Two ends of a group: what one broadcasts, the other receives."""
    sent = deque()

    def broadcast(part, _, group):
        if group == "receives":
            part.copy_(sent.popleft())
        else:
            sent.append(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel.dist, "new_group", lambda **_: "sends")
        patch.setattr(parallel.dist, "broadcast", broadcast)
        ends = Ranks(RankInfo()), Ranks(RankInfo())
        ends[1]._group = "receives"
        yield ends


@settings(max_examples=30)
@given(st.lists(FEEDS, max_size=4))
def test_broadcasts_arrive_unchanged(ranks, feeds):
    ranks[0].broadcast(feeds)
    assert ranks[1].receive(list[Feed]) == feeds


@pytest.mark.parametrize("count", [1, 5400, 5430, 5440, 50_000])
def test_long_messages_are_sent_in_two_parts(ranks, count):
    """Feeds may have ranges in place of lists."""
    ranks[0].broadcast([Feed(range(1 << 16, (1 << 16) + count), 0, [0])])
    [feed] = ranks[1].receive(list[Feed])
    assert feed.tokens == [*range(1 << 16, (1 << 16) + count)]


class Recorded:
    """Ranks without a network: what rank 0 says, for another to hear afterwards."""

    def __init__(self, *said):
        self.said = list(said)

    def broadcast(self, feeds):
        self.said.append(list(feeds))

    def receive(self, _):
        if not self.said:
            raise RankLost("rank 1 lost the connection to another rank: connection closed by peer")
        return self.said.pop(0)


class Echo:
    """A runner that notes what it is fed, and fails when its list of faults says so."""

    vocab_size = 7

    def __init__(self, *faults):
        self.fed, self.faults = [], list(faults)

    def forward(self, feeds):
        self.fed.append(list(feeds))
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return torch.zeros(len(feeds), self.vocab_size)


A, B = [Feed([1, 2], 0, [0])], [Feed([3], 2, [0, 1]), Feed([4, 5, 6], 0, [2], 0)]


def test_others_run_what_rank_0_runs_until_it_has_ended():
    ranks, mine, theirs = Recorded(), Echo(), Echo()
    runner = ShardedRunner(mine, ranks)
    assert runner.vocab_size == mine.vocab_size
    for feeds in (A, B):
        assert len(runner.forward(feeds)) == len(feeds)
    worker_loop(ranks, theirs)
    assert theirs.fed == mine.fed == [A, B]


def test_a_fault_of_a_follower_is_its_end():
    with pytest.raises(ValueError, match="broken"):
        worker_loop(Recorded(A, B), Echo(ValueError("broken")))


@pytest.mark.parametrize("fault", [RuntimeError("connection closed by peer"), ValueError("anything")])
def test_after_a_pass_that_failed_there_is_no_other(fault):
    """Whoever is still in the collectives of that pass would take the next one's for them."""
    ranks, mine = Recorded(), Echo(None, fault)
    runner = ShardedRunner(mine, ranks)
    runner.forward(A)
    with pytest.raises(RankLost, match="a pass over all ranks failed") as told:
        runner.forward(A)
    assert told.value.__cause__ is fault
    with pytest.raises(RankLost, match="an earlier pass"):
        runner.forward(A)
    assert len(ranks.said) == 2


def test_options_that_need_a_whole_target_are_refused():
    for option, value in {"loop": "rounds", "adapter": {"a": "a"}}.items():
        EngineConfig(target="t", **{option: value})
        with pytest.raises(ValidationError, match=f"{option}.* does not support tensor parallelism"):
            EngineConfig(target="t", tensor_parallel_size=2, **{option: value})


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}


def test_a_place_is_where_torchrun_says():
    assert RankInfo.here(TORCHRUN) == RankInfo(rank=3, size=4, local_rank=1, local_size=2)
    assert RankInfo.here(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2
    assert RankInfo.here({}) == RankInfo(rank=0, size=1, local_rank=0, local_size=1)
    assert RankInfo.here({"RANK": "3"}).leads, "somebody else's variable"
    assert not RankInfo.here(TORCHRUN).leads


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "-1")])
def test_an_environment_that_cannot_be_is_refused(name, value):
    with pytest.raises(ModelError, match=f"{name} is '?{value}"):
        RankInfo.here(TORCHRUN | {name: value})


@pytest.mark.parametrize("asked", [1, 2, 8])
def test_as_many_processes_as_shares(asked):
    RankInfo.here(TORCHRUN).check(4)
    with pytest.raises(ModelError, match=f"tensor_parallel_size is {asked}, but WORLD_SIZE .* is 4"):
        RankInfo.here(TORCHRUN).check(asked)
