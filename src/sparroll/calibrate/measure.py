"""Measures the tail of one schedule on one set of prompts. Profile, sweep and verification are built on this.

It decides nothing: targets, grids of budgets and files are elsewhere.
"""

# T response tokens of one rollout

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from sparroll.attention.selectors import Selector
from sparroll.calibrate.check_figures import CheckFigures
from sparroll.engines.base import under
from sparroll.engines.generate_arguments import check_temperature
from sparroll.engines.generate_arguments import seeds as seeds_of_requests
from sparroll.engines.sampling import request_seed
from sparroll.errors import UserError, nearest
from sparroll.mismatch import ESTIMATORS, TailStatistics, TailTable, acceptance_of, acceptance_sampled
from sparroll.mismatch.checks import check_bins
from sparroll.mismatch.divergence import Divergence
from sparroll.mismatch.of_rollouts import off_nats_of
from sparroll.progress import OnProgress, Stages, counted
from sparroll.schedule import Schedule
from sparroll.types import MOST_SAMPLES, Rollout, TokenScores, check_seed

if TYPE_CHECKING:
    from sparroll.engines.base import Engine
    from sparroll.engines.scoring import Scorer

Mode = Literal["faithful", "replay"]
MODES = ["faithful", "replay"]

Prompts = Sequence[str] | Sequence[Sequence[int]]

WHOLE_BYTES = 1 << 30
"""Most bytes of whole distributions that exist at one time, in the engine's result."""
_ENTRY_BYTES = 12
"""An id and its log-probability."""


