"""Logits processors: a request's changes to the model's logits before sampling.

At every position the order is the same as in decoding one token at a time: repetition penalty, frequency and presence
penalties, logit bias; then forbidden tokens: banned ones, all but the allowed ones, end tokens before `min_tokens`, and
those that the structure forbids. The drafts before a position count like tokens.

Tensors that depend only on the request are created once for all its outputs: it may list every token of the vocabulary,
and have a prompt as long as the context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from pilotfish.engine.errors import GrammarFault
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.sampling.noise import LogitsRow
from pilotfish.engine.types import GRAMMAR_TOKENS, Sequence

NEVER = float("-inf")


def process(logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Apply the processors of the requests of `rows`; `logits` `[R, vocab]` is never changed in place.

    Returns `logits` itself if no request needs a processor.
    """
    concerned = [i for i, row in enumerate(rows) if _is_concerned(row.sequence)]
    if not concerned:
        return logits
    where = torch.tensor(concerned, device=logits.device)
    mine = [rows[i] for i in concerned]
    part = _biased(_penalised(logits[where], mine), mine)
    return logits.index_copy(0, where, part.masked_fill(_forbidden(mine, part), NEVER))


def _is_concerned(sequence: Sequence) -> bool:
    wanted = sequence.request.sampling
    bans = wanted.banned_token_ids or wanted.allowed_token_ids is not None or sequence.grammar is not None
    return bool(_is_penalised(wanted) or wanted.logit_bias or bans or sequence.num_generated < wanted.min_tokens)


def _is_penalised(wanted: SamplingParams) -> bool:
    return wanted.repetition_penalty != 1 or wanted.presence_penalty != 0 or wanted.frequency_penalty != 0


def advance_grammar(sequence: Sequence, tokens: Seq[int]) -> None:
    """Advance the sequence's grammar state over its newest `tokens`."""
    if sequence.grammar_lag:
        sequence.grammar_lag += len(tokens)
    elif sequence.grammar is not None:
        _advance(sequence, tokens)


def catch_up_grammars(sequences: Seq[Sequence], seconds: float) -> None:
    """Let grammar states that lag behind take tokens, in turn, for about `seconds` of processor time.

    So the tokens emitted by an earlier engine do not delay other sequences.
    """
    lagging = sorted((s for s in sequences if s.grammar_lag), key=lambda s: -s.num_missed)
    end = time.thread_time() + seconds if lagging else 0.0
    for sequence in lagging:
        sequence.num_missed = sequence.num_missed + 1 if time.thread_time() >= end else 0
        while sequence.grammar_lag and time.thread_time() < end:
            assert sequence.grammar is not None
            start = len(sequence.tokens) - sequence.grammar_lag
            part = sequence.tokens[start : start + GRAMMAR_TOKENS]
            sequence.grammar_lag -= len(part)
            try:
                sequence.grammar.advance(part)
            except GrammarFault as fault:  # the next mask raises it, too
                sequence.fault, sequence.grammar_lag = str(fault), 0


