"""The costs of an engine's steps, measured once and stored as a table. Knows no arrivals and no simulated clock."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.control.cost_model import quantities, with_rows
from engine.engine import Engine
from engine.params import SamplingParams
from engine.proposers import Proposal
from engine.scheduler import StepPlan
from engine.stats import Stopwatch
from engine.target_pass import TargetPass, Verified
from engine.types import Request

PROMPT, OUTPUT = (20, 120), (16, 64)  # tokens of the requests that the engine gets while it is measured
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)
_RIDGE = 1e-4  # of the fit: a kind of work that was never observed gets cost zero
_SWEEPS = 400  # of the fit


@dataclass(frozen=True, slots=True)
class Observed:
    """One observed step: the input of the target, the number of drafts, and the time that both took."""

    sequences: int
    rows: int
    contexts: int  # tokens with K/V, summed over all sequences
    asked: int  # sequences for which drafts were requested
    drafted: int
    tried: int  # drafts that were verified until the first rejection, including the rejected one
    accepted: int
    propose_seconds: float
    seconds: float  # of the whole step


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs per unit of work, in seconds, and the overheads of a server; `acceptance` is the rate of the next draft."""

    target: tuple[float, ...]  # per unit of the quantities that `engine.control.cost_model` counts
    draft: tuple[float, float, float]  # per drafting call, per sequence in it, per draft
    acceptance: float
    step_overhead: float = 0.0  # between two steps of a server
    token_overhead: float = 0.0  # between two steps, per sequence that received tokens

    def target_seconds(self, sequences: int, rows: int, contexts: float) -> float:
        """Return the seconds of one pass and the rest of a step, without drafting."""
        return float(_work(sequences, rows, contexts) @ np.array(self.target))

    def draft_seconds(self, asked: int, drafted: int) -> float:
        """Return the seconds of drafting."""
        return float(np.array([1.0, asked, drafted]) @ np.array(self.draft)) if asked else 0.0

    def between(self, num_events: int) -> float:
        """Return the seconds from the end of a step to the beginning of the next."""
        return self.step_overhead + num_events * self.token_overhead

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a table that `save` wrote."""
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return cls(tuple(found.pop("target")), tuple(found.pop("draft")), **found)

    @classmethod
    def fit(cls, steps: Seq[Observed]) -> CostTable:
        """Fit non-negative costs that best explain the steps, with errors relative to each step's time."""
        works = np.array([_work(s.sequences, s.rows, s.contexts) for s in steps])
        target = _fit(works, np.array([s.seconds - s.propose_seconds for s in steps]))
        drafting = [s for s in steps if s.asked]
        asked = np.array([[1.0, s.asked, s.drafted] for s in drafting])
        draft = _fit(asked, np.array([s.propose_seconds for s in drafting]))
        acceptance = sum(s.accepted for s in steps) / max(1, sum(s.tried for s in steps))
        return cls(tuple(target), (draft[0], draft[1], draft[2]), acceptance)


def _work(sequences: int, rows: int, contexts: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return with_rows(quantities(passes=1, sequences=sequences, context=contexts), [rows])


def _fit(works: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> list[float]:
    """Minimise relative errors by coordinate descent, starting at zero."""
    scaled, wanted = works / seconds[:, None], np.ones(len(seconds))
    information = scaled.T @ scaled + _RIDGE * np.diag((scaled**2).sum(0) + 1e-30)
    moments, values = scaled.T @ wanted, np.zeros(works.shape[1])
    for _ in range(_SWEEPS):
        for i in range(len(values)):
            rest = moments[i] - information[i] @ values + information[i, i] * values[i]
            values[i] = max(0.0, rest / information[i, i])
    return [float(value) for value in values]


class _Recorder(TargetPass):
    """A target pass that records the size of each input."""

    notes: list[dict[str, int]]

    def run(self, plan: StepPlan, proposal: Proposal, watch: Stopwatch) -> Verified:
        """Run the pass unchanged and record its input and outcome."""
        contexts = sum(len(work.sequence.tokens) for work in plan.works)
        decided = super().run(plan, proposal, watch)
        rounds = [(len(f.drafts), o.num_accepted) for f, o in zip(decided.fed, decided.outcomes, strict=True)]
        rows = sum(len(work.span) for work in plan.works) + sum(map(len, proposal.tokens))
        self.notes.append(
            {
                "sequences": len(plan.works),
                "rows": rows,
                "contexts": contexts,
                "asked": sum(k > 0 for k in plan.num_draft_each),
                "drafted": sum(drafts for drafts, _ in rounds),
                "tried": sum(min(accepted + 1, drafts) for drafts, accepted in rounds),
                "accepted": sum(accepted for _, accepted in rounds),
            }
        )
        return decided


def observe(engine: Engine, prompts: Seq[tuple[int, ...]], seconds: float) -> list[Observed]:
    """Run an idle engine with batches of all sizes, each for an equal share of the time, and return every step."""
    passes = engine._target_pass  # noqa: SLF001  # measured from outside: the engine itself has no use for this
    passes.__class__, passes.notes = _Recorder, []  # type: ignore[attr-defined]
    found, draw = list[Observed](), random.Random(1)  # noqa: S311
    for batch in BATCHES:
        end = time.perf_counter() + seconds / len(BATCHES)
        while time.perf_counter() < end:
            while engine.num_running + engine.num_waiting < min(batch, engine.config.max_batch_size):
                _add(engine, draw.choice(prompts), draw)
            start = time.perf_counter()
            stats = engine.step().stats
            took = time.perf_counter() - start
            note = passes.notes.pop()  # type: ignore[attr-defined]
            found.append(Observed(**note, propose_seconds=stats.phase_seconds["propose"], seconds=took))
    return found


def _add(engine: Engine, prompt: tuple[int, ...], draw: random.Random) -> None:
    """Add a request with its own salt, so that it finds nothing in the prefix cache."""
    name, length = f"cost-{draw.getrandbits(64)}", draw.randint(*PROMPT)
    sampling = SamplingParams(max_tokens=draw.randint(*OUTPUT), ignore_eos=True)
    engine.add(Request(request_id=name, token_ids=prompt[:length], sampling=sampling, cache_salt=name))
