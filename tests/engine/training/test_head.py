"""The head with gradients against the paper, one chain at a time: plain attention over what is fed, no trick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.training.acceptance import measure_acceptance
from engine.training.eagle3 import Eagle3Shape, TrainedEagle3
from engine.training.store import WrittenText

HIDDEN, VOCAB = 16, 23
SHAPE = Eagle3Shape.fitting(HIDDEN, VOCAB, 9, 24)
KEPT = torch.tensor([0, 2, 3, 7, 11, 12, 17, 19, 22])


def head() -> TrainedEagle3:
    torch.manual_seed(0)
    made = TrainedEagle3(SHAPE, KEPT, torch.randn(VOCAB, HIDDEN))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return made


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """Positions 0 and on of `[heads, length, head_dim]`, by complex numbers."""
    length, size = x.shape[1:]
    speeds = 10000.0 ** -(torch.arange(0, size, 2) / size)
    turned = torch.polar(torch.ones(length, size // 2), torch.outer(torch.arange(length).float(), speeds))
    z = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turned
    return torch.cat([z.real, z.imag], -1)


def plain_layer(weights: dict[str, Tensor], features: Tensor, embedded: Tensor) -> Tensor:
    """The newest output of the layer over `[length, hidden]`, all of it attended to."""
    get = lambda name: weights[f"midlayer.{name}.weight"]  # noqa: E731
    x = torch.cat([norm(embedded, get("input_layernorm")), norm(features, get("hidden_norm"))], -1)
    split = lambda name: (x @ get(f"self_attn.{name}_proj").T).unflatten(-1, (-1, SHAPE.head_dim)).transpose(0, 1)  # noqa: E731
    q, k, v = rotate(split("q")), rotate(split("k")), split("v")
    groups = SHAPE.heads // SHAPE.kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q[:, -1:] @ k.transpose(1, 2)) / SHAPE.head_dim**0.5
    seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = features[-1:] + seen @ get("self_attn.o_proj").T
    y = norm(x, get("post_attention_layernorm"))
    gated = F.silu(y @ get("mlp.gate_proj").T) * (y @ get("mlp.up_proj").T)
    return (x + gated @ get("mlp.down_proj").T)[0]


def plain_chain(weights: dict[str, Tensor], hidden: Tensor, embedded: Tensor, drafts: int) -> list[Tensor]:
    """Logits of drafts after the positions of `hidden` `[n, 3 * hidden]`; `embedded` has a row for each that is fed."""
    joined = [norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(hidden.chunk(3, -1))]
    features = torch.cat(joined, -1) @ weights["fc.weight"].T
    found = []
    for j in range(drafts):
        made = norm(plain_layer(weights, features, embedded[: len(hidden) + j]), weights["norm.weight"])
        found.append(made @ weights["lm_head.weight"].T)
        features = torch.cat([features, made[None]])
    return found


def test_all_chains_at_once_are_each_chain_alone() -> None:
    model, length, drafts = head(), 7, 4
    hidden, embedded = torch.randn(2, length, 3 * HIDDEN), torch.randn(2, length, HIDDEN)
    weights = dict(model.state_dict())
    with torch.no_grad():
        at_once = list(model.unroll(hidden, embedded, drafts))
        for row in range(2):
            for t in range(length):
                possible = min(drafts, length - t)
                alone = plain_chain(weights, hidden[row, : t + 1], embedded[row], possible)
                for j, logits in enumerate(alone):
                    torch.testing.assert_close(at_once[j][row, t], logits, rtol=1e-4, atol=1e-4)


def test_a_text_may_be_shorter_than_a_chain() -> None:
    model, embedding = head(), torch.randn(VOCAB, HIDDEN)
    text = WrittenText(torch.tensor([2, 3, 7]), 1, torch.randn(2, 4 * HIDDEN))
    found = measure_acceptance(model, [text], embedding, 4, torch.device("cpu"))
    assert sum(found.drafted) == 1
    assert len(list(model.unroll(torch.randn(1, 2, 3 * HIDDEN), torch.randn(1, 2, HIDDEN), 4))) == 2


def test_every_weight_has_a_gradient() -> None:
    model = head()
    drafts = model.unroll(torch.randn(1, 5, 3 * HIDDEN), torch.randn(1, 5, HIDDEN), 3)
    sum(logits.square().sum() for logits in drafts).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_acceptance_is_that_of_decoding() -> None:
    """Walked chain by chain as an engine would: each step drafts, keeps what is right, and adds a token."""
    model, drafts, prompt = head(), 3, 4
    torch.manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN)
    tokens = KEPT[torch.randint(0, len(KEPT), (40,))]
    rows = torch.randn(39, 4 * HIDDEN)
    weights, kept, drafted = dict(model.state_dict()), [0] * drafts, [0] * drafts
    # Half of the chains are made right, so that all lengths occur.
    for t in range(prompt - 1, 30, 2):
        chain = plain_chain(weights, rows[: t + 1, : 3 * HIDDEN], embedding[tokens[1:]], 1)
        tokens[t + 2] = KEPT[chain[0].argmax()]
    known = prompt + 1
    while known < len(tokens):
        count = min(drafts, len(tokens) - known)
        chain = plain_chain(weights, rows[: known - 1, : 3 * HIDDEN], embedding[tokens[1:]], count)
        guessed = [int(KEPT[logits.argmax()]) for logits in chain]
        right = 0
        while right < count and guessed[right] == int(tokens[known + right]):
            right += 1
        for j in range(count):
            drafted[j], kept[j] = drafted[j] + 1, kept[j] + (j < right)
        known += right + 1
    text = WrittenText(tokens, prompt, rows)
    found = measure_acceptance(model, [text], embedding, drafts, torch.device("cpu"))
    assert found.drafted == tuple(drafted)
    assert sum(kept) > 3
    assert abs(sum(found.kept) - sum(kept)) <= 1, "bfloat16 may decide a near-tie differently"