def allowed_prefix(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The leading drafts that the sequence's structure allows; verification would drop all others."""
    if sequence.grammar is None or not drafts:
        return drafts
    taken = _advance(sequence, drafts)
    if taken:
        sequence.grammar.rollback(taken)
    return drafts[:taken]


def _advance(sequence: Sequence, tokens: Seq[int]) -> int:
    """Advance the grammar state; returns how many of `tokens` fit: 0 after a fault."""
    assert sequence.grammar is not None
    try:
        return sequence.grammar.advance(tokens)
    except GrammarFault as fault:
        _begin_again(sequence, fault)
        return 0


def _begin_again(sequence: Sequence, fault: GrammarFault) -> None:
    """Replace a grammar state that is unusable after a fault; the new one takes the output's tokens before later steps.

    A fault in drafts may not concern the output; if it does, it recurs in the new state.
    """
    assert sequence.request.grammar is not None
    sequence.fault = str(fault)
    sequence.grammar = sequence.request.grammar.start()
    sequence.grammar_lag = sequence.num_generated


# ------------------------------------------------------------------------------------------------------ penalties


def _penalised(logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    if not any(_is_penalised(row.sequence.request.sampling) for row in rows):
        return logits
    wanted = [row.sequence.request.sampling for row in rows]
    strengths = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in wanted]
    repetition, presence, frequency = torch.tensor(strengths, device=logits.device)[..., None].unbind(1)
    prompt, output = _counts(rows, logits)
    seen = (prompt + output) > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * output - presence * (output > 0)


def _counts(rows: Seq[LogitsRow], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Count each token in the prompt, and in the output before each row: two float32 tensors `[R, vocab]`.

    Only tokens that are new since the last step are counted; a row adds the drafts before it. The counts are small
    integers, so every order of summation gives the same bits.
    """
    pairs, sizes = list[tuple[Tensor, Tensor]](), list[int]()
    for _, run in _runs(rows):
        sequence = run[0].sequence
        if _is_penalised(sequence.request.sampling):
            asked = sequence.request.token_ids
            prompt = _once(sequence, "prompt", logits, partial(_counted, asked, logits))
            pairs.append((prompt, _output_counts(sequence, logits)))
        else:
            pairs.append((torch.zeros(logits.shape[1], device=logits.device),) * 2)
        sizes.append(len(run))
    repeats = torch.tensor(sizes, device=logits.device)
    prompt, output = (torch.stack(counts).repeat_interleave(repeats, 0) for counts in zip(*pairs, strict=True))
    return prompt, output + _bincount([row.before for row in rows], logits)


def _output_counts(sequence: Sequence, like: Tensor) -> Tensor:
    """Float32 `[vocab]`: generated occurrences of each token. Only tokens since the last call are read."""
    counts, start = sequence.output_counts, sequence.prompt_len + sequence.num_counted
    if counts is None or counts.shape != like.shape[1:] or counts.device != like.device:
        counts, start = torch.zeros(like.shape[1], device=like.device), sequence.prompt_len
    if start < len(sequence.tokens):
        counts = counts + _counted(sequence.tokens[start:], like)
    sequence.output_counts, sequence.num_counted = counts, sequence.num_generated
    return counts


def _counted(tokens: Iterable[int], like: Tensor) -> Tensor:
    """Float32 `[vocab]`: occurrences of each token; [3, 3, 1] -> 2 at token 3, 1 at token 1."""
    ids = _ids(tokens, like)
    return torch.zeros(like.shape[1], device=like.device).index_add_(0, ids, torch.ones(len(ids), device=like.device))


def _bincount(lists: Seq[Seq[int]], like: Tensor) -> Tensor:
    """Count tokens per list, `[lists, vocab]`: [[3, 3], [1]] -> row 0 has 2 at token 3, row 1 has 1 at token 1."""
    counts = torch.zeros(len(lists), like.shape[1], device=like.device)
    row, token = _flat(lists, like.device)
    return counts.index_put_((row, token), torch.ones(len(row), device=like.device), accumulate=True)


# ------------------------------------------------------------------------------------------------------ bias, bans


def _biased(logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    if not any(row.sequence.request.sampling.logit_bias for row in rows):
        return logits
    logits = logits.clone()
    for start, same in _runs(rows):
        sequence, wanted = same[0].sequence, same[0].sequence.request.sampling.logit_bias
        if wanted:
            logits[start : start + len(same)] += _once(sequence, "bias", logits, partial(_bias, wanted, logits))
    return logits


def _bias(wanted: Mapping[int, float], like: Tensor) -> Tensor:
    """The bias of each token, `[vocab]` in the type of `like`."""
    values = torch.tensor(list(wanted.values()), device=like.device).to(like.dtype)
    return torch.zeros_like(like[0]).index_add_(0, _ids(wanted, like), values)


def _forbidden(rows: Seq[LogitsRow], logits: Tensor) -> Tensor:
    """The forbidden tokens: bool `[R, vocab]`."""
    masks = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    structured: Tensor | None = None  # on the CPU, where structures write their masks
    for start, same in _runs(rows):
        wanted = same[0].sequence.request.sampling
        if wanted.banned_token_ids or wanted.allowed_token_ids is not None:
            masks[start : start + len(same)] |= _once(
                same[0].sequence, "forbidden", logits, partial(_ruled_out, wanted, logits)
            )
        if same[0].sequence.grammar is not None:
            structured = torch.ones(logits.shape, dtype=torch.bool) if structured is None else structured
            _fill(structured[start : start + len(same)], same)
    ends = [_ends_too_early(row, None if structured is None else structured[i]) for i, row in enumerate(rows)]
    masks[_flat(ends, logits.device)] = True
    return masks if structured is None else masks | ~structured.to(logits.device)


def _ruled_out(wanted: SamplingParams, like: Tensor) -> Tensor:
    """Bool `[vocab]`, True for banned tokens and for all but the allowed ones."""
    mask = torch.full(like.shape[1:], wanted.allowed_token_ids is not None, device=like.device)
    if wanted.allowed_token_ids is not None:
        mask[_ids(wanted.allowed_token_ids, like)] = False
    mask[_ids(wanted.banned_token_ids, like)] = True
    return mask


def _once(sequence: Sequence, name: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Cache the result of `make` per width and device; a draft model's logits may differ in both."""
    key = (name, like.shape[1], like.device, like.dtype)
    found = sequence.shared.get(key)
    if found is None:
        found = sequence.shared[key] = make()
    return found


def _ids(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)


def _runs(rows: Seq[LogitsRow]) -> Iterator[tuple[int, list[LogitsRow]]]:
    """Runs of adjacent rows of one sequence, each with the index of its first row."""
    start = 0
    for _, same in groupby(rows, key=lambda row: row.sequence):
        run = list(same)
        yield start, run
        start += len(run)


def _fill(masks: Tensor, rows: Seq[LogitsRow]) -> None:
    """Fill the masks of one sequence's rows, and record the time per mask for planning."""
    began = time.thread_time()
    num_filled = _filled(masks, rows)
    rows[0].sequence.mask_seconds = (time.thread_time() - began) / num_filled


def _filled(masks: Tensor, rows: Seq[LogitsRow]) -> int:
    """Fill the masks `[len(rows), vocab]` of one sequence's rows, in order of their numbers of drafts.

    Rows after the first draft that does not fit are not masked: that draft is dropped, so they are never used. If the
    structure fails at a row, its mask forbids all tokens; this matters only if the output reaches that row. If the
    state lags behind, because it failed at drafts of this step, all masks forbid everything: the sequence gets no token
    in this step.

    Returns the number of processed rows, at least 1.
    """
    sequence, taken = rows[0].sequence, 0
    state = sequence.grammar
    assert state is not None
    if sequence.grammar_lag:
        masks.zero_()
        return 1
    for i, (mask, row) in enumerate(zip(masks, rows, strict=True), 1):
        try:
            taken += state.advance(row.before[taken:])
            if taken < len(row.before):
                break
            state.fill(mask)
        except GrammarFault as fault:
            mask.zero_()
            if row.before:
                _begin_again(sequence, fault)
            else:  # the output ends here: its state is no longer needed
                sequence.fault = str(fault)
            return i
    state.rollback(taken)
    return i


def _ends_too_early(row: LogitsRow, may_come: Tensor | None) -> Iterable[int]:
    """The end tokens that `min_tokens` forbids; none if the structure is complete and allows only end tokens."""
    sequence = row.sequence
    if row.position - sequence.prompt_len >= sequence.request.sampling.min_tokens:
        return ()
    ends = sorted(sequence.end_token_ids)
    if sequence.grammar is not None and may_come is not None and int(may_come.sum()) == int(may_come[ends].sum()):
        return ()
    return ends


def _flat(lists: Seq[Iterable[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index tensors of (row, entry): [[5, 7], [], [2]] -> [0, 0, 2], [5, 7, 2]."""
    pairs = [(i, entry) for i, entries in enumerate(lists) for entry in entries]
    return torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)  # type: ignore[return-value]
