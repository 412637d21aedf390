"""On a GPU: kernels in the types that the interpreter cannot do, and the loop as CUDA graphs without a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch

from engine.attention import paged
from engine.attention.registry import choose
from engine.round_loop import RoundLoop, captured
from engine.rounds import Ops
from engine.types import FinishReason
from tests import zoo
from tests.interpreting import DEVICE
from tests.loops import LONGEST, Record, add, loop_of, models, request

pytest.importorskip("triton", reason="triton is not installed")

from engine.fuse_cuda import fuse_for_cuda
from engine.kernels import attention, commit, reference, rows, sampling
from tests.kernels.test_attention import alone, problem

pytestmark = pytest.mark.cuda
KERNELS = Ops(paged.attend, sampling.choose, commit.commit)
LENS = [(5, 3000), (1, 9000), (0, 7), (40, 0), (1, 0)]
SHAPES = [(1, 64), (4, 80), (3, 96), (8, 128), (2, 256)]  # group, head size


@pytest.mark.parametrize(("group", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_equals_reference(dtype, group, dim):
    query, k, v, paging = problem(group, LENS, 32, 2, group, dim, dtype)
    for window, softcap, spread in ((None, None, True), (100, None, False), (None, 30.0, None)):
        got = attention.attend(query, k, v, paging, dim**-0.5, window, softcap, spread=spread)
        want = reference.attend(query.float(), k.float(), v.float(), paging, dim**-0.5, window, softcap)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3 if dtype == torch.float16 else 2e-5
        assert torch.allclose(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("group", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_are_its_own(dtype, group, dim):
    """Real numbers, real order of sums: alone or in company, spread or not."""
    query, k, v, paging = problem(group, LENS, 32, 2, group, dim, dtype)
    together = attention.attend(query, k, v, paging, 0.1, spread=False)
    assert torch.equal(attention.attend(query, k, v, paging, 0.1, spread=True), together)
    for i, (now, _) in enumerate(LENS):
        first = int(paging.spans[i, 0])
        for row in {0, now // 2, now - 1} if now else ():
            mine = query[first + row : first + row + 1]
            assert torch.equal(
                attention.attend(mine, k, v, alone(paging, i, row, group), 0.1)[0], together[first + row]
            )


def test_rows_in_bfloat16():
    both = torch.randn(6, 2 * 1536, device=DEVICE).bfloat16()
    scale = torch.randn(1536, device=DEVICE)
    for got, want in (
        (rows.gate(both, "silu"), reference.gate(both, "silu")),
        (rows.add_norm(both[:, :1536], both[:, 1536:], scale, 1e-5)[0],
         reference.add_norm(both[:, :1536], both[:, 1536:], scale, 1e-5)[0]),
    ):  # fmt: skip
        assert torch.allclose(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def said_by(loop: RoundLoop, numbers: range, k: int) -> Record:
    record = Record()
    for i in numbers:
        while not add(loop, request(i)):
            record.note(loop.step(k))
    while loop.has_work:
        record.note(loop.step(k))
    return record


@lru_cache
def on_the_cpu(family: str) -> Record:
    return said_by(loop_of(family), range(8), 3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("as_graphs", [False, True])
def test_the_tokens_of_the_cpu(family, as_graphs):
    """Greedy and sampled, in float32: the noise is the same on every device."""
    options = {"make_run": captured} if as_graphs else {}
    for k in (0, 3):
        record = said_by(loop_of(family, KERNELS, device="cuda", **options), range(8), k)
        want = on_the_cpu(family)
        assert (record.tokens, record.finished) == (want.tokens, want.finished)


def test_greedy_is_that_of_transformers():
    loop = loop_of("llama", KERNELS, device="cuda", make_run=captured)
    record = said_by(loop, range(0, 16, 4), 4)  # every fourth request is greedy
    plain = zoo.reference("llama")
    for i in range(0, 16, 4):
        tokens = list(request(i).token_ids)
        limit, ends = request(i).max_len(LONGEST), request(i).sampling.stop_token_ids
        while len(tokens) < limit and (len(tokens) == len(request(i).token_ids) or tokens[-1] not in ends):
            tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert record.tokens[str(i)] == tokens[len(request(i).token_ids) :]


@contextmanager
def no_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("as_graphs", [False, True])
def test_the_steady_loop_does_not_wait(as_graphs):
    loop = loop_of("llama", KERNELS, device="cuda", **({"make_run": captured} if as_graphs else {}))
    for i in (2, 5):
        assert add(loop, request(i))
    loop.step(1)
    with no_wait():
        for _ in range(5):
            news = loop.step(1)
            if any(item.finished in tuple(FinishReason) for item in news):
                break  # the host frees a slot between rounds, which is no part of the steady loop


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_stand_ins(family):
    plain = models(family, "cuda")[0] if family != "phi3" else zoo.ours(zoo.reference(family)).cuda()
    fused = zoo.ours(zoo.reference(family)).cuda()
    assert fuse_for_cuda(fused)["attentions"] == plain.config.num_hidden_layers
    want, got = (logits_of(model) for model in (plain, fused))
    assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.std()))


def logits_of(model):
    from engine.batch import Feed
    from engine.kv import KVArena
    from engine.runner import ModelRunner, kv_layout

    arena = KVArena(kv_layout(model.config, model.dtype), 3, 64, model.device)
    runner = ModelRunner(model, arena, choose("auto", model.device))
    return runner.forward([Feed(range(5, 25), 0, [1], 20), Feed([3, 4, 5], 0, [2], 1)])


def test_the_engine():
    """The plain loop on the device, as `LLM` builds it."""
    pytest.importorskip("pydantic", reason="the engine's options need pydantic")
    from engine.build import assemble
    from engine.config import EngineConfig

    engine = assemble(EngineConfig(target="llama", max_model_len=LONGEST, kv_memory=0.1), *models("llama", "cuda"))
    for i in range(8):
        engine.add(request(i))
    record: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step().events:
            record.setdefault(event.request_id, []).extend(event.token_ids)
    assert record == on_the_cpu("llama").tokens
