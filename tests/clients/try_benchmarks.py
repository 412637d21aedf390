"""Load generators: GuideLLM, AIPerf and vLLM's `bench serve`. Each reports as many answers as it asked for, no error.

They measure; nothing here says how fast anything has to be.
"""

from __future__ import annotations

import json

import pytest

from tests.clients.environments import MODEL, PROGRAMS, TOKENIZER, python, run, run_each, tool

pytestmark = pytest.mark.timeout(300)

REQUESTS, CONCURRENT, PROMPT, TOKENS = 8, 2, 32, 16


def test_guidellm(server, home):
    routes = {"text.json": "/v1/completions", "chat.json": "/v1/chat/completions"}
    common = [
        "run",
        *("--profile", f"kind=concurrent,streams={CONCURRENT}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"),
        "--disable-console-interactive",
    ]
    runs = [
        [
            *common,
            *("--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format={route}"),
            *("--output", f"kind=json,path={home / report}"),
        ]
        for report, route in routes.items()
    ]
    run_each("benchmarks", "guidellm", runs, home=home, HF_HUB_OFFLINE="1")
    for report in routes:
        [benchmark] = json.loads((home / report).read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert [request["info"]["error"] for request in benchmark["requests"]["errored"]] == []
        # Its constraint has ended a run on a busy machine before the last request began: that one is in no total.
        assert (totals["errored"], totals["incomplete"]) == (0, 0)
        assert totals["successful"] in (REQUESTS - 1, REQUESTS)
        answered = benchmark["requests"]["successful"]
        assert [request["output_metrics"]["text_tokens"] for request in answered] == [TOKENS] * totals["successful"]


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


def test_vllm_bench_serve(server, home):
    """Its table of speculation is made of the metrics that `--vllm-metrics` exports."""
    before = acceptance(server)
    common = [
        *("--base-url", server.url, "--model", MODEL, "--tokenizer", str(TOKENIZER)),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(TOKENS)),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENT), "--ignore-eos"),
        *("--save-result", "--result-dir", str(home)),
    ]
    runs = [
        [*common, "--backend", backend, "--endpoint", path, "--result-filename", f"{backend}.json"]
        for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"))
    ]
    run(python("benchmarks"), str(PROGRAMS / "vllm_bench.py"), json.dumps(runs), home=home, HF_HUB_OFFLINE="1")
    drafts = 0
    for path in home.glob("openai*.json"):
        result = json.loads(path.read_text())
        assert (result["completed"], result["failed"]) == (REQUESTS, 0)
        assert result["total_output_tokens"] == REQUESTS * TOKENS
        found = result["spec_decode_num_drafts"]
        assert found > 0
        assert result["spec_decode_accepted_tokens"] == pytest.approx(
            found * (result["spec_decode_acceptance_length"] - 1)
        )
        drafts += found
    assert 0 < drafts <= acceptance(server)[0] - before[0]  # a first request, which warms up, is not among them
