"""Moves each length bin's budget so that the lower bound of its tail stays at the target, or the upper bound of its share
of impossible tokens at the limit. It only decides: it is shown what a step measured and says which schedule comes next.

The controlled value is the lower end of the 95 % interval of the 5th percentile (estimator top_k_lower, clustered by
rollouts, see mismatch/bootstrap.py). It is taken over the rollouts of the last `window_steps` steps that were sampled
under the bin's present budget. When a budget changes, the bin's window starts anew. A bin is judged once its window has
`least_tokens` tokens from 8 rollouts.

With a limit for impossible tokens the rules are the same, and the direction is the opposite one: the share takes the
place of the percentile, its upper bound that of the lower one, and half of the limit that of target + margin. Such tokens
are rare, so a bin is judged once 11 of them are expected at the limit, or its share is surely over it
(held_statistic.py). Where no bin can be judged in a full window, an event says so.

A budget is raised at once
  - when the window's percentile is under the target. The window is first cut down to the newest step if that step alone
    is surely under the target (its upper bound is), since something must have changed. The size of the raise follows
    from a power law: one minus the tail falls with the budget to the power of about .7 (in the published schedules
    between .75 and .94). So the budget is multiplied by (shortfall ratio) ** (1 / .7), by a factor of 2 at most, and
    grows by at least one unit;
  - by one small step, when the window is full and its lower bound is still under the target: no more evidence will
    come, and what there is does not show that the tail holds.
A budget is lowered slowly
  - by one small step, after `patience` judged steps in a row with the lower bound at target + margin or more. If a
    raise follows, the bin goes back at least to the budget that held before. The next lowering to the failed budget
    then waits twice as long, and each further failure doubles the wait again. A lowering to it that holds resets the
    wait.

Why it does not chase noise: a single step's percentile moves a budget only if it is surely under the target or is all
the evidence there is. Nothing moves between target and target + margin. A fresh window has a low lower bound for lack
of data, and moves a budget only if its percentile is under the target. Every failed lowering doubles the wait for the
next one, so a bin at its equilibrium tries again log2(steps) times and not steps / patience times. Evidence belongs to
one budget at a time, so no figure mixes two. The price is that budgets are a little larger than needed: the lower bound
of the tail, and not its value, is held at the target.

Budgets are whole units, never fall with length, and stay between the selector's least budget (or `least_budget_tokens`)
and the whole bin (or `most_budget_tokens`). Groups of layers with budgets of their own keep the proportions that they
have in the schedule at the start: the controller moves the largest budget of a bin, and the others by the same factor,
each within these limits. The tail is that of all layers together, so nothing says which group to move alone. A bin that
was never judged follows its neighbours. Before a judged bin it reads as many tokens as that bin, or fewer where a
calibrated schedule at the start said so. Behind the last judged bin it reads the same share of its context as that bin;
after a calibrated start, it has its starting budget times the factor by which the last judged bin's budget was raised.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.control.held_statistic import HeldShare, HeldStatistic, HeldTail
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.control.length_bins import Budget, LengthBins
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import LayerGroups
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.table import TailRow
from sparroll.schedule import Schedule, Step
from sparroll.types import StepReport

MOST_RAISE = 2.0
"""Largest factor of one raise, because the power law only holds for budgets that are not far apart."""


@dataclass(frozen=True)
class Rules:
    """The target, and how patiently to hold it. The fields are those of the configuration's [control] with by =
    "controller"; `least_tokens` comes from [mismatch]."""

    target: float | None = None
    """None: budgets follow `impossible`."""
    impossible: ImpossibleLimit | None = None
    margin: float = 0.01
    patience: int = 5
    window_steps: int = 4
    small_step: float = 0.05
    least_tokens: int = 200

    def held(self) -> HeldStatistic:
        """The statistic that budgets follow."""
        if self.impossible is not None:
            assert self.target is None, "budgets follow one statistic"
            return HeldShare(self.impossible, self.least_tokens)
        assert self.target is not None, "rules without a target"
        return HeldTail(self.target, self.margin, self.least_tokens)


@dataclass
class BinState:
    """Where one bin stands; plain data, kept in checkpoints."""

    budget: int
    """That of the group of layers with the largest one. It may go beyond the bin, as long as another group is still
    inside."""
    start: int
    """Budget at the start of the run."""
    since_step: int = 0
    """Step after which the budget became this one; evidence counts from the next step on."""
    judged_steps: int = 0
    """How many steps since then had enough evidence to judge the bin."""
    good_steps: int = 0
    """How many of these steps, counted back from the last one, had the lower bound at target + margin or more."""
    known: bool = False
    """Whether the bin was judged at least once in this run."""
    held: int = 0
    """After a lowering: the budget before it. 0: the present budget was not reached by lowering, or has held long
    enough."""
    failed: int = 0
    """Largest budget that was reached by lowering and did not hold; 0: there is none."""
    wait: int = 1
    """The patience is multiplied by this before a lowering to `failed` or below."""
    stuck: bool = False
    """Whether the bin is under the target at its largest budget, and an event was already logged for it."""


@dataclass(frozen=True)
class Move:
    """One change of a budget, and why."""

    name: str
    old: str
    new: str
    reason: str

    def __str__(self) -> str:
        return f"controller: {self.name}: {self.old} -> {self.new} tokens: {self.reason}"


class Controller:
    """Holds one BinState per bin, and the window. budgets: those at the start, one per bin of `bins`, or one for each
    group of layers.

    dense_layers, layer_groups, model, target, check: fields of the schedules that it makes, see Schedule.

    trust_start: whether the budgets at the start were calibrated. Their proportions are then kept where nothing was
    measured yet.

    caveat: what must be known of the budgets at the start (Schedule.caveat). The controller's schedules say it of every
    bin that was never judged, but for those of `measured_before`, which the start's file has figures of.
    """

    name = "controller"

    def __init__(
        self,
        rules: Rules,
        bins: LengthBins,
        budgets: Sequence[Budget],
        *,
        dense_layers: tuple[int, ...] = (0, 1),
        layer_groups: LayerGroups = (),
        model: str | None = None,
        target: dict[str, Any] | None = None,
        check: DraftCheck | None = None,
        trust_start: bool = False,
        caveat: str | None = None,
        measured_before: frozenset[int] = frozenset(),
    ):
        self.rules, self.bins, self.trust_start, self.held = rules, bins, trust_start, rules.held()
        self.caveat, self.measured_before = caveat, measured_before
        self.about: dict[str, Any] = {
            "dense_layers": dense_layers,
            "layer_groups": layer_groups,
            "model": model,
            "target": target,
            "check": check,
        }
        self.starts = [Step(0, budget).budgets for budget in budgets]
        """Of each bin: the budgets at the start, of each group."""
        for place, each in enumerate(self.starts):
            assert all(bins.within(budget, place) == budget for budget in each), "outside of the limits"
        self.states = [BinState(max(each), max(each)) for each in self.starts]
        self.window = TailWindow(rules.window_steps)
        self.schedule()

    # -- what the loop asks ----------------------------------------------------------------------------------------------

    def watch(self, step: StepEvidence) -> Decision:
        """Take in what the step measured under the present schedule, and decide on the next one."""
        if self.rules.impossible is not None:
            self.rules.impossible.check_counted(step.tail, "the controller")
        report = self._report(step.tail)
        self.window.add(step.step, step.tail)
        before, moves, judged = self.budgets, [], False
        events: list[str] = []
        for place, state in enumerate(self.states):
            row = self._judged_row(place, step.step, step.tail)
            if row is None:
                continue
            name, bound = self.held.report(row)
            report[f"controller/{name}/{self.bins.name(place)}"] = bound
            judged = True
            new, reason = self._raised(place, row) or self._lowered(place, row) or (state.budget, "")
            if new != state.budget:
                moves.append(
                    Move(self.bins.name(place), self._said(place, state.budget), self._said(place, new), reason)
                )
                self._set(place, new, step.step)
            elif reason and not state.stuck:
                state.stuck = True
                limit = self._said(place, new)
                events.append(f"controller: {self.bins.name(place)}: {reason}, and {limit} tokens are its limit")
        if not judged:
            events += self._blind(step.step)
        follow = self._followers(step.step)
        report["controller/moves"] = float(len(moves))
        said = (*(str(move) for move in moves), *follow, *events)
        if self.budgets != before:
            return Decision("switch", said, self.schedule(), report)
        return Decision("warn" if said else "none", said, report=report)

    def _blind(self, step: int) -> list[str]:
        """Say once in ten full windows that no bin has enough tokens to be judged."""
        steps = self.rules.window_steps
        if step % (10 * steps) != steps % (10 * steps):
            return []
        found = [each for start in self.window.starts if min(each := self.window.amount([start]))]
        if not found or len(self.window.evidence) < steps:
            return []
        needed = self.held.needed_tokens
        lacking, (tokens, rollouts) = min((max(needed / t, LEAST_ROLLOUTS / r), (t, r)) for t, r in found)
        if lacking <= 1:
            # There would be enough, but the bin's budget was moved since, and only what came after that counts.
            return []
        return [
            f"controller: no length can be judged: the fullest one has {tokens} tokens of {rollouts} sparse rollouts in "
            f"{steps} steps, and {self.held.name} needs {needed} tokens of {LEAST_ROLLOUTS} rollouts; --set "
            f"control.window_steps={math.ceil(steps * lacking)}, sample more rollouts a step, or use wider bins "
            "(mismatch.bin_tokens)"
        ]

    @property
    def budgets(self) -> list[int]:
        """What it moves: of each bin the largest budget."""
        return [state.budget for state in self.states]

    def schedule(self) -> Schedule:
        """The present budgets as a schedule for an engine."""
        steps, made_by = self.bins.steps(self._budgets()), self._caveat() or None
        return Schedule(steps, self.bins.selector, made_by=made_by, name="controlled", **self.about)

    def _caveat(self) -> dict[str, str]:
        """What made_by says of the bins whose budgets nobody has measured; nothing where the start had no caveat."""
        unmeasured = [
            place for place, state in enumerate(self.states) if not state.known and place not in self.measured_before
        ]
        if self.caveat is None or not unmeasured:
            return {}
        everywhere = len(unmeasured) == len(self.states)
        return {"caveat": self.caveat} | ({} if everywhere else {"caveat_at": self.bins.names_of(unmeasured)})

    @property
    def may_switch_to(self) -> tuple[Schedule | None, ...]:
        return (self.widest(),)

    def widest(self) -> Schedule:
        """The largest schedule that an engine must be able to run: every bin at its upper limit, and a step for every
        bin."""
        budgets = [self.bins.most(place) for place in range(self.bins.count)]
        none: dict[int, dict[str, Any]] = {place: {} for place in range(self.bins.count)}
        return Schedule(self.bins.steps(budgets, none), self.bins.selector, name="controlled, widest", **self.about)

    def measured_schedule(self, made_by: dict[str, Any]) -> Schedule:
        """The present budgets with what the window measured under them, for a file that another run can start from. Of
        bins that nobody measured it says what the start said of them."""
        measured = {}
        for place, state in enumerate(self.states):
            row = self.window.row(place * self.bins.bin_tokens, state.since_step)
            if row is not None and row.counts(self.rules.least_tokens):
                measured[place] = self.held.summary(row)
        steps = self.bins.steps(self._budgets(), measured)
        told = made_by | self._caveat()
        return Schedule(steps, self.bins.selector, made_by=told, name="controlled", **self.about)

    def state(self) -> dict[str, Any]:
        """Each bin's state as plain data, and the window's tensors."""
        return {"bins": [dataclasses.asdict(state) for state in self.states]} | self.window.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Raises UserError where the state is of another number of bins, which is one of another longest context."""
        if len(state["bins"]) != self.bins.count:
            raise UserError(
                f"the checkpoint's controller has budgets for {len(state['bins'])} length bins of {self.bins.bin_tokens} "
                f"tokens, and contexts of up to {self.bins.longest_context_tokens} tokens have {self.bins.count}",
                "resume with the longest prompt and response of the run that wrote it, or start a new run from its weights",
            )
        self.states = [BinState(**each) for each in state["bins"]]
        self.window.restore({name: value for name, value in state.items() if name != "bins"})

    # -- groups of layers ------------------------------------------------------------------------------------------------

    def _of_groups(self, place: int, budget: int) -> tuple[int, ...]:
        """The budget of each group where the largest one would be `budget`."""
        start = self.starts[place]
        return tuple(self.bins.within(budget * own / max(start), place) for own in start)

    def _budgets(self) -> list[Budget]:
        """The present budgets of each bin, which fall with length in no group."""
        found: list[tuple[int, ...]] = []
        for place, state in enumerate(self.states):
            own = self._of_groups(place, state.budget)
            found.append(tuple(map(max, own, found[-1])) if found else own)
        return [each if len(each) > 1 else each[0] for each in found]

    def _within(self, tokens: float, place: int) -> int:
        """The nearest budget that the largest group of a bin may be given: the others follow, and may each come to the
        limit of the bin."""
        start = self.starts[place]
        most = self.bins.units(self.bins.most(place) * max(start) / min(start))
        return min(max(self.bins.units(tokens), self.bins.least), most)

    def _said(self, place: int, budget: int) -> str:
        return " / ".join(map(str, self._of_groups(place, budget)))

    # -- one bin ---------------------------------------------------------------------------------------------------------

    def _judged_row(self, place: int, step: int, statistics: TailStatistics) -> TailRow | None:
        """The tail of the bin's window, which is cut down to the newest step where that step alone is surely under the
        target. None: this step has no token in the bin, or the evidence is too little."""
        state, start = self.states[place], place * self.bins.bin_tokens
        newest = TailStatistics.pooled_row([statistics], start)
        if newest is None:
            return None
        if self.held.counts(newest) and self.held.surely_missed(newest):
            state.since_step, state.judged_steps = step - 1, 0
        row = self.window.row(start, state.since_step)
        if row is None or not self.held.counts(row):
            return None
        state.known = True
        state.judged_steps += 1
        state.good_steps = state.good_steps + 1 if self.held.held_with_margin(row) else 0
        return row

    def _raised(self, place: int, row: TailRow) -> tuple[int, str] | None:
        """-> (new budget, reason), with the present budget where it is at its limit; None where there is no reason to
        raise it."""
        state = self.states[place]
        if self.held.missed(row):
            reason, factor = self.held.why_missed(row), min(self.held.factor(row), MOST_RAISE)
        elif self.held.unsure(row) and state.judged_steps >= self.rules.window_steps:
            reason = self.held.why_unsure(row, state.judged_steps)
            factor = 1 + self.rules.small_step
        else:
            return None
        if state.held:
            reason += f"; {self._said(place, state.budget)} tokens were tried and did not hold"
            state.failed, state.wait = max(state.failed, state.budget), 2 * state.wait
        wanted = max(self.bins.units(state.budget * factor), state.budget + self.bins.selector.unit_tokens, state.held)
        new = self._within(wanted, place)
        # A budget at its limit is reported only where the percentile itself is under the target, not for a low bound.
        return (new, reason) if new != state.budget or self.held.missed(row) else None

    def _lowered(self, place: int, row: TailRow) -> tuple[int, str] | None:
        state, rules, unit = self.states[place], self.rules, self.bins.selector.unit_tokens
        if state.good_steps >= rules.patience:
            self._prove(state)
        step_tokens = max(unit, int(state.budget * rules.small_step) // unit * unit)
        new = max(state.budget - step_tokens, self._floor(place))
        patience = rules.patience * (state.wait if new <= state.failed else 1)
        if new >= state.budget or state.good_steps < patience:
            return None
        return new, self.held.why_held(row, state.good_steps)

    def _prove(self, state: BinState) -> None:
        """Note that the present budget has held for as long as a lowering asks for."""
        state.held = 0
        if state.budget <= state.failed:
            state.failed, state.wait = 0, 1

    def _floor(self, place: int) -> int:
        """Smallest budget that a bin may have, since budgets do not fall with length. Shorter bins that were never
        judged do not count."""
        known = [state.budget for state in self.states[:place] if state.known]
        return max([self.bins.least, *known])

    def _set(self, place: int, new: int, step: int) -> None:
        """Give a bin a new budget, and start its window anew."""
        state = self.states[place]
        state.held = state.budget if new < state.budget else 0
        state.budget, state.since_step = new, step
        state.judged_steps, state.good_steps, state.stuck = 0, 0, False

    # -- its neighbours --------------------------------------------------------------------------------------------------

    def _followers(self, step: int) -> list[str]:
        """Move the bins that follow others: those that were never judged, and those whose budget a shorter bin now
        exceeds. -> events"""
        wanted, known = self.budgets, [place for place, state in enumerate(self.states) if state.known]
        if not known:
            return []
        last = known[-1]
        for place in range(last - 1, -1, -1):
            if not self.states[place].known:
                following = self._within(wanted[place + 1], place)
                wanted[place] = (
                    min(self._within(self.states[place].start, place), following) if self.trust_start else following
                )
        for place in range(last + 1, self.bins.count):
            wanted[place] = self._within(self._behind(place, last), place)
        for place in range(1, self.bins.count):
            wanted[place] = max(wanted[place], wanted[place - 1])
        return self._follow(wanted, last, step)

    def _behind(self, place: int, last: int) -> float:
        judged, own = self.states[last], self.states[place]
        if self.trust_start:
            return own.start * max(1.0, judged.budget / judged.start)
        return judged.budget * self.bins.end(place) / self.bins.end(last)

    def _follow(self, wanted: list[int], last: int, step: int) -> list[str]:
        events, behind = [], []
        for place, (state, new) in enumerate(zip(self.states, wanted, strict=True)):
            if new == state.budget:
                continue
            old_said, new_said = self._said(place, state.budget), self._said(place, new)
            if place > last:
                behind.append((place, old_said, new_said))
            else:
                why = "is not to read less than a shorter one" if state.known else "was never measured: follows"
                events.append(str(Move(self.bins.name(place), old_said, new_said, why)))
            self._set(place, new, step)
            state.held = 0
        if behind:
            (first, was, now), name = behind[0], self.bins.name(last)
            events.append(
                f"controller: from {first * self.bins.bin_tokens} on ({was} -> {now} tokens, ...): not measured yet, "
                f"follows {name}"
            )
        return events

    def _report(self, statistics: TailStatistics) -> StepReport:
        """The budgets under which this step's rollouts were sampled, in the bins that they reached."""
        places = [min(start // self.bins.bin_tokens, self.bins.count - 1) for start in statistics.starts]
        largest = {p: max(self._of_groups(p, self.states[p].budget)) for p in places}
        return {f"controller/budget_tokens/{self.bins.name(p)}": float(budget) for p, budget in largest.items()}
