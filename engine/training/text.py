"""What the target writes: prompts of its own if none are given, and continuations, with its hidden states.

A draft must predict what the target writes, not what people write, so it learns from the target's own text (Zhou et
al. 2023, "DistillSpec", arXiv 2310.08461). The target writes through an engine, as it does for any caller, so
whatever is served can be learned from: rounded weights, GGUF files, layers with states.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.machine.threads import use_threads
from engine.model.checkpoint import shape_of
from engine.model.decoder.architecture import architecture_of
from engine.model.decoder.decoder import DecoderModel
from engine.model.tap import FINAL, Tap
from engine.params import SamplingParams, SpeculationMode
from engine.startup.build import assemble, load, pick_device
from engine.training.recipe import TextPlan
from engine.training.recorder import RECORDER, LogitScaling, RowRecorder
from engine.training.store import WrittenText
from engine.types import Request, TokenEvent

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

Tokens = tuple[int, ...]
SHORTEST = 8  # tokens of a text that is worth learning from
_CHECKED = 8  # tokens whose log-probabilities are compared
_FAR = 0.3  # nats by which they may differ on average: what is recorded is rounded to bfloat16


def places_of(depth: int) -> tuple[int, int, int]:
    """The places of a target that a head reads: those of the published heads, or fitting ones of a shallow target.

    >>> places_of(32), places_of(4)
    ((2, 16, 29), (1, 2, 3))
    """
    return (2, depth // 2, depth - 3) if depth >= 6 else (depth // 4, depth // 2, depth - 1)


class Writer:
    """A target in an engine that records what it computes."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the target of `config`.

        Raises:
            ModelError: it cannot be served, or not be read between its layers.
        """
        use_threads(config.threads)
        own = {"proposer": RECORDER, "speculation": SpeculationMode.FIXED, "num_draft_tokens": 1, "loop": "plain"}
        asked = config.model_copy(update={**own, "prefix_cache": False})  # whose hits would be seen by nobody
        loaded = load(asked, config.target, config.revision, config.weights, pick_device(config.device))
        if architecture_of(loaded) is None:
            kind = loaded.config.model_type
            raise ModelError(f"target is {config.target!r}: {kind} is not in the table of architectures")
        self.model = cast("DecoderModel", loaded)
        self.places = places_of(shape_of(self.model.config, "num_hidden_layers"))
        tap = Tap(self.model, {*self.places, FINAL})
        self._recorder = RowRecorder(tap, self.places)
        self.engine: Engine = assemble(asked, loaded, extra_proposers={RECORDER: self._recorder}, tap=tap)
        self._ids = count()

    def write(self, prompts: Seq[Tokens], sampling: Seq[SamplingParams], *, records: bool = True) -> list[WrittenText]:
        """Continue all prompts at once; without `records` the texts have no rows.

        What is longer than the target's context has room for is cut: a prompt at its beginning.

        Raises:
            ModelError: the engine failed at one of them.
        """
        fitted = (self._fitted(*pair) for pair in zip(prompts, sampling, strict=True))
        requests = {f"text-{next(self._ids)}": pair for pair in fitted}
        written = {name: list(prompt) for name, (prompt, _) in requests.items()}
        for name, (prompt, params) in requests.items():
            if records:
                self._recorder.expect(name, len(prompt) + (params.max_tokens or 0))
            self.engine.add(Request(request_id=name, token_ids=prompt, sampling=params))
        for event in self._events():
            written[event.request_id] += event.token_ids
        return [self._text(name, tokens, len(requests[name][0]), records) for name, tokens in written.items()]

    def check_law(self, law: LogitScaling, prompt: Tokens) -> None:
        """Compare the log-probabilities that the engine reports with those of what is recorded.

        Raises:
            ModelError: the target makes its logits in another way than `law`.
        """
        asked = SamplingParams(max_tokens=_CHECKED, ignore_eos=True, logprobs=0)
        two = [self._fitted((*prompt, *again), asked) for again in ((), prompt[:1])]  # in one batch, as texts are
        tokens, reported = dict[str, list[int]](), defaultdict[str, list[float]](list)
        for given, params in two:
            name = f"text-{next(self._ids)}"
            tokens[name] = list(given)
            self._recorder.expect(name, len(given) + _CHECKED)
            self.engine.add(Request(request_id=name, token_ids=given, sampling=params))
        for event in self._events():
            tokens[event.request_id] += event.token_ids
            reported[event.request_id] += [one.logprob for one in event.logprobs]
        matrix, away = self.output_matrix().float(), 0.0
        for (given, _), (name, ids) in zip(two, tokens.items(), strict=True):
            text = self._text(name, ids, len(given), records=True)
            rows = text.rows[text.prompt - 1 :, -matrix.shape[1] :].float()
            made = law.logits(rows, matrix).log_softmax(-1).gather(1, text.tokens[text.prompt :, None])[:, 0]
            away = max(away, float((made - torch.tensor(reported[name])).abs().mean()))
        if away > _FAR:
            raise ModelError(
                f"{type(self.model).__name__} makes its logits in a way that is not known: their logarithms are off by "
                f"{away:.2f} on average, so no head can learn from them"
            )

    def _events(self) -> Iterator[TokenEvent]:
        while self.engine.has_work:
            for event in self.engine.step().events:
                if event.finished is not None and event.finished.error is not None:
                    raise ModelError(f"the target failed at a text: {event.finished.error}")
                yield event

    def _fitted(self, prompt: Tokens, params: SamplingParams) -> tuple[Tokens, SamplingParams]:
        limit = self.engine.max_model_len
        most = min(params.max_tokens or limit, limit // 2)
        return prompt[-(limit - most) :], replace(params, max_tokens=most)

    def _text(self, name: str, tokens: list[int], prompt: int, records: bool) -> WrittenText:
        rows = self._recorder.take(name, len(tokens) - 1) if records else torch.empty(0)
        return WrittenText(torch.tensor(tokens), prompt, rows)

    @torch.inference_mode()
    def embedding(self) -> Tensor:
        """bfloat16 `[vocab, hidden]`, the embedding of every token, as the target's layers receive it."""
        table = self._embedded(self.engine.vocab_size)
        return table.to("cpu", torch.bfloat16).clone()

    def _embedded(self, tokens: int) -> Tensor:
        """`[tokens, hidden]`, the embeddings of the first so many."""
        made: Tensor = self.model.get_input_embeddings()(torch.arange(tokens, device=self.model.device))
        return made

    @torch.inference_mode()
    def output_matrix(self) -> Tensor:
        """bfloat16 `[vocab, hidden]`, by which the target makes logits of its features.

        Raises:
            ModelError: its logits are no product of its features and one matrix.
        """
        head = self.model.get_output_embeddings()
        width = int(self._embedded(1).shape[1])
        if getattr(head, "bias", None) is not None:
            raise ModelError(f"{type(self.model).__name__} adds a bias to its logits: no head is trained for it")
        unit = torch.eye(width, dtype=self.model.dtype, device=self.model.device)
        made: Tensor = head(unit)
        return made.float().T.to("cpu", torch.bfloat16).contiguous()


