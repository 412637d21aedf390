"""Loops around the libraries of others, on a library made up here; what vLLM is told; neighbours."""

from __future__ import annotations

import ctypes
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness import busy
from benchmarks.harness.synthetic import SHAPES, Rule, write
from benchmarks.peers import vllm
from benchmarks.peers.llama_loop import Llama

RULE = Rule(64, 3)
DRAFT = RULE.agreeing(0.5)


class FakeApi:
    """A `llama.h` whose models know one successor of each token; it keeps positions as strictly as a cache does."""

    def __init__(self):
        self.caches, self.logits, self.passes = {}, {}, {"target": 0, "draft": 0}

    def llama_model_default_params(self):
        return SimpleNamespace()

    def llama_context_default_params(self):
        return SimpleNamespace()

    def llama_model_load_from_file(self, path, params):
        return path.decode() if path in (b"target", b"draft") else None

    def llama_init_from_model(self, model, params):
        self.caches[model] = [[] for _ in range(params.n_seq_max)]
        return model

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocab):
        return RULE.vocab_size

    def llama_batch_init(self, tokens, embd, sequences):
        ids = [[0] for _ in range(tokens)]
        return SimpleNamespace(
            n_tokens=0, token=[0] * tokens, pos=[0] * tokens, logits=[0] * tokens, n_seq_id=[0] * tokens, seq_id=ids
        )

    def llama_decode(self, context, batch):
        self.passes[context] += 1
        successor = RULE.successor if context == "target" else DRAFT
        rows = []
        for i in range(batch.n_tokens):
            cache = self.caches[context][batch.seq_id[i][0]]
            if batch.pos[i] != len(cache):
                return 1
            cache.append(batch.token[i])
            if batch.logits[i]:
                rows.append([float(other == successor[cache[-1]]) for other in range(RULE.vocab_size)])
        flat = [logit for row in rows for logit in row]
        self.logits[context] = (ctypes.c_float * len(flat))(*flat)
        return 0


class FakeLibrary:
    version = "fake 1"

    def __init__(self):
        self.api = FakeApi()

    def tune(self, model_params, context_params):
        pass

    def logits(self, context):
        return self.api.logits[context]

    def forget(self, context, sequence, start):
        del self.api.caches[context][sequence][start:]


def loaded(library, **settings):
    return Llama(library, {"model": "target", "draft": "draft", "threads": 1, "batch": 3, "length": 40} | settings)


def test_the_loop_gives_the_text_of_the_target_and_right_drafts_save_passes():
    passes, prompts = {}, RULE.prompts(3, 8)
    for k in (0, 1, 4):
        library = FakeLibrary()
        program = loaded(library)
        for _ in range(2):  # the second time over what the first has left
            turn = program.run(prompts, 12, k)
            assert turn.tokens == [RULE.text(prompt[-1], 12) for prompt in prompts]
        assert bool(library.api.passes["draft"]) == bool(k)
        passes[k] = library.api.passes["target"]
    assert passes[4] < passes[0] == 2 * 12


def test_a_prompt_longer_than_a_pass_is_read_in_parts():
    library = FakeLibrary()
    prompt = RULE.prompts(1, 1100)[0]
    turn = loaded(library, batch=1, length=1200).run([prompt], 2, 0)
    assert turn.tokens == [RULE.text(prompt[-1], 2)]
    assert library.api.passes["target"] == 3 + 1


def test_a_file_that_cannot_be_loaded_is_named():
    with pytest.raises(OSError, match="fake 1 cannot load nothing"):
        loaded(FakeLibrary(), model="nothing")


def test_vllm_is_told_of_drafts_only_where_there_is_a_draft_model():
    settings = {"model": "m", "draft": None, "drafts": 0, "dtype": "float32", "batch": 4, "length": 128, "cache": 2}
    plain = vllm.arguments(settings)
    assert "speculative_config" not in plain
    assert plain["kv_cache_memory_bytes"] == 2 * 2**30
    told = vllm.arguments(settings | {"draft": "d", "drafts": 3})
    assert told["speculative_config"] == {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}
    assert {name: told[name] for name in plain} == plain


def test_an_int8_checkpoint_for_vllm_has_the_same_matrices(tmp_path):
    write(tmp_path / "model", SHAPES["tinier"], Rule(512), Rule(512).successor)
    vllm.export(tmp_path / "model", tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == vllm.QUANTIZATION
    rounded = [name for name, tensor in after.items() if tensor.dtype == torch.int8]
    assert len(rounded) == 7 * SHAPES["tinier"]["num_hidden_layers"]
    for name in rounded:
        step = after[f"{name}_scale"]
        assert ((after[name] * step - before[name].float()).abs() <= step / 2 * 1.001).all()
    for name in before.keys() - set(rounded):
        assert torch.equal(before[name], after[name])


def test_vllm_starts_anew_once(tmp_path):
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    bare = vllm.environment(2, tmp_path, {"LD_PRELOAD": "other.so"})
    assert bare["LD_PRELOAD"] == "other.so"
    openmp.touch()
    wanted = vllm.environment(2, tmp_path, {"LD_PRELOAD": "other.so"})
    assert wanted["LD_PRELOAD"] == f"{openmp}:other.so"
    assert vllm.environment(2, tmp_path, wanted) == wanted


def test_neighbours_come_and_go(monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            started.append(self)

    monkeypatch.setattr(busy.subprocess, "Popen", Recorded)
    with busy.neighbours(1):
        assert started[0].poll() is None
    with pytest.raises(KeyError), busy.neighbours(1):
        raise KeyError
    assert all(process.returncode is not None for process in started)
    with busy.neighbours(0):
        assert len(started) == 2
    with pytest.raises(ValueError, match="neighbours: -1"), busy.neighbours(-1):
        pass
