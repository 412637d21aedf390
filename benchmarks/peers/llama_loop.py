"""A batch loop and a speculative loop around the `llama.h` interface: the library does all the work.

This module is independent of the library: an adapter hides the calls that llama.cpp and its fork name differently.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.turns import Clock, Turn
from benchmarks.peers.worker import Prompts

_PASS = 512  # maximum tokens of a pass, as in Pilotfish


class Library(Protocol):
    """One build of `llama.h`, with methods for the calls whose names differ between builds."""

    api: Any  # the functions with the same name in all builds
    version: str

    def tune(self, model_params: Any, context_params: Any) -> None:
        """Set the parameters that this library needs, beyond sizes and threads."""
        ...

    def logits(self, context: Any) -> Any:
        """Return a pointer to the requested rows of logits, one after another."""
        ...

    def forget(self, context: Any, sequence: int, start: int) -> None:
        """Drop the keys and values of a sequence from position `start` on."""
        ...


class Model:
    """A model with a K/V cache for several sequences, and the number of tokens that each sequence has in it."""

    def __init__(self, library: Library, path: str, threads: int, batch: int, length: int) -> None:
        self._library, api = library, library.api
        model_params, params = api.llama_model_default_params(), api.llama_context_default_params()
        library.tune(model_params, params)
        self._model = api.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise OSError(f"{library.version} cannot load {path}")
        params.n_ctx, params.n_seq_max = batch * length, batch
        params.n_batch = params.n_ubatch = _PASS
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise OSError(f"{library.version} has no context for {batch} sequences of {length} tokens")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(_PASS, 0, 1)
        self.fed = [0] * batch

    def clear(self) -> None:
        """Drop the K/V of all sequences."""
        for sequence in range(len(self.fed)):
            self.rollback(sequence, 0)

    def rollback(self, sequence: int, length: int) -> None:
        """Drop the K/V of a sequence beyond `length`."""
        if self.fed[sequence] > length:
            self._library.forget(self._context, sequence, length)
            self.fed[sequence] = length

    def forward(self, feeds: list[tuple[int, list[int], int]]) -> list[list[int]]:
        """Feed (sequence, tokens, number of last positions to return); return the best next tokens there."""
        rows = [
            (sequence, token, self.fed[sequence] + i, i >= len(tokens) - wanted)
            for sequence, tokens, wanted in feeds
            for i, token in enumerate(tokens)
        ]
        best = [token for start in range(0, len(rows), _PASS) for token in self._decode(rows[start : start + _PASS])]
        answers, first = [], 0
        for sequence, tokens, wanted in feeds:
            self.fed[sequence] += len(tokens)
            answers.append(best[first : first + wanted])
            first += wanted
        return answers

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Read one text of at most a pass -> the logits at all its positions `[tokens, vocabulary]`."""
        self.clear()
        self._run([(0, token, position, True) for position, token in enumerate(tokens)])
        return _rows(self._library.logits(self._context), len(tokens), self._vocab_size)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        self._run(rows)
        count = sum(row[3] for row in rows)
        return _argmax(self._library.logits(self._context), count, self._vocab_size)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, token, position, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        code = self._library.api.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode says {code}")


def _argmax(logits: Any, rows: int, width: int) -> list[int]:
    return [int(token) for token in _rows(logits, rows, width).argmax(1)] if rows else []


def _rows(logits: Any, rows: int, width: int) -> NDArray[np.float32]:
    return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (rows, width))


class Llama:
    """A target with an optional draft. Settings: model, draft (or None), threads, batch, length."""

    def __init__(self, library: Library, settings: dict[str, Any]) -> None:
        self.version = library.version
        sizes = settings["threads"], settings["batch"], settings["length"]
        self._target = Model(library, settings["model"], *sizes)
        self._draft = Model(library, settings["draft"], *sizes) if settings.get("draft") else None

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `PeerProgram`."""
        self._target.clear()
        if self._draft is not None:
            self._draft.clear()
        texts = [list(prompt) for prompt in prompts]
        ends = [len(text) + tokens for text in texts]
        clock = Clock.of(len(texts))
        while active := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
            drafts = self._drafts(texts, active, int(k) if all(clock.tokens) else 0)
            self._verify(texts, active, drafts)
            for i in active:
                del texts[i][ends[i] :]
                clock.tokens[i] = texts[i][len(prompts[i]) :]
            clock.tick()
        return clock.turn()

    def _drafts(self, texts: list[list[int]], active: list[int], k: int) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {i: [] for i in active}
        for _ in range(k):
            assert self._draft is not None, "drafts want a draft model"
            feeds = [(i, (texts[i] + drafts[i])[self._draft.fed[i] :], 1) for i in active]
            for i, (token,) in zip(active, self._draft.forward(feeds), strict=True):
                drafts[i].append(token)
        return drafts

    def _verify(self, texts: list[list[int]], active: list[int], drafts: dict[int, list[int]]) -> None:
        """Run one target pass, append the accepted drafts and one more token, and roll both models back."""
        feeds = [(i, texts[i][self._target.fed[i] :] + drafts[i], len(drafts[i]) + 1) for i in active]
        for i, answer in zip(active, self._target.forward(feeds), strict=True):
            kept = next((n for n, token in enumerate(drafts[i]) if token != answer[n]), len(drafts[i]))
            texts[i] += answer[: kept + 1]
            for model in (self._target, self._draft):
                if model is not None:
                    model.rollback(i, len(texts[i]) - 1)