@dataclass(frozen=True)
class MeasureSettings:
    """How tails are measured. Two tails can be compared only if these settings are the same."""

    max_new_tokens: int
    mode: Mode = "faithful"
    """faithful: every schedule generates its own rollouts. replay: one set of dense rollouts is read again through the
    sparse attention of each schedule. That is cheaper, but does not see where sparse rollouts would have gone."""
    samples: int = 8
    """Rollouts per prompt."""
    temperature: float = 1.0
    estimator: str = "top_k_lower"
    """One of mismatch.ESTIMATORS. The published target of 0.86 is for top_k_lower with k = 20. exact: the engine returns
    its whole distribution at each token, which only small vocabularies allow."""
    top_k: int = 20
    bin_tokens: int = 2000
    quantile: float = 0.05
    replicates: int = 200
    """Bootstrap replicates of the interval."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"unknown mode {self.mode!r}", nearest(str(self.mode), MODES))
        if self.estimator not in ESTIMATORS:
            raise UserError(f"unknown estimator {self.estimator!r}", nearest(str(self.estimator), list(ESTIMATORS)))
        for name in ("max_new_tokens", "samples", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of 1 or more, got {value!r}")
        check_temperature(self.temperature)
        check_seed(self.seed)
        if self.samples > MOST_SAMPLES:
            raise UserError(f"samples must be at most {MOST_SAMPLES:,}, got {self.samples:,}")
        # Statistics refuse settings that they cannot use; here they do so before anything runs.
        self.statistics()
        check_bins(self.bin_tokens, self.max_new_tokens)

    def statistics(self) -> TailStatistics:
        """Empty statistics with these settings."""
        return TailStatistics(self.bin_tokens, self.quantile, self.replicates, self.seed)

    @property
    def list_tokens(self) -> int:
        """Length of the top-k lists that the estimator needs."""
        return self.top_k if self.estimator.startswith("top_k") else 0

    def table(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def check_measurable(schedule: Schedule, settings: MeasureSettings) -> None:
    """Raise UserError where these settings cannot measure a schedule whose drafts are checked."""
    if schedule.check is None:
        return
    if settings.mode == "replay":
        raise UserError(
            f"a replay drafts nothing, so the check of {schedule.name} has nothing to take back",
            "use the mode faithful, or measure the schedule without its check",
        )
    if settings.estimator == "exact":
        raise UserError(
            "the estimator exact compares whole distributions of the engine and the scorer, and a check compares the "
            "engine with itself",
            "use top_k_lower with a schedule that checks its drafts",
        )
    if settings.temperature == 0:
        raise UserError(
            "at temperature 0 the policy behind checked drafts has no distribution to compare",
            "use a temperature above 0",
        )


def check_percentiles(settings: MeasureSettings) -> None:
    """Raise UserError for the estimator "sampled", of which only the mean is that of the acceptance."""
    if settings.estimator == "sampled":
        raise UserError(
            "the percentiles of the estimator 'sampled' are not those of the acceptance, so there is no tail to measure",
            "use top_k_lower or exact",
        )


@dataclass
class Measurement:
    """The tail of one schedule. If `schedule` is None, it is the tail of dense decoding: the ceiling."""

    schedule: Schedule | None
    statistics: TailStatistics
    estimator: str
    kv_read_share: float
    """Tokens attended / tokens in context over all layers and decode steps. faithful: as the engine reports it, or where
    several schedules were sampled together, as the rollouts say it. replay: computed from the schedule and the lengths of
    the replayed rollouts."""
    mode: Literal["faithful", "replay", "dense"]
    """How it was measured. dense: no step could read less than its context, so these are the dense rollouts'
    statistics."""
    seed: int
    wall_seconds: float = 0.0
    checked: CheckFigures | None = None
    """What the checks of drafts did; None for a schedule without a check."""
    divergence: Divergence | None = None
    """KL and impossible tokens, where the tail is blind; None for an estimator without top-k lists."""

    @property
    def name(self) -> str:
        return "dense" if self.schedule is None else self.schedule.name

    def tail(self) -> TailTable:
        """The tail by context length, with intervals."""
        return self.statistics.table(self.estimator)


@dataclass
class Study:
    """One model, one set of prompts and one way to measure. Dense rollouts and their scores are made once and kept.

    The engine and the scorer must hold the same weights. Each measurement resets the engine's report, and restores its
    schedule afterwards. If dense `rollouts` are given, none are generated.

    >>> study = Study(engine, Scorer(engine.model), prompts, MeasureSettings(max_new_tokens=1024))
    >>> print(study.measure(Schedule.fixed(512)).tail())
    """

    engine: Engine
    scorer: Scorer
    prompts: Prompts
    settings: MeasureSettings
    rollouts: list[Rollout] | None = None
    """The dense rollouts, as soon as they exist."""
    restart: Callable[[Schedule], Engine] | None = None
    """Starts an engine with the index of this schedule's selector, where one engine has no other. The one before is
    closed first. None: the engine runs them all."""
    indexed: Selector | None = None
    """The selector that the engine has now; only with `restart`."""
    given_rollouts: str | None = field(default=None, init=False)
    """Digest of the dense rollouts that the study was given; None if it generates them itself."""
    _dense_scores: list[TokenScores] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rollouts is not None:
            self.given_rollouts = digest([[r.prompt_ids, r.response_ids] for r in self.rollouts])

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the engine, whichever is open."""
        self.engine.close()

    def dense_rollouts(self, on_progress: OnProgress | None = None) -> list[Rollout]:
        """The dense rollouts. The first call generates them."""
        if self.rollouts is None:
            self.rollouts = self._generate(None, self.settings.seed, on_progress)
        return self.rollouts

    def ceiling(self, on_progress: OnProgress | None = None) -> Measurement:
        """The tail of dense rollouts under the scorer: the ceiling that no budget can beat."""
        started = time.perf_counter()
        if self.settings.estimator == "exact":
            statistics = self._exact_ceiling(on_progress)
            return self._measurement(None, statistics, 1.0, "dense", self.settings.seed, started)
        stages = Stages(on_progress, 2)
        rollouts = self.dense_rollouts(stages.next("dense rollouts"))
        statistics, divergence = self._statistics(rollouts, None, "faithful", stages.next("dense scores"))
        found = self._measurement(None, statistics, 1.0, "dense", self.settings.seed, started)
        return replace(found, divergence=divergence)

    @property
    def samples_together(self) -> bool:
        """Whether rollouts of several schedules can be sampled in the same decode steps. It depends on the settings and the
        engine's kind alone."""
        settings = self.settings
        return settings.mode == "faithful" and settings.estimator != "exact" and self.engine.most_schedules > 1

    def schedules_at_once(self, schedule: Schedule) -> int:
        """Of how many schedules like this one `measure_together` samples the rollouts in the same decode steps: as many as
        the engine's batch and its cache hold all requests of."""
        if not self.samples_together:
            return 1
        settings, engine = self.settings, self._engine_for(schedule)
        requests = len(self.prompts) * settings.samples
        longest = (
            max(0 if isinstance(prompt, str) else len(prompt) for prompt in self.prompts) + settings.max_new_tokens
        )
        fit = engine.max_batch // requests
        if engine.cache_tokens is not None:
            fit = min(fit, engine.cache_tokens // (requests * longest))
        return max(1, min(engine.most_schedules, fit))

    def measure_together(
        self, schedules: Sequence[Schedule], *, on_progress: OnProgress | None = None
    ) -> list[Measurement]:
        """The tail under each of these schedules, with rollouts that are sampled together: those that `measure` would
        sample. A step of a small batch leaves most of a GPU idle, so this takes less than one after the other.

        The schedules have one selector, and the same dense layers and check. Each takes an equal part of the seconds. What
        is read is that of the rollouts, since the engine counts them all together."""
        if len(schedules) == 1 or not self.samples_together:
            stages = Stages(on_progress, len(schedules))
            return [self.measure(each, on_progress=stages.next(each.name)) for each in schedules]
        started = time.perf_counter()
        for each in schedules:
            check_measurable(each, self.settings)
        stages = Stages(on_progress, 2)
        rollouts = self._generate(schedules[0], self.settings.seed, stages.next("rollouts"), schedules)
        requests, each_seconds = len(rollouts) // len(schedules), (time.perf_counter() - started) / len(schedules)
        scored, found = Stages(stages.next("scores"), len(schedules)), []
        for place, each in enumerate(schedules):
            own, began = rollouts[place * requests : (place + 1) * requests], time.perf_counter() - each_seconds
            share = _read_share_of(own)
            found.append(self._scored(own, each, share, "faithful", self.settings.seed, began, scored.next(each.name)))
        stages.end()
        return found

    def measure(
        self,
        schedule: Schedule,
        *,
        mode: Mode | None = None,
        seed: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Measurement:
        """The tail under a schedule. `mode` and `seed` default to those of the settings; another seed gives new
        rollouts."""
        started = time.perf_counter()
        mode, seed = mode or self.settings.mode, self.settings.seed if seed is None else seed
        check_measurable(schedule, replace(self.settings, mode=mode))
        if mode == "faithful" and self.settings.estimator == "exact":
            _, statistics = self._sample_exactly(schedule, seed, on_progress)
            share = self.engine.report().kv_read_share
            return self._measurement(schedule, statistics, share, mode, seed, started)
        stages = Stages(on_progress, 2)
        if mode == "replay":
            rollouts = self.dense_rollouts(stages.next("dense rollouts"))
            share = read_share(rollouts, schedule, self.layers)
        else:
            rollouts = self._generate(schedule, seed, stages.next(f"rollouts with {schedule.name}"))
            share = self.engine.report().kv_read_share
        progress = stages.next(f"scores of {schedule.name}")
        return self._scored(rollouts, schedule, share, mode, seed, started, progress)

    def _scored(
        self,
        rollouts: list[Rollout],
        schedule: Schedule,
        share: float,
        mode: Mode,
        seed: int,
        started: float,
        on_progress: OnProgress | None,
    ) -> Measurement:
        statistics, divergence = self._statistics(rollouts, schedule, mode, on_progress)
        found = replace(self._measurement(schedule, statistics, share, mode, seed, started), divergence=divergence)
        if schedule.check is not None:
            found.checked = CheckFigures.of(rollouts, self.settings.bin_tokens)
        return found

    @property
    def layers(self) -> int:
        return int(self.scorer.model.config.num_hidden_layers)

    def _measurement(
        self,
        schedule: Schedule | None,
        statistics: TailStatistics,
        share: float,
        mode: Literal["faithful", "replay", "dense"],
        seed: int,
        started: float,
    ) -> Measurement:
        seconds = time.perf_counter() - started
        return Measurement(schedule, statistics, self.settings.estimator, share, mode, seed, seconds)

    def _generate(
        self,
        schedule: Schedule | None,
        seed: int,
        on_progress: OnProgress | None,
        together: Sequence[Schedule] | None = None,
    ) -> list[Rollout]:
        """A rollout of each prompt and sample; with several schedules `together`, the rollouts of one after those of
        another, which have the same seeds."""
        settings, prompts, samples = self.settings, list(self.prompts), self.settings.samples
        of_each: dict[str, Any] = {"seed": seed}
        if together is not None:
            seeds = seeds_of_requests(seed, len(prompts), samples)
            own = [each for each in together for _ in seeds]
            prompts, of_each = prompts * len(together), {"seed": seeds * len(together), "schedules": own}
        with under(self._engine_for(schedule), schedule=schedule):
            self.engine.reset_report()
            rollouts = self.engine.generate(
                prompts,  # type: ignore[arg-type]
                samples,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_k=settings.list_tokens,
                on_progress=counted(on_progress, "rollouts"),
                **of_each,
            )
        if together is None:
            return rollouts
        return [replace(each, prompt_index=each.prompt_index % len(self.prompts)) for each in rollouts]

    def _engine_for(self, schedule: Schedule | None) -> Engine:
        """The engine, which from here on runs this schedule."""
        if schedule is not None and self.restart is not None and schedule.selector != self.indexed:
            self.engine.close()
            self.indexed = None
            self.engine, self.indexed = self.restart(schedule), schedule.selector
        return self.engine

    def _exact_ceiling(self, on_progress: OnProgress | None) -> TailStatistics:
        if self.given_rollouts is not None:
            raise UserError(
                "the estimator exact needs the engine's whole distributions, which the given rollouts do not hold",
                "leave the rollouts out, so that the engine samples them, or use top_k_lower",
            )
        self.rollouts, statistics = self._sample_exactly(None, self.settings.seed, on_progress)
        return statistics

    def _sample_exactly(
        self, schedule: Schedule | None, seed: int, on_progress: OnProgress | None
    ) -> tuple[list[Rollout], TailStatistics]:
        """Rollouts, and their acceptance from the whole distributions that the engine drew from. These are large, so
        prompts are taken in groups, and each group's distributions are dropped once they are compared."""
        settings, samples = self.settings, self.settings.samples
        group, progress = self._prompts_at_a_time(), counted(on_progress, "rollouts sampled and scored")
        statistics, rollouts = settings.statistics(), list[Rollout]()
        with under(self._engine_for(schedule), schedule=schedule):
            self.engine.reset_report()
            for start in range(0, len(self.prompts), group):
                numbers = range(start, min(start + group, len(self.prompts)))
                sampled = self.engine.generate(
                    [self.prompts[number] for number in numbers],  # type: ignore[arg-type]
                    samples,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    # The seeds that a single call would have.
                    seed=[request_seed(seed, number, sample) for number in numbers for sample in range(samples)],
                    top_k=self.engine.vocabulary,
                )
                found = self.scorer.exact_acceptance(sampled, temperature=settings.temperature)
                for rollout, acceptance_T in zip(sampled, found, strict=True):
                    rollouts.append(replace(rollout, prompt_index=start + rollout.prompt_index, top_k=None))
                    statistics.add(acceptance_T, rollout.context_tokens, _name(rollouts[-1]))
                if progress:
                    progress(len(rollouts), samples * len(self.prompts))
        return rollouts, statistics

    def _prompts_at_a_time(self) -> int:
        """How many prompts' whole distributions fit into WHOLE_BYTES. Raises UserError where one prompt's do not."""
        settings, vocabulary = self.settings, self.engine.vocabulary
        prompt_bytes = settings.samples * settings.max_new_tokens * vocabulary * _ENTRY_BYTES
        if prompt_bytes > WHOLE_BYTES:
            raise UserError(
                f"the estimator exact needs whole distributions: {settings.samples} responses of "
                f"{settings.max_new_tokens:,} tokens over {vocabulary:,} ids are {prompt_bytes / 2**30:.1f} GiB for each "
                f"prompt, and {WHOLE_BYTES / 2**30:.0f} GiB is the most",
                "use the estimator top_k_lower, or fewer or shorter samples",
            )
        return WHOLE_BYTES // prompt_bytes

    def _statistics(
        self, rollouts: list[Rollout], schedule: Schedule | None, mode: Mode, on_progress: OnProgress | None
    ) -> tuple[TailStatistics, Divergence | None]:
        statistics, progress = self.settings.statistics(), counted(on_progress, "rollouts scored")
        if not self.settings.list_tokens:
            (values, dense), divergence = self._without_lists(rollouts, schedule, mode, progress), None
        else:
            read, dense = self._with_lists(rollouts, schedule, mode, progress)
            values, divergence = (
                acceptance_of(read, dense, self.settings.estimator),
                Divergence(self.settings.bin_tokens),
            )
            for rollout, scores in zip(read, dense, strict=True):
                divergence.add(rollout, scores, sampled_it=mode == "faithful")
        # The measured policy samples nothing in a replay, so there are no impossible tokens to count.
        offs = map(off_nats_of, rollouts, dense) if mode == "faithful" else repeat(None)
        for rollout, acceptance_T, off_T in zip(rollouts, values, offs, strict=False):
            statistics.add(acceptance_T, rollout.context_tokens, _name(rollout), off_T)
        return statistics, divergence

    def _with_lists(
        self, rollouts: list[Rollout], schedule: Schedule | None, mode: Mode, on_progress: OnProgress | None
    ) -> tuple[list[Rollout], list[TokenScores]]:
        """The rollouts as the measured policy sampled or read them, and the dense policy's scores of them."""
        if schedule is not None and schedule.check is not None:
            # The engine's own checks scored every token. A scoring pass would add the scorer's rounding to it.
            return rollouts, [_seen(rollout) for rollout in rollouts]
        if mode == "faithful":
            return rollouts, self._dense(rollouts, on_progress)
        assert schedule is not None, "a replay needs a schedule"
        # The dense scores are those at the dense rollouts' own lists, which are not the lists of the replay.
        dense = [replace(scores, logp_at_ids=None) for scores in self._dense(rollouts, None)]
        temperature, width = self.settings.temperature, self.settings.list_tokens
        sparse = self.scorer.sparse(rollouts, schedule, temperature=temperature, top_k=width, on_progress=on_progress)
        return [rollout.read_by(score) for rollout, score in zip(rollouts, sparse, strict=True)], dense

    def _without_lists(
        self, rollouts: list[Rollout], schedule: Schedule | None, mode: Mode, on_progress: OnProgress | None
    ) -> tuple[list[Tensor], list[TokenScores]]:
        """The acceptances by the estimators "exact" of a replay and "sampled", and where the mode is faithful, the dense
        policy's scores."""
        temperature, estimator = self.settings.temperature, self.settings.estimator
        if schedule is not None and schedule.check is not None:
            seen = [_seen(rollout) for rollout in rollouts]
            return acceptance_of(rollouts, seen, estimator), seen
        if mode == "faithful":
            dense = self._dense(rollouts, on_progress)
            return acceptance_of(rollouts, dense, estimator), dense
        assert schedule is not None, "a replay needs a schedule"
        if estimator == "exact":
            found = self.scorer.exact_replay(rollouts, schedule, temperature=temperature, on_progress=on_progress)
            return found, []
        dense = self._dense(rollouts, None)
        # The dense policy p drew the token, so the roles change: the mean of min(1, q/p) under p is the acceptance.
        sparse = self.scorer.sparse(rollouts, schedule, temperature=temperature, on_progress=on_progress)
        return [acceptance_sampled(q.logp, p.logp) for q, p in zip(sparse, dense, strict=True)], []

    def _dense(self, rollouts: list[Rollout], on_progress: OnProgress | None) -> list[TokenScores]:
        if rollouts is self.rollouts and self._dense_scores is not None:
            return self._dense_scores
        width, temperature = self.settings.list_tokens, self.settings.temperature
        lists = [rollout.top_k.ids for rollout in rollouts if rollout.top_k is not None]
        scores = self.scorer.dense(
            rollouts,
            temperature=temperature,
            top_k=width,
            at_ids=lists if width and len(lists) == len(rollouts) else None,
            on_progress=on_progress,
        )
        if rollouts is self.rollouts:
            self._dense_scores = scores
        return scores


def _seen(rollout: Rollout) -> TokenScores:
    assert rollout.dense is not None, "the engine checked its drafts"
    return rollout.dense


def _name(rollout: Rollout) -> str:
    return f"{rollout.prompt_index}#{rollout.sample_index}"


def _read_share_of(rollouts: Sequence[Rollout]) -> float:
    """The share of tokens attended to, over the decode steps that these rollouts needed."""
    wholes = [int(rollout.context_tokens[1:].sum()) for rollout in rollouts]
    read = sum(rollout.kv_read_share * whole for rollout, whole in zip(rollouts, wholes, strict=True))
    return read / sum(wholes) if any(wholes) else 1.0


def read_share(rollouts: Sequence[Rollout], schedule: Schedule, layers: int) -> float:
    """The share of tokens attended to that an engine with this schedule would report for these rollouts.

    A rollout's first token comes from the prefill, so the decode steps are those of the other tokens.
    """
    unread, whole = 0, 0
    for rollout in rollouts:
        contexts_T = rollout.context_tokens[1:]
        unread += int(schedule.unread_tokens(contexts_T, layers).sum())
        whole += int(contexts_T.sum())
    return (layers * whole - unread) / (layers * whole) if whole else 1.0


def digest(value: Any) -> str:
    """A short name for plain data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
