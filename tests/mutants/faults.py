"""The faults: mistakes of a line that leave the code importable, and the tests that should find them.

The table reads like a patch: number, area, file and what breaks; after `-` the old text, which the file has once, and
after `+` the new one; after `=` the tests, files or single ones, if they are others than those of the fault above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault."""

    number: int
    area: str
    file: str
    what: str  # breaks
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_c(self) -> bool:
        """Whether it is in C, which is compiled again."""
        return self.file.endswith((".c", ".h"))

    def problems(self, root: Path) -> Iterator[str]:
        """Why it cannot be planted or looked for in this checkout."""
        count = (root / self.file).read_text("utf-8").count(self.old) if (root / self.file).is_file() else 0
        if count != 1:
            yield f"{self.number}: {self.file} has its old text {count} times"
        yield from (f"{self.number}: there is no {t}" for t in self.tests if not (root / t.partition("::")[0]).exists())


def faults(table: str) -> Iterator[Fault]:
    """Read a table."""
    tests: tuple[str, ...] = ()
    for entry in re.split(r"^(?=\d+ \| )", table, flags=re.MULTILINE)[1:]:
        head, *lines = entry.splitlines()
        number, area, file, what = head.split(" | ", 3)
        old, new, named = ("\n".join(line[1:] for line in lines if line[:1] == mark) for mark in "-+=")
        tests = tuple(named.split()) or tests
        yield Fault(int(number), area, file, what, old, new, tests)


