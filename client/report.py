"""The tables that `pilotfish generate` prints beside the text of an output. This module does not contact a server."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from client.results import Finished, TokenLogprob


def statistics(finished: Finished) -> Table:
    """Return a table with the statistics of one output."""
    stats, speculation = finished.speculation_stats, finished.speculation
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{finished.usage.completion_tokens} after {finished.usage.prompt_tokens} of prompt")
    table.add_row("speed", f"{finished.tokens_per_second:.1f} tokens/s")
    table.add_row("first token", f"{1000 * finished.timing.time_to_first_token_seconds:.0f} ms")
    if stats.drafted:
        table.add_row("acceptance", f"{stats.acceptance_rate:.1%} of {stats.drafted} drafts")
        table.add_row("tokens per round", f"{stats.acceptance_length:.2f} in {stats.rounds} rounds")
        table.add_row("gain", f"{stats.gain_ratio:.2f} times plain decoding, estimated")
    drafting = f"{speculation.mode}, {speculation.proposer}, K={speculation.num_draft_tokens}"
    table.add_row("speculation", f"{drafting}, {speculation.verification}")
    if finished.interruptions:
        table.add_row("interrupted", f"{finished.interruptions} times; the figures are of what followed")
    table.add_row("finished by", _reason(finished))
    table.add_row("seed", str(finished.seed))
    return table


def _reason(finished: Finished) -> str:
    if finished.stop_string is not None:
        return f"{finished.finish_reason} string {finished.stop_string!r}"
    if finished.stop_token_id is not None:
        return f"{finished.finish_reason} token {finished.stop_token_id}"
    return finished.finish_reason


def comparison(speculative: Finished, plain: Finished, *, same_text: bool) -> Text:
    """Return one line that compares a run with drafts and a run without."""
    fast, slow = speculative.tokens_per_second, plain.tokens_per_second
    if same_text:
        verdict = "the same text"
    elif speculative.speculation.verification == "rejection":
        verdict = "another sample, as rejection may draw"
    else:
        verdict = "ANOTHER TEXT"
    return Text(f"without speculation: {slow:.1f} tokens/s, {verdict}; speculation is {fast / slow:.2f} times as fast")


def logprobs(token_ids: Sequence[int], found: Sequence[TokenLogprob]) -> Table:
    """Return a table with one row per token: its id, its probability, and the most likely tokens at that position."""
    table = Table.grid(padding=(0, 2))
    for token, of in zip(token_ids, found, strict=True):
        top = "  ".join(f"{candidate.token_id} {candidate.logprob:.3f}" for candidate in of.top)
        table.add_row(str(token), f"{of.logprob:.3f}", top)
    return table
