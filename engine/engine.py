"""The engine: token ids in, token ids out, without text or network; the clock is injected.

`Engine.step` is one step of speculative decoding for all sequences. Not thread-safe: one task calls `add`, `finish` and
`step`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pilotfish.engine.control import learned
from pilotfish.engine.control.controller import Control
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.device_loop.results import RoundResult, Rounds
from pilotfish.engine.errors import DuplicateRequest
from pilotfish.engine.model.adapters.store import Adapters
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.proposers import Proposers
from pilotfish.engine.request.intake import EngineFacts, Intake, Limits, self_test_request
from pilotfish.engine.request.prediction import num_predicted
from pilotfish.engine.sampling.processors import advance_grammar, catch_up_grammars
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.stats import Clock, EngineLoad, StepOutput, Stopwatch
from pilotfish.engine.step import Step, Work
from pilotfish.engine.step_stats import feedback_of, measure
from pilotfish.engine.target_pass import TargetPass
from pilotfish.engine.turns import MASK_SECONDS
from pilotfish.engine.types import FinishedOutput, FinishReason, Request, Sequence, TokenEvent

if TYPE_CHECKING:
    from pilotfish.engine.config import EngineConfig

log = logging.getLogger(__name__)

_KEEP_EVERY = 60.0  # seconds between two saves of learned values


class Engine:
    """A target model, its proposers, and the sequences that they decode."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        target: Runner,
        proposers: Proposers,
        scheduler: Scheduler,
        clock: Clock = time.perf_counter,
        rounds: Rounds | None = None,  # None: every sequence decodes in plain steps
        dtype: str = "float32",
        device: object = "cpu",
        adapters: Adapters | None = None,  # of the target; default: none
    ) -> None:
        self.config, self._clock = config, clock
        self.adapters = Adapters(None) if adapters is None else adapters
        self._intake = Intake(config, limits, proposers.names, self.adapters, proposers.any_of)
        self.check, self.speculation_of = self._intake.check, self._intake.speculation_of
        self.proposers, self.scheduler = proposers, scheduler
        self.pages = scheduler.target_pool  # with the prefix cache, whose changes can be watched
        self.rounds = rounds or Rounds()
        self.facts = EngineFacts(
            limits=limits, proposer_names=proposers.names, default_proposer=self._intake.default_proposer,
            page_size=self.pages.page_size, total_pages=self.pages.num_pages, loop=self.rounds.name, dtype=dtype,
            device=str(device),
        )  # fmt: skip
        self.target_pass = TargetPass(target, proposers, scheduler.target_pool.page_size)
        self.runner = target  # for code that measures passes
        self.control, self.round_control = scheduler.control, scheduler.round_control
        self._keeps_at: float | None = None  # time of the next save of learned values; None: never
        self._has_learned = False  # since the last save: an idle engine must not overwrite values learned by another
        self.calibrate: Callable[[Callable[[], bool]], bool] = lambda _: False  # the part deferred to `idle_tick`
        self.calibration_text: Seq[int] | None = None  # as tokens, set by the owner of the tokenizer
        self._live: dict[str, dict[int, Sequence]] = {}  # by request_id and output index

    # ------------------------------------------------------------------------------------------------ the step

    def step(self) -> StepOutput:
        """admit -> plan -> propose -> verify -> commit -> emit: one target pass for all sequences."""
        watch = Stopwatch(self._clock)
        step = self._plan(watch)
        with watch.phase("propose"):  # by models, for the sequences without drafts from planning
            step = self.proposers.propose(step)
        if step.works:
            step = self.target_pass.run(step, watch)
        with watch.phase("commit"):
            events = tuple(map(self._commit_one, step.decided))
        return self._emit(step, events, watch)

    def _plan(self, watch: Stopwatch) -> Step:
        """Admit requests that fit, and plan the tokens and the number of drafts of each sequence."""
        catch_up_grammars(self.scheduler.running, MASK_SECONDS)
        with watch.phase("plan"):
            self.scheduler.admit()
            step = self.scheduler.plan()
        self._launch_round(step, watch)
        return step

    def _emit(self, step: Step, events: tuple[TokenEvent, ...], watch: Stopwatch) -> StepOutput:
        """The output of the step: events of this pass, of errors, and of the previous round."""
        ended = tuple(map(self._end_for_fault, step.faulty))
        if step.error is None:
            self._learn(self.control, [feedback_of(step, watch.seconds)], step.decided, events)
        elif not step.works:
            self._blame_engine_or_requests(step.error)
        rounds, landed = self._land(watch)
        judged, failures = (*events, *landed), self.proposers.take_failures()
        stats = measure(step, judged, watch.seconds, failures, self.scheduler, rounds)
        return StepOutput((*events, *ended, *landed), stats, self.load)

    # -------------------------------------------------------------------------------------------- commit, and faults

    def _commit_one(self, work: Work) -> TokenEvent:
        """Commit the tokens of one sequence; an exception here ends only this sequence."""
        try:
            return self._keep(work)
        except Exception:
            log.exception("request %s: its tokens could not be committed; it ends", work.sequence.request_id)
            return self._end_for_fault(work.sequence)

    def _keep(self, work: Work) -> TokenEvent:
        """Append the accepted drafts and the next token, cut where plain decoding would stop; move the cursors."""
        sequence = work.sequence
        fresh = list(work.tokens[: sequence.num_before_stop(work.tokens)])
        num_accepted = min(work.num_accepted, len(fresh))
        if work.num_verified:
            sequence.stats = sequence.stats.after(work.num_verified, num_accepted)
        sequence.tokens += fresh
        sequence.rollback(len(sequence.tokens))  # I3: this is the rollback
        advance_grammar(sequence, fresh)
        return TokenEvent(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=tuple(fresh),
            from_draft=tuple(i < num_accepted for i in range(len(fresh))),
            logprobs=work.logprobs[: len(fresh)],
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.num_generated == len(fresh) else (),
            finished=self._end_if_over(sequence, work.problem),
        )

    def _blame_engine_or_requests(self, error: Exception) -> None:
        """Run a self-test after a pass that failed for every sequence, even alone; raise `error` if it fails, too.

        If it succeeds, the requests were at fault. So any number of faulty requests cannot stop a working engine, and a
        broken engine does not blame its requests.
        """
        (one,) = self._intake.open(self_test_request(self.facts.limits.max_model_len))
        pool = self.scheduler.target_pool
        if not pool.reserve(one.target, len(one.tokens)):
            return  # no free pages for the test; the passes of other sequences will show it
        try:
            self.target_pass.self_test(one)
        except Exception:
            log.exception("the self-test failed, too: the engine is at fault, not the requests")
            raise error from None
        finally:
            pool.release(one.target)

    def _end_for_fault(self, sequence: Sequence) -> TokenEvent:
        return self._end(sequence, FinishReason.ERROR, error="the request caused an error in the engine")

    # ------------------------------------------------------------------------------------- rounds on the device

    def _launch_round(self, step: Step, watch: Stopwatch) -> None:
        """Launch the next round of the sequences on the device, which runs during the rest of the step.

        A failure costs only speed: the host has all data that plain steps need.
        """
        try:
            with watch.phase("launch"):
                self.rounds.launch(step.on_device)
        except Exception:
            log.exception("a round on the device failed; from now on all sequences decode in plain steps")
            for sequence in self.scheduler.sequences:
                self.rounds.leave(sequence)
                sequence.on_device = False
            self.rounds = Rounds()

    def _land(self, watch: Stopwatch) -> tuple[list[RoundResult], tuple[TokenEvent, ...]]:
        """Commit the results of the previous round; their events are in the same order."""
        with watch.phase("land"):
            read = self.rounds.read()
            works = [work for round_ in read for work in round_.works]
            events = tuple(map(self._commit_one, works))
        self._learn(self.round_control, [round_.feedback for round_ in read], works, events)
        return read, events

    @staticmethod
    def _learn(
        control: Control, feedback: list[StepFeedback], works: Seq[Work], events: tuple[TokenEvent, ...]
    ) -> None:
        """Pass times and acceptance to control, which then drops ended sequences."""
        for one in feedback:
            control.learn(one)
        for work, event in zip(works, events, strict=True):
            if event.finished is not None:
                control.forget(work.sequence)

    # ------------------------------------------------------------------------------- a request's way in and out

    def add(self, request: Request) -> tuple[TokenEvent, ...]:
        """Accept a request that has passed `check`; it runs as soon as there is room.

        Returns:
            Terminal events of outputs of a resubmitted request that have already emitted all their tokens.

        Raises:
            DuplicateRequest: a live request has its id.
        """
        if request.request_id in self._live:
            raise DuplicateRequest(f"request_id {request.request_id!r} is live")
        outputs = self._intake.open(request)
        for sequence in outputs:
            sequence.on_device = sequence.adapter is None and self.rounds.takes(sequence)
        self._live[request.request_id] = {sequence.index: sequence for sequence in outputs}
        self._has_learned = True
        self.scheduler.add(*outputs)
        over = ((sequence, self._end_if_over(sequence, None)) for sequence in outputs if sequence.num_emitted)
        return tuple(
            TokenEvent(request_id=request.request_id, index=sequence.index, finished=finished)
            for sequence, finished in over
            if finished is not None
        )

    def finish(
        self, request_id: str, reason: FinishReason, *, index: int | None = None, keep: int | None = None
    ) -> tuple[TokenEvent, ...]:
        """End a live request, or one output of it, and free its pages now; return the terminal events.

        `keep`: number of the output's tokens before a stop string that ended its text. The statistics still count the
        drafts beyond it, because they were verified.
        """
        outputs = self._live.get(request_id, {})
        ended = [s for s in list(outputs.values()) if index is None or s.index == index]
        return tuple(self._end(sequence, reason, keep=keep) for sequence in ended)

    def finish_all(self, reason: FinishReason) -> tuple[TokenEvent, ...]:
        return tuple(event for name in list(self._live) for event in self.finish(name, reason))

    def _end_if_over(self, sequence: Sequence, problem: str | None) -> FinishedOutput | None:
        newest = sequence.tokens[-1]
        if sequence.num_generated and newest in sequence.end_token_ids:
            return self._end(sequence, FinishReason.STOP, stop_token_id=newest).finished
        if len(sequence.tokens) == sequence.max_len:
            return self._end(sequence, FinishReason.LENGTH).finished
        if problem is not None:
            return self._end(sequence, FinishReason.ERROR, error=problem).finished
        return None

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, keep: int | None = None, stop_token_id: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:  # fmt: skip
        outputs = self._live[sequence.request_id]
        del outputs[sequence.index]
        if not outputs:
            del self._live[sequence.request_id]
        control = self.scheduler.round_control if sequence.on_device else self.scheduler.control
        gain = control.gain.of(sequence)
        self.rounds.leave(sequence)
        self.scheduler.remove(sequence, trust=reason is not FinishReason.ERROR)
        finished = FinishedOutput(
            reason=reason,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.num_generated if keep is None else keep,
            seed=sequence.seed,
            speculation=sequence.speculation,
            stats=sequence.stats,
            spec_gain=gain,
            stop_token_id=stop_token_id,
            cached_prompt_tokens=sequence.num_cached,
            accepted_prediction_tokens=num_predicted(sequence, reason, keep),
            error=error,
        )
        return TokenEvent(request_id=sequence.request_id, index=sequence.index, finished=finished)

    # ----------------------------------------------------------------------------------------- idle

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def warm_up(self) -> None:
        """Run one short request, so that the first caller does not wait for one-time initialisation."""
        assert not self._live, "warm_up is for an idle engine"
        self.add(self_test_request(self.facts.limits.max_model_len))
        while self.has_work:
            self.step()

    def idle_tick(self, is_wanted: Callable[[], bool] | None = None) -> bool:
        """While idle: record a missing round, else calibrate until `is_wanted`, if given. True if work is left."""
        assert not self._live, "idle_tick is for an idle engine"
        has_more = self.rounds.record_missing() or (is_wanted is not None and self.calibrate(is_wanted))
        if self._has_learned and self._keeps_at is not None and self._clock() >= self._keeps_at:
            self.keep_learned()
        return has_more

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context in which all sequences decode in plain steps with fixed K; times are neither limited nor learned."""
        kept = self.rounds, self.control, self.scheduler.control, self.scheduler.prefill
        self.rounds, self.control, self.scheduler.prefill = Rounds(), Control(), PrefillBudget()
        self.scheduler.control = self.control
        try:
            yield
        finally:
            self.rounds, self.control, self.scheduler.control, self.scheduler.prefill = kept

    @contextmanager
    def practising(self) -> Iterator[None]:
        """Context without requests: control learns costs, and nothing else that affects requests."""
        with self.control.practising(), self.round_control.practising(), self.scheduler.apart():
            yield

    def recall(self) -> bool:
        """Load the values that an earlier process learned, and save them from now on. False if there are none."""
        self._keeps_at = self._clock() + _KEEP_EVERY
        return learned.recall(self.config, self._controls)

    def keep_learned(self) -> None:
        """Save what control has learned for later processes, now and then every minute when idle."""
        learned.keep(self.config, self._controls)
        self._has_learned, self._keeps_at = False, self._clock() + _KEEP_EVERY

    @property
    def _controls(self) -> dict[str, Control]:
        return {"plain": self.scheduler.control, "rounds": self.scheduler.round_control}

    def check_invariants(self) -> None:
        """Check I1, I5 and I8 on every sequence and page, and that live and scheduled sequences are the same."""
        self.scheduler.check_invariants()
        scheduled = {(s.request_id, s.index) for s in self.scheduler.sequences}
        live = {(name, index) for name, outputs in self._live.items() for index in outputs}
        assert scheduled == live, "a live sequence is not scheduled, or a dead one is"
        assert self.has_work or self.load.free_pages == self.facts.total_pages, "idle, and pages are held"

    # ------------------------------------------------------------------------------------------------------ load

    @property
    def load(self) -> EngineLoad:
        """The current load."""
        scheduler = self.scheduler
        sizes = len(scheduler.running), scheduler.num_waiting, scheduler.target_pool.num_free, scheduler.num_spare
        return EngineLoad(*sizes, scheduler.gain)

    @property
    def has_room(self) -> bool:
        """Whether a request that is added now would probably start with the next step."""
        return self.scheduler.has_room