FAULTS = tuple(
    faults(r"""
1 | verify rule | engine/verify.py | rejection: drafts behind a refused one count as accepted
-return kept.long().cumprod(1).sum(1)
+return kept.long().sum(1)
=tests/exactness/test_rejection.py
2 | verify rule | engine/verify.py | coupled: a draft that was refused counts as accepted
-if token != draft), len(drafts))
+if token != draft and i > 0), len(drafts))
3 | verify rule | engine/verify.py | rejection: after a refusal the token is drawn from p instead of the residual
-torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)
+p
4 | verify rule | engine/sampling/verification.py | rejection: residual and draft are drawn with the same noise
-_places(works, Stream.RESAMPLE)
+_places(works, Stream.DRAFT)
5 | rollback | engine/types.py | kv_len counts the newest token, which was not fed
-self.kv_len = min(self.kv_len, num_tokens - 1)
+self.kv_len = min(self.kv_len, num_tokens)
=tests/engine/kv/test_arena.py
6 | rollback | engine/types.py | of several proposers only the last one used is rolled back (auto)
-for cursor in self.drafts.values() or (self.draft,):
+for cursor in (self.draft,):
7 | rollback | engine/recurrent/arena.py | the log of a recurrent state is written one row too early
-span.settled - span.base,
+span.settled - span.base - (span.settled > span.base + 1),
=tests/engine/recurrent/test_mixers.py tests/engine/recurrent/test_schedules.py
8 | pages | engine/kv/pages.py | the last page of a sequence is never freed
-for page in reversed(cursor.page_table):
+for page in reversed(cursor.page_table[:-1]):
=tests/engine/kv/test_arena.py tests/engine/test_engine.py
9 | pages | engine/engine.py | pages of a request that failed stay in the prefix cache
-trust=reason is not FinishReason.ERROR
+trust=True
=tests/engine/test_engine.py
10 | seeds | engine/request/intake.py | all outputs of a request but the first have one seed
-f"{seed}/{index}".encode()
+f"{seed}".encode()
11 | seeds | engine/sampling/noise.py | the position of the noise does not count drafts
-return len(self.sequence.tokens) + len(self.before)
+return len(self.sequence.tokens)
=tests/exactness/test_coupled.py
12 | seeds | engine/sampling/distribution.py | seeds that differ only in their highest bit are the same
-return seed - 2**64 if seed >= 2**63 else seed
+return seed & (2**63 - 1)
=tests/engine/sampling/test_distribution.py
13 | pages | engine/kv/pages.py | a page adopted from the prefix cache can be taken by another sequence meanwhile
-self._kept.pop(page, None)
+pass
=tests/engine/kv/test_pages.py
14 | prefix keys | engine/kv/pages.py | a page enters the cache before its last position is written
-<= cursor.kv_len:
+<= cursor.kv_len + 1:
15 | prefix keys | engine/kv/pages.py | pages with the same tokens in another order collide
-span = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
+span = tuple(sorted(tokens[i * self.page_size : (i + 1) * self.page_size]))
16 | pages | engine/scheduler.py | a preempted sequence keeps its pages
-        self.running.remove(sequence)
-        self._release(sequence)
+        self.running.remove(sequence)
=tests/engine/test_scheduler.py
17 | pages | server/driver.py | a cancelled request continues in the engine and holds its pages
-self.host.drop(request_id, ending.reason)
+pass
=tests/server/test_life.py
18 | resume | server/streams/stream.py | the newest token is generated and sent again after the engine's death
-ReceivedOutput(token_ids=tuple(output.token_ids), has_ended
+ReceivedOutput(token_ids=tuple(output.token_ids[:-1]), has_ended
=tests/server/test_life.py tests/server/worker/test_engine_process.py
19 | seeds | client/resume.py | a stream that continues on another server gets another seed
-request.sampling.seed, request.stopping.max_tokens = self._info.seed, self._info.max_tokens
+request.stopping.max_tokens = self._info.max_tokens
=tests/client/test_resume.py tests/client/test_interrupted.py
20 | client | client/resume.py | attempts are never given back, so a long stream ends after twelve interruptions
-self._patience.renew()
+pass
21 | stop strings | engine/text/stops.py | a stop string inside the beginning of a longer one is missed
-next(filter(end.endswith, self._stops)) if end.endswith(self._stops) else ""
+end if end in self._stops else ""
=tests/engine/text/test_codec.py
22 | UTF-8 | engine/text/codec.py | a character that is cut at the end of the output is lost
-self._held + self._decoder.flush()
+self._held
23 | stop strings | server/streams/stream.py | a stop string in the step that ends an output: usage counts what follows
-completion_tokens=self.num_tokens, stop_token_id=None
+stop_token_id=None
=tests/server/test_generate.py
24 | stop strings | server/streams/stream.py | a stop string in the very last token: the reason is the length
-self._stop_string is not None or self.num_tokens < event.finished.completion_tokens)
+self.num_tokens < event.finished.completion_tokens)
25 | penalties and so on | engine/sampling/processors.py | min_tokens does not count the drafts before a row
-if row.position - sequence.prompt_len >= sequence.request.sampling.min_tokens:
+if sequence.num_generated >= sequence.request.sampling.min_tokens:
=tests/exactness/test_options.py::test_each_option_alone
26 | penalties and so on | engine/sampling/processors.py | penalties do not count the drafts before a row
-return prompt, output + _bincount([row.before for row in rows], logits)
+return prompt, output
27 | penalties and so on | engine/sampling/processors.py | logit_bias applies only to the first row of a step
-logits[start : start + len(same)] +=
+logits[start : start + 1] +=
28 | grammar | engine/sampling/processors.py | only the first row of a step has the mask of its structure
-_fill(structured[start : start + len(same)], same)
+_fill(structured[start : start + 1], same[:1])
29 | grammar | engine/sampling/processors.py | the state is not rolled back after the masks of drafts
-state.rollback(taken)
+pass
30 | grammar | engine/sampling/processors.py | after drafts that do not fit the grammar the state is not rolled back
-if taken:
+if taken == len(drafts):
31 | penalties and so on | engine/sampling/verification.py | log-probabilities are of other logits than the model's
-token_logprobs(logits[first : first + len(work.tokens)], work.tokens
+token_logprobs(logits[first : first + len(work.tokens)] / 2, work.tokens
=tests/engine/test_engine.py
32 | wire | server/grpc/messages.py | gRPC: the presence penalty is the frequency penalty
-{name: given[name] for name in
+{name: given.get(name.replace("presence", "frequency"), 0) for name in
=tests/server/test_options.py
33 | penalties and so on | engine/sampling/logprobs.py | log-probabilities of prompt tokens fed twice are shifted
-token_logprobs(logits[skip : skip + len(tokens)], tokens, wanted)
+token_logprobs(logits[: len(tokens)], tokens, wanted)
=tests/engine/sampling/test_costs.py
34 | grammar | engine/text/matcher.py | a rollback through an end token removes one text token too many
-num_text = num_tokens - (self._ended and num_tokens > 0)
+num_text = num_tokens
=tests/engine/text/test_guided.py
35 | prefix keys | engine/scheduler.py | callers with different salts share pages
-salt, adapter = (sequence.request.cache_salt, sequence.target.table), sequence.adapter
+salt, adapter = ("", sequence.target.table), sequence.adapter
=tests/engine/test_engine.py
36 | prefix keys | engine/scheduler.py | callers with different salts share pages of the draft model
-return sequence.request.cache_salt, cursor.table
+return "", cursor.table
37 | prefix keys | engine/scheduler.py | an adapter loaded under the name of an earlier one finds the pages of that one
-(*salt, (adapter.name, adapter.fingerprint))
+(*salt, (adapter.name, ""))
=tests/exactness/adapters/test_merged.py
38 | resume | engine/engine.py | usage forgets the tokens of the earlier engine
-completion_tokens=sequence.num_generated if keep is None else keep
+completion_tokens=sequence.num_generated - sequence.num_emitted if keep is None else keep
=tests/exactness/test_continued.py
39 | resume | engine/request/intake.py | a continued structure begins anew
-grammar_lag=0 if request.grammar is None else len(emitted)
+grammar_lag=0
40 | admission | server/queue.py | the queue holds one request more than its bound
-self.total + amount <= self.limit or
+self.total + amount <= self.limit + 1 or
=tests/server/test_queue.py
41 | admission | server/turns.py | a request gets the estimated wait of the one before it
-places[0] + tokens)
+places[0])
=tests/server/test_order.py
42 | admission | engine/request/validation.py | the bound on log-probabilities forgets n
-sampling.n * num_tokens)
+num_tokens)
=tests/engine/test_engine.py tests/server/test_limits.py
43 | wire | server/worker/remote.py | log-probabilities are lost between the processes
-output._replace(events=events)
+output._replace(events=tuple(event._replace(logprobs=()) for event in events))
=tests/server/worker/test_engine_process.py
44 | wire | server/worker/wire.py | a message is read only when a byte of the next one has arrived
-if len(self._unread) < body + size:
+if len(self._unread) <= body + size:
45 | wire | server/http/calls.py | HTTP: an event ends with one line break
-encoded(event) + b"\n\n"
+encoded(event) + b"\n"
=tests/server/http/test_gateway.py
46 | kernels | engine/native/panels.c | C: outputs behind the last eight of a panel are not packed
-for (int64_t k = 0; k < rows; k++)
+for (int64_t k = 0; k < r; k++)
=tests/engine/native/test_weights.py
47 | kernels | engine/native/attention.c | C: a sliding window is one key too wide
-position - a->window + 1 : 0
+position - a->window : 0
=tests/engine/native/test_native.py
48 | kernels | engine/native/attention.c | C: a key that begins a block is not seen by its own token
-for (; first <= newest; first += BLOCK)
+for (; first < newest; first += BLOCK)
49 | kernels | engine/native/rows.c | C: the first key of a token is normed with the queries' weights
-const Norm norm = head < h->query ?
+const Norm norm = head <= h->query ?
50 | kernels | engine/kernels/attention.py | Triton: one part too many is merged
-first + i < parts)
+first + i <= parts)
=tests/kernels/test_attention.py
51 | kernels | engine/kernels/sampling.py | Triton: equal logits at the edge of top-k in the same block count twice
-mask=b < block, other=0)
+mask=b <= block, other=0)
=tests/kernels/test_sampling.py
52 | kernels | engine/kernels/w4.py | Triton: the last, shorter split of the groups reads beyond them
-tl.minimum((split + 1) * per_split, groups) - 1
+(split + 1) * per_split - 1
=tests/kernels/test_w4.py
53 | quantised | engine/native/groups.h | C: high bytes of rows count half
-sum[v] += found[v] << 8;
+sum[v] += found[v] << 7;
=tests/engine/native/test_groups.py
54 | GGUF | engine/model/gguf/blocks.py | Q4_K, Q5_K: high bits of the steps of later groups are wrong
-low & 15 | first >> 2 & 48
+low & 15 | first >> 4 & 48
=tests/engine/model/gguf/test_blocks.py
55 | adapters | engine/model/linear/low_rank.py | of several sequences with one adapter only the first has it
-if len(spans) == 1:
+if spans:
=tests/exactness/adapters/test_mixed.py
56 | formats | server/formats/base.py | a marker that is cut before its last character is text
-max(map(len, markers), default=1) - 1)
+max(map(len, markers), default=1) - 2)
=tests/server/formats/test_scanner.py
57 | control | engine/control/goodput.py | always the maximum number of drafts
-count = int(rates.argmax())
+count = len(rates) - 1
=tests/engine/control/test_control.py
58 | control | engine/control/acceptance.py | refused drafts do not change the estimates
-tried = np.minimum(accepted + 1, drafted)[:, None]
+tried = np.minimum(accepted, drafted)[:, None]
59 | graphs | engine/device_loop/graphs.py | a recorded round does not keep the tensors that its graphs read by address
-recorded = RecordedRound(round_, slots,
+recorded = RecordedRound(None, slots,
=tests/engine/device_loop/test_graphs.py
60 | graphs | engine/device_loop/graphs.py | a replay uses the slots of the capture
-self.slots.copy_(slots)
+pass
61 | graphs | engine/device_loop/results.py | the results of a round are read before they have arrived
-self._event.synchronize()
+pass
62 | fair shares | engine/turns.py | the places that a caller holds count for nothing
-self._had[caller] + TURN * self.places(caller) + tokens
+self._had[caller] + tokens
=tests/engine/test_shares.py
63 | fair shares | engine/scheduler.py | whoever waits displaces nobody
-found = self._displace(sequence)
+return
64 | fair shares | server/turns.py | a caller gets places only as they become free
-part = self._equal_part(waiting[0])
+part = 0
=tests/server/test_callers.py
65 | fair shares | server/queue.py | a caller has no room beside one that fills the queue
-or self._held[caller] + amount <= share
+or self._held[caller] + amount <= 0
=tests/server/test_queue.py
66 | admission | server/driver.py | outputs that their callers cancelled teach nothing
-reason is not FinishReason.ERROR:
+reason not in (FinishReason.ERROR, FinishReason.CANCELLED):
=tests/server/test_order.py
67 | structures | engine/text/schemas/keywords.py | numbers of a schema are doubles
-parse_int=Decimal, parse_float=Decimal
+parse_int=lambda text: Decimal(float(text)), parse_float=Decimal
=tests/engine/text/schemas/test_numbers.py
68 | structures | engine/text/schemas/numbers.py | an exclusive bound is in the range
-_at_least(value, bound.is_open)
+_at_least(value, False)
69 | structures | engine/text/schemas/numbers.py | decimals with more digits than a bound are refused
-{_counted(behind)}[0-9]*" if behind
+{_counted(behind)}" if behind
70 | structures | server/formats/base.py | one keyword that is refused is the end of a function that is not strict
-lenient=not tool.strict, quote
+lenient=False, quote
=tests/server/formats/test_laws.py
71 | formats | server/formats/reasoning.py | a broken call takes all that follows
-self._scanner.rewind(length)
+self._scanner.take_all()
72 | formats | server/formats/json_text.py | any bracket closes any other one
-elif char in "}]" and self._next[-1] == "e" and self._closing[-1] == char:
+elif char in "}]" and self._next[-1] == "e":
=tests/server/formats/test_json_text.py
73 | formats | server/formats/json_text.py | control characters in strings stay as they are
-char if char == '"' else json.dumps(char)[1:-1]
+char
74 | GGUF | engine/model/gguf/families.py | tensors of layers beyond those of the metadata are left out
-first == "blk" and layer in layers and found
+first == "blk" and found
=tests/engine/model/gguf/test_strangers.py
75 | GGUF | engine/model/gguf/container.py | an array of texts may be as long as it says
-if self._strings_left < 0:
+if False:
76 | C libraries | engine/native/build.py | a library whose bytes have changed is loaded
-if hashlib.sha256(content).hexdigest() != built.sha256:
+if not content:
=tests/engine/native/test_library.py
77 | fair shares | engine/turns.py | prompts of a large caller are read beside all that decode
-is_short = bool(behind) and not others
+is_short = False
=tests/engine/test_shares.py
78 | fair shares | engine/control/prefill_budget.py | a step that is to be short reads as much as any other
-seconds = 0.0 if short else
+seconds =
=tests/engine/test_shares.py
79 | fair shares | engine/scheduler.py | what is run to calibrate is a caller who may come back
-shares, caches = self.shares, [pool.prefix_cache for pool in pools]
+shares, caches = Shares(), [pool.prefix_cache for pool in pools]
=tests/engine/startup/test_calibrate.py
80 | arena | engine/kv/arena.py | the first token of a large page waits until all of it is zeroed
-in_pages(zeros, large=False)
+in_pages(zeros, large=True)
=tests/engine/machine/test_mapped.py
81 | fair shares | server/admission/admission.py | who asks again at once is refused at once
-if isinstance(error, QueueFull):
+if False:
=tests/server/test_callers.py
82 | decoder | engine/model/decoder/rotary.py | YaRN's factor of cos and sin ignores that of all dimensions
-growth(own) / growth(of_all) if
+growth(own) if
=tests/engine/model/test_rotary.py
83 | decoder | engine/model/decoder/families/builders.py | layers of both kinds have the same rotary positions
-{"rotary": tables[kind]} for kind in config.layer_types
+{"rotary": tables[FULL]} for kind in config.layer_types
=tests/engine/model/test_decoder.py
84 | decoder | engine/model/decoder/families/described.py | a Qwen's first layers have a window too
-window is None or i < first
+window is None
=tests/engine/model/test_described.py
85 | decoder | engine/model/decoder/attention.py | a gate of an activation stays where its head's queries are
-torch.cat([queries.flatten() if order is None else queries.flatten()[order], gates.flatten()])
+torch.arange(2 * heads * dim)
=tests/engine/model/test_decoder.py
86 | decoder | engine/model/decoder/architecture.py | rotated neighbours are taken for rotated halves
-torch.arange(turned).view(-1, 2).t() if self.interleaved else
+torch.arange(turned).view(2, -1) if self.interleaved else
=tests/engine/model/test_decoder.py
87 | decoder | engine/model/decoder/experts.py | the bias that corrects the choice of experts is a part of their weights
-weights = scores.gather(1, experts)
+weights = wanted.gather(1, experts)
=tests/engine/model/test_decoder.py
88 | decoder | engine/model/decoder/stack.py | on a GPU the norm of a feed-forward's result is left out
-added, after = layer.feed(normed), after_feed
+added, after = layer.feed(normed), None
=tests/engine/model/test_decoder.py
""")
)
