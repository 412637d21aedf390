"""Rounds on the device: the tokens of the plain loop, and no look at the device while they are made."""

from __future__ import annotations

import copy
import random
from functools import lru_cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import draws, sampling
from engine.attention import paged
from engine.build import assemble
from engine.config import EngineConfig
from engine.fuse_cuda import fuse_for_cuda
from engine.noise import Stream
from engine.resident import IDLE
from engine.round_loop import RoundLoop, serves
from engine.rounds import Ops, Round
from engine.sampling import RowParams
from engine.types import FinishReason, SamplingParams, Verification
from tests import zoo
from tests.engine.test_sampling import row
from tests.hostless import hostless, looking_away
from tests.interpreting import WHY_NOT
from tests.loops import LAWS, LONGEST, PLAIN, Record, add, fed, loop_of, models, request


def interpreted(test):
    """A test that runs kernels."""
    exp_of_much = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
    return pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(exp_of_much(test))


def kernels() -> Ops:
    from engine.kernels import commit, sampling

    return Ops(paged.attend, sampling.choose, commit.commit)


def fused_for_cuda(model):
    fused = copy.deepcopy(model)
    fuse_for_cuda(fused)
    return fused


@lru_cache
def plainly(i: int, family: str = "llama") -> tuple[tuple[int, ...], FinishReason]:
    """What the plain loop gives a request that is alone, one token at a time."""
    config = EngineConfig(
        target=family, proposer="none", attention="reference", max_model_len=LONGEST, kv_memory=0.01, warm_up_seconds=0
    )
    engine = assemble(config, models(family)[0])
    engine.add(request(i))
    events = list(iter(lambda: engine.step().events[0] if engine.has_work else None, None))
    finished = events[-1].finished
    assert finished is not None
    return tuple(token for event in events for token in event.token_ids), finished.reason


@pytest.mark.parametrize("pages", [5, 14])
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_of_the_plain_loop(seed: int, pages: int) -> None:
    """Random admissions, removals, Ks and ends, and preemptions where pages are few."""
    rng = random.Random(seed)
    loop, record, removed = loop_of(pages=pages), Record(), set()
    waiting = [100 * seed + i for i in range(12)]
    while waiting or loop.has_work:
        if waiting and rng.random() < 0.5 and add(loop, request(waiting[0]), rng.randint(0, 4)):
            waiting.pop(0)
        if loop.live and rng.random() < 0.06:
            name = rng.choice(sorted(loop.live))
            loop.remove(name)
            removed.add(name)
        for name in loop.live:
            if rng.random() < 0.1:
                loop.set_num_draft(name, rng.randint(0, 4))
        record.note(loop.step(rng.choice([0, 0, 1, 2, 4, 4])))
    record.note(loop.drain())
    for i in range(100 * seed, 100 * seed + 12):
        tokens, reason = plainly(i)
        said = tuple(record.tokens.get(str(i), ()))
        if str(i) in removed:
            assert said == tokens[: len(said)]
        else:
            assert (said, record.finished[str(i)]) == (tokens, reason)
    assert loop.num_free_pages == pages


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "mistral"])
def test_other_families(family: str) -> None:
    """Learned positions, windows, softcaps, norms on heads."""
    loop, record = loop_of(family), Record()
    for i in (1, 2, 3):
        assert add(loop, request(i))
    while loop.has_work:
        record.note(loop.step(3))
    for i in (1, 2, 3):
        assert (tuple(record.tokens[str(i)]), record.finished[str(i)]) == plainly(i, family)


def test_drafts_are_kept() -> None:
    """A draft that is the target itself is right each time: K + 1 tokens a round, from the first round on."""
    target = models()[0]
    pair = [fed(target, 41) for _ in range(2)]
    loop = RoundLoop(*pair, PLAIN, num_slots=2, longest=LONGEST, most_drafts=4, vocab=zoo.VOCAB)
    wanted = next(request(i) for i in range(1, 99) if i % 3 and request(i).sampling.max_tokens == 20)
    assert add(loop, wanted)
    news = [item for _ in range(6) for item in loop.step(4)]
    assert [(len(item.tokens), item.num_accepted) for item in news] == [(5, 4)] * 4
    loop = RoundLoop(*pair, PLAIN, num_slots=2, longest=LONGEST, most_drafts=4, vocab=zoo.VOCAB)
    assert add(loop, wanted)
    ks = [0, 0, 4, 4, 0, 4]
    news = [item for k in ks for item in loop.step(k)] + loop.drain()
    assert [item.num_accepted for item in news] == [0, 0, 4, 4, 0, 4], "the draft did not catch up after K = 0"


