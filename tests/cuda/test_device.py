"""On a GPU: kernels in the types that the interpreter cannot do, and the loop as CUDA graphs without a wait."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch

from benchmarks.harness.bare import options as bare_options
from pilotfish.engine.attention.registry import choose
from pilotfish.engine.startup.memory import kv_gib
from tests import fakes, zoo
from tests.engine.device_loop.test_round import run_and_check
from tests.interpreting import DEVICE
from tests.loops import AnyK, asking, engine_of, request, steps_without_waiting

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import attention, reference, rows
from pilotfish.engine.model.decoder.ops import LayerOps
from tests.kernels.test_attention import alone, problem

pytestmark = pytest.mark.cuda
LENS = [(5, 3000), (1, 9000), (0, 7), (40, 0), (1, 0)]
SHAPES = [(1, 64), (4, 80), (3, 96), (8, 128), (2, 192), (2, 256), (48, 64)]  # group, head size


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
    query, k, v, paging = problem(group, LENS, 32, 2, group, dim, dtype, fixed=True)
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


@lru_cache
def fused(family: str):
    """A target and a draft as a server has them."""
    pair = zoo.ours(zoo.reference(family)).cuda(), zoo.near(zoo.reference(family)).cuda()
    return tuple(zoo.on_kernels(model, LayerOps.kernels()) for model in pair)


def on_cuda(family: str = "llama", **options):
    """Its rounds recorded in one size, which stands in for the smaller ones."""
    pages = 160 if options.get("page_size") == 4 else 40
    engine = engine_of(family, pair=fused(family), device="cuda", attention="auto", pages=pages, **options)
    engine.record(sizes=[8])
    return engine


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "mistral", "gpt-oss"])
@pytest.mark.parametrize("loop", ["plain", "rounds"])
@pytest.mark.parametrize("num_draft", [0, 3])
def test_the_tokens_of_the_cpu(family, loop, num_draft):
    """Greedy and sampled, in float32: the noise is the same on every device."""
    engine = on_cuda(family, loop=loop, num_draft_tokens=num_draft)
    assert engine.rounds.name == loop
    run_and_check(engine, [request(i) for i in range(8)], family)


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_of_the_plain_loop(seed):
    """Any K in any step, requests that cannot ride among those that do, few pages; graphs against operations."""
    engine = on_cuda(page_size=4)
    engine.scheduler.round_control = engine.round_control = AnyK(seed)
    run_and_check(engine, [request(10 * seed + i, **({"logprobs": 1} if i % 4 == 3 else {})) for i in range(12)])


@pytest.mark.parametrize("ks", [[0], [1], [4], [4, 2, 3]])
def test_the_steady_loop_does_not_wait(ks):
    """Whole steps of the engine: plan, launch, and reading what the round before brought.

    In pages of 4 tokens, so that new pages come in most steps; with changes of K; one is given up, one comes, all end
    one after the other, and the steps after each of these are laid out anew.
    """
    steps_without_waiting(on_cuda(num_draft_tokens=4, page_size=4), ks)


def test_rounds_are_what_cuda_gets_by_itself_and_time_is_the_devices_own():
    engine = on_cuda(loop="auto")
    assert engine.rounds.name == "rounds"
    engine.add(request(2, max_tokens=30))
    stats = [engine.step().stats for _ in range(5)]
    assert 0 < stats[-1].device_seconds < 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt-oss", "deepseek-v3", "llama-4", "gemma-4"])
def test_stand_ins(family):
    """Sinks, chunks, heads of several sizes, experts: our kernels against plain torch."""
    plain = zoo.ours(zoo.reference(family)).cuda()
    fused = zoo.on_kernels(copy.deepcopy(zoo.reference(family)).cuda(), LayerOps.kernels())
    want, got = logits_of(plain, "reference"), logits_of(fused)
    assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.std()))


def logits_of(model, attention="auto"):
    from pilotfish.engine.kv.arena import KVArena
    from pilotfish.engine.kv.batch import Feed
    from pilotfish.engine.model.runner import ModelRunner, layout_of_model

    arena = KVArena(layout_of_model(model), 3, 64, model.device)
    runner = ModelRunner(model, arena, choose(attention, model.device))
    return runner.forward([Feed(range(5, 25), 0, [1], 20), Feed([3, 4, 5], 0, [2], 1)])


@pytest.mark.parametrize("loop", ["plain", "rounds"])
def test_in_bfloat16_a_sampled_run_ends(loop):
    """Tokens may differ where two are nearly equal; what must not is that all requests end, with all pages back."""
    pair = [model.to(torch.bfloat16) for model in (zoo.ours(zoo.reference("llama")), zoo.near(zoo.reference("llama")))]
    engine = engine_of(pair=[model.cuda() for model in pair], device="cuda", attention="auto", loop=loop)
    assert len(fakes.run(engine, [request(i) for i in range(8)]).finished) == 8


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_reproducible_in_bfloat16(family):
    """Coupled: greedy or sampled, with drafts and among others, the tokens of a request alone without drafts."""
    reference = zoo.reference(family)
    pair = [model.to("cuda", torch.bfloat16) for model in (zoo.ours(reference), zoo.near(reference))]
    options = {"pair": pair, "device": "cuda", "attention": "auto", "dtype": "bfloat16", "reproducible": True}
    alone, together = {}, engine_of(family, loop="auto", **options)
    for i in range(8):
        plain = engine_of(family, loop="plain", speculation="off", prefix_cache=False, **options)
        alone |= fakes.run(plain, [request(i)]).tokens
    for num_draft in (4, 2):
        asked = [asking(request(i), proposer="model", num_draft_tokens=num_draft) for i in range(8)]
        assert fakes.run(together, asked).tokens == alone


def test_memory_is_that_of_the_card():
    """Without a figure K/V takes what is free, and no more."""
    free, total = torch.cuda.mem_get_info()
    config = bare_options("llama", device="cuda", max_batch_size=4)
    found = kv_gib(config, torch.device("cuda"), zoo.family_config("llama"))
    assert 0 < found * 2**30 < free <= total
