"""lm-eval (EleutherAI's evaluation harness) over HTTP: generation, multiple choice, and chats; with tasks made here."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from tokenizers import Tokenizer

from pilotfish.models.corpus import held_out_prompts
from tests.clients.environments import MODEL, TOKENIZER, run_each

pytestmark = pytest.mark.timeout(300)

TOKENS = 16
CHOICES = ["\n    return None", "\n\n", "\n        self.value = 1", "\nimport os"]
# lm-eval moves white space at the end of a question to the choices; so there is none.
QUESTIONS = [prompt[-120:].rstrip() for prompt in held_out_prompts(8)]
DOCUMENTS = [
    {"question": question, "choices": CHOICES, "answer": i % len(CHOICES)} for i, question in enumerate(QUESTIONS)
]


@pytest.fixture
def tasks(home):
    """A folder with two tasks and their documents."""
    documents = home / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    choosing = {
        "task": "choosing",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    writing = {
        "task": "writing",
        "output_type": "generate_until",
        "doc_to_target": "none",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    folder = home / "tasks"
    folder.mkdir()
    for task in (choosing, writing):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    return folder


@pytest.fixture
def evaluated(server, tasks, home):
    """The results over both routes, and the samples of each task in the order of the documents."""
    model = f"model={MODEL},base_url={server.url}/v1"
    text = f"{model}/completions,tokenizer={TOKENIZER},max_length=1024,num_concurrent=4"
    runs = {
        "text": ["local-completions", "--model_args", text, "--tasks", "choosing,writing", "--batch_size", "4"],
        "chat": ["local-chat-completions", "--model_args", f"{model}/chat/completions,num_concurrent=2",
                 "--tasks", "writing", "--apply_chat_template"],
    }  # fmt: skip
    common = ["--include_path", str(tasks), "--log_samples"]
    each = [["run", *common, "--output_path", str(home / out), "--model", *how] for out, how in runs.items()]
    run_each("benchmarks", "lm_eval", each, home=home)
    [results] = (home / "text").rglob("results_*.json")
    samples = {}
    for path in home.rglob("samples_*.jsonl"):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        name = path.relative_to(home).parts[0], path.name.split("_")[1]
        samples[name] = sorted(found, key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples


def log_likelihoods(client):
    """Of each choice after each question, from our own log-probabilities of prompts."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    found = []
    for question in QUESTIONS:
        start = len(tokenizer.encode(question).ids)
        whole = [tokenizer.encode(question + choice).ids for choice in CHOICES]
        read = [client.generate(ids, max_tokens=1, prompt_logprobs=True).prompt_logprobs for ids in whole]
        found.append([math.fsum(logprob.logprob for logprob in logprobs[start:]) for logprobs in read])
    return found


def test_multiple_choice_generation_and_chats(server, evaluated):
    results, samples = evaluated
    with server.grpc() as client:
        wanted = log_likelihoods(client)
        written = [client.generate(q, max_tokens=TOKENS, temperature=0.0, stop=["\n\n\n"]).text for q in QUESTIONS]
    told = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples["text", "choosing"]]
    assert told == [pytest.approx(row, abs=1e-3) for row in wanted]
    right = [row.index(max(row)) == document["answer"] for row, document in zip(wanted, DOCUMENTS, strict=True)]
    assert results["choosing"]["acc,none"] == sum(right) / len(right)
    assert [sample["resps"][0][0] for sample in samples["text", "writing"]] == written
    limits = {"max_tokens": TOKENS, "temperature": 0.0, "stop": ["\n\n\n"]}
    for question, sample in zip(QUESTIONS, samples["chat", "writing"], strict=True):
        answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": question}], **limits)
        assert sample["resps"][0][0] == answer["choices"][0]["message"]["content"]
