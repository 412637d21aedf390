"""Load generators: GuideLLM, AIPerf and vLLM's `bench serve`. Each reports as many answers as it asked for, no error.

They measure; nothing here says how fast anything has to be.
"""

from __future__ import annotations

import json

import pytest

from tests.clients.environments import MODEL, PROGRAMS, TOKENIZER, python, run, tool

pytestmark = pytest.mark.timeout(300)

REQUESTS, CONCURRENT, PROMPT, TOKENS = 8, 2, 32, 16


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(server, home, route):
    report = home / "report.json"
    run(
        tool("benchmarks", "guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format={route}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENT}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console-interactive",
        home=home,
        HF_HUB_OFFLINE="1",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    errors = [request["info"]["error"] for request in benchmark["requests"]["errored"]]
    assert errors == []
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    answered = benchmark["requests"]["successful"]
    assert [request["output_metrics"]["text_tokens"] for request in answered] == [TOKENS] * REQUESTS


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf(server, home, kind):
    """It looks a tokenizer's folder up on the hub if HF_HUB_OFFLINE is set, and reads it if not."""
    before = acceptance(server)
    printed = run(
        tool("aiperf", "aiperf"),
        "profile",
        *("--model", MODEL, "--url", server.url, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", str(TOKENIZER), "--random-seed", "1"),
        *("--request-count", str(REQUESTS), "--concurrency", str(CONCURRENT)),
        *("--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "return_speculation_stats:true"),
        *("--ui", "simple", "--artifact-dir", str(home / "out")),
        home=home,
    )
    exported = home / "out" / "profile_export_aiperf.json"
    assert exported.exists(), printed  # its exit code is 0 whatever happens
    report = json.loads(exported.read_text())
    assert (report["error_summary"], report["request_count"]["avg"]) == ([], REQUESTS)
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    steps, drafted, accepted = (after - old for after, old in zip(acceptance(server), before, strict=True))
    assert report["total_spec_decode_steps"]["avg"] == steps
    assert report["total_draft_tokens"]["avg"] == drafted
    assert report["total_accepted_draft_tokens"]["avg"] == accepted
    pooled = {int(number): count for number, count in report["pooled_spec_decode_acceptance_histogram"].items()}
    assert sum(pooled.values()) == steps
    assert sum(number * count for number, count in pooled.items()) == accepted
    scraped = json.loads((home / "out" / "server_metrics_export.json").read_text())["metrics"]
    assert {"vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"} <= scraped.keys()


def acceptance(server):
    """How many drafts the server has verified, of how many tokens, and how many of them it has accepted."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return [server.metric(f"vllm:spec_decode_num_{name}_total") for name in names]


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(server, home, backend, path):
    """Its table of speculation is made of the metrics that `--vllm-metrics` exports."""
    before = acceptance(server)
    run(
        python("benchmarks"),
        str(PROGRAMS / "vllm_bench.py"),
        *("--backend", backend, "--base-url", server.url, "--endpoint", path),
        *("--model", MODEL, "--tokenizer", str(TOKENIZER)),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(TOKENS)),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENT), "--ignore-eos"),
        *("--save-result", "--result-dir", str(home), "--result-filename", "result.json"),
        home=home,
        HF_HUB_OFFLINE="1",
    )
    result = json.loads((home / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    after = acceptance(server)
    told = [result[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens")]
    assert 0 < told[0] <= after[0] - before[0]  # a first request, which warms up, is not among them
    assert told[2] == pytest.approx(told[0] * (result["spec_decode_acceptance_length"] - 1))