def round_of(loop: RoundLoop, ops: Ops, k: int) -> tuple[Round, torch.Tensor]:
    """A round of three sequences and an idle place."""
    for i in (0, 1, 2):
        assert add(loop, request(i))
    slots = torch.tensor([live.slot for live in loop.live.values()] + [IDLE])
    return Round(loop.state, loop._target, loop._draft, ops, 4, k), slots


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_round_without_the_host(family: str, k: int) -> None:
    run, slots = round_of(loop_of(family), PLAIN, k)
    with hostless():
        brought = run(slots)
    assert (brought.committed.num_fresh[:3] > 0).all()
    assert brought.committed.num_fresh[3] == 0


@interpreted
def test_kernels_are_launched_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launches them is watched, what interprets them is not. The model runs on our stand-ins."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def unseen(executor, *args, **kwargs):
        with looking_away():
            return launch(executor, *args, **kwargs)

    loop = RoundLoop(
        *(fed(fused_for_cuda(model), 41) for model in models()),
        kernels(), num_slots=4, longest=LONGEST, most_drafts=2, vocab=zoo.VOCAB,
    )  # fmt: skip
    run, slots = round_of(loop, kernels(), 2)
    monkeypatch.setattr(GridExecutor, "__call__", unseen)
    with hostless():
        brought = run(slots)
    for i, (drawn, fresh) in enumerate(zip(brought.drawn[:3], brought.committed.num_fresh[:3], strict=True)):
        assert tuple(drawn[:fresh].tolist()) == plainly(i)[0][: int(fresh)]


def test_the_modes_see_what_they_should() -> None:
    x = torch.arange(3)
    for touch in (
        lambda: x.tolist(), lambda: bool(x[0]), lambda: int(x[0]), lambda: x[x > 1], lambda: x.nonzero(),
        lambda: torch.tensor([1]), lambda: x.repeat_interleave(x), lambda: x.unique(), lambda: x.cpu(),
    ):  # fmt: skip
        with pytest.raises(AssertionError), hostless():
            touch()
    with hostless():
        torch.where(x > 1, x, 0).cumprod(0)[x]


def test_a_round_has_no_shape_of_data() -> None:
    """Tensors without values: whatever reads one raises."""
    with FakeTensorMode():
        config = zoo.configs()["llama"]
        config._attn_implementation = "pilotfish_ragged"
        from transformers import AutoModelForCausalLM

        pair = [fed(AutoModelForCausalLM.from_config(config).eval(), 9) for _ in range(2)]
        loop = RoundLoop(*pair, PLAIN, num_slots=4, longest=LONGEST, most_drafts=3, vocab=zoo.VOCAB)
        brought = Round(loop.state, *pair, PLAIN, 4, 3)(torch.arange(4))
        assert brought.drawn.shape == (4, 4)


@interpreted
def test_rounds_on_interpreted_kernels() -> None:
    loop, record = loop_of(ops=kernels()), Record()
    for i in (1, 2):
        assert add(loop, request(i))
    for _ in range(4):
        record.note(loop.step(2))
    assert record.tokens
    for name, tokens in record.tokens.items():
        assert tuple(tokens) == plainly(int(name))[0][: len(tokens)]


def test_few_pages_preempt() -> None:
    """Two that fit at first and not at their longest: the newer one makes room, comes back, and says the same."""
    loop, record = loop_of(pages=5), Record()
    long = (i for i in range(1, 999) if i % 3 and request(i).max_len(LONGEST) - len(request(i).token_ids) > 26)
    first, second = (next(i for i in long if len(request(i).token_ids) == 17) for _ in range(2))
    assert add(loop, request(first))
    assert add(loop, request(second))
    while loop.has_work:
        record.note(loop.step(2))
    assert loop.num_preempted == 1
    for i in (first, second):
        assert (tuple(record.tokens[str(i)]), record.finished[str(i)]) == plainly(i)


def test_nothing_is_changed_where_there_is_no_room() -> None:
    loop = loop_of(pages=2)
    assert not add(loop, next(request(i) for i in range(99) if len(request(i).token_ids) == 33))
    assert not loop.live
    assert loop.num_free_pages == 2


def test_draws_are_the_plain_loops() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3)).mul(3)
    rows = [row(LAWS[i % 4], i, 2**63 + i) for i in range(64)]
    params = RowParams.of(rows, 50, logits.device)
    greedy = torch.tensor([r.sequence.request.sampling.temperature == 0 for r in rows])
    laws = draws.Laws(
        params.temperature.masked_fill(greedy, 0), params.top_k, params.top_p, params.min_p, params.seed,
        params.position, torch.full((64,), int(Stream.COUPLED)),
    )  # fmt: skip
    assert torch.equal(draws.choose(logits, laws), sampling.choose(logits, params))


def test_serves() -> None:
    assert serves(LAWS[1], Verification.COUPLED, [1, 2])
    assert not serves(LAWS[1], Verification.REJECTION, [])
    assert not serves(LAWS[1], Verification.COUPLED, range(9))
    for unserved in ({"repetition_penalty": 1.1}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}):
        assert not serves(SamplingParams(**unserved), Verification.COUPLED, [])
