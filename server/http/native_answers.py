"""Messages of the protocol as answers of `/generate`: a text with figures, or a stream of tokens. Knows no engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pilotfish.v1 import generation_pb2 as pb
from server.http.calls import Answers, Messages

Json = dict[str, Any]

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
}


class NativeAnswers(Answers):
    """Answers of `/generate`."""

    async def answer(self, responses: Sequence[pb.GenerateResponse]) -> Json:
        (response,) = responses
        (output,) = response.outputs
        return {"generated_text": output.text} | _figures(output.finished)

    async def events(self, messages: Messages) -> AsyncIterator[list[Json]]:
        """Yield the tokens of each round with their texts and whether each was an accepted draft; last, the figures."""
        async for message in messages:
            yield [_figures(message.finished) if message.HasField("finished") else _piece(message.delta)]


def _piece(delta: pb.TokenDelta) -> Json:
    """Return an event. Text that was held back until the end belongs to no single token and is only in `text`."""
    borders = accumulate(delta.text_lengths, initial=0)
    texts = [delta.text[start:stop] for start, stop in pairwise(borders)]
    tokens = [
        {"id": token, "text": text, "from_draft": drafted}
        for token, text, drafted in zip(delta.token_ids, texts, delta.from_draft, strict=True)
    ]
    return {"text": delta.text, "tokens": tokens}


def _figures(end: pb.Finished) -> Json:
    usage, stats, timing = end.usage, end.speculation_stats, end.timing
    seconds = timing.total_seconds - timing.queue_seconds
    first = timing.time_to_first_token_seconds if timing.HasField("time_to_first_token_seconds") else None
    return {
        "finish_reason": FINISH_REASONS.get(end.finish_reason, "abort"),
        "tokens_per_second": usage.completion_tokens / seconds if seconds > 0 else 0.0,
        "avg_tokens_per_jump": stats.acceptance_length or 1.0,  # without drafts each round gives one token
        "latency_ms": 1000 * timing.total_seconds,
        "time_to_first_token_ms": None if first is None else 1000 * first,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "gain": stats.gain_ratio,
        "seed": end.seed,
    }
