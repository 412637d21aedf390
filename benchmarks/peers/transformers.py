"""transformers in bfloat16: generate, assisted generation (limited to one prompt at a time), generate_batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.harness.turns import Clock, Turn
from benchmarks.peers.worker import Prompts, serve

_PAGE, _PASS = 32, 512  # tokens, as in Pilotfish


class Transformers:
    """Settings: model, draft (or None), threads, batch, length, how (`generate` or `generate_batch`)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = f"transformers {transformers.__version__}"
        torch.set_num_threads(settings["threads"] or torch.get_num_threads())
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self._how = settings["how"]
        self._pages = settings["batch"] * -(-settings["length"] // _PAGE)
        self._model = load(settings["model"], dtype=torch.bfloat16)
        self._draft = load(settings["draft"], dtype=torch.bfloat16) if settings.get("draft") else None

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `PeerProgram`."""
        return (
            self._batch(prompts, tokens) if self._how == "generate_batch" else self._generate(prompts, tokens, int(k))
        )

    @torch.no_grad()
    def _generate(self, prompts: Prompts, tokens: int, k: int) -> Turn:
        ids, width, clock = torch.tensor(prompts), len(prompts[0]), Clock.of(len(prompts))

        def tick(so_far: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            clock.tokens[:] = so_far[:, width:].tolist()
            clock.tick()
            return torch.zeros(len(so_far), dtype=torch.bool)  # no sequence is complete

        assisted: dict[str, Any] = {}
        if k:
            assert self._draft is not None, "drafts want a draft model"
            self._draft.generation_config.update(num_assistant_tokens=k, num_assistant_tokens_schedule="constant")
            self._draft.generation_config.assistant_confidence_threshold = 0.0
            assisted = {"assistant_model": self._draft}
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([tick]),
            **assisted,
        )
        clock.tokens[:] = made[:, width : width + tokens].tolist()
        return clock.turn()

    @torch.no_grad()
    def _batch(self, prompts: Prompts, tokens: int) -> Turn:
        """Run `generate_batch` with a fixed cache size: by default all memory becomes K/V and a step takes a second."""
        config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
        sizes = transformers.ContinuousBatchingConfig(num_blocks=self._pages, page_size=_PAGE, max_batch_tokens=_PASS)
        clock = Clock.of(len(prompts))
        # The time includes the setup, because a persistent manager would keep a core busy while others are measured.
        clock.began = clock.start
        found = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=sizes,
        )
        outputs = sorted(found.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
        clock.tokens[:] = [list(output.generated_tokens) for output in outputs]
        return clock.turn()


if __name__ == "__main__":
    serve(Transformers)