def own_prompts(
    writer: Writer, opening: Tokens, plan: TextPlan, number: int, *, as_prompt: Callable[[Tokens], Tokens | None] | None
) -> list[Tokens]:
    """Prompts that the target writes itself from `opening` on, sampled at temperature 1; those of file `number`.

    `as_prompt` makes a prompt of what was written, for instance the opening of an answer to it; without it a prompt is
    the opening and what was written. A text that ends at once makes no prompt.
    """
    length = plan.prompt_tokens // 4
    params = [_drawn(plan, (number, i, 1), length, temperature=1.0) for i in range(plan.together)]
    texts = writer.write([opening] * plan.together, params, records=False)
    written = [tuple(text.tokens[text.prompt :].tolist()) for text in texts]
    ends = writer.engine.eos_token_ids
    bare = [tokens[:-1] if tokens and tokens[-1] in ends else tokens for tokens in written]
    made = [(*opening, *tokens) if as_prompt is None else as_prompt(tokens) for tokens in bare if tokens]
    return [prompt[-plan.prompt_tokens :] for prompt in made if prompt]


def continued(writer: Writer, prompts: Seq[Tokens], plan: TextPlan, number: int) -> list[WrittenText]:
    """Continuations of the prompts of file `number`, greedy or sampled; texts shorter than `SHORTEST` are left out."""
    dice = random.Random(f"{plan.seed} {number}")  # noqa: S311 - a mixture of data, no secret
    sampling = [
        SamplingParams(max_tokens=plan.tokens)
        if dice.random() < plan.greedy
        else _drawn(plan, (number, i, 2), plan.tokens, plan.temperature)
        for i in range(len(prompts))
    ]
    return [text for text in writer.write(prompts, sampling) if len(text.tokens) >= SHORTEST]


def held_out(writer: Writer, prompts: Seq[Tokens], plan: TextPlan) -> list[WrittenText]:
    """Greedy continuations of prompts that are never trained on."""
    return writer.write(prompts, [SamplingParams(max_tokens=plan.held_out_tokens)] * len(prompts))


def _drawn(plan: TextPlan, key: tuple[int, ...], tokens: int, temperature: float) -> SamplingParams:
    seed = random.Random(f"{plan.seed} {key}").getrandbits(32)  # noqa: S311 - not a secret
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)
