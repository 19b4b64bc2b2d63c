"""What is known before the first budget is measured: whether a calibration can succeed at all. Raises UserError with
the reason if not. Measures nothing beyond the dense ceiling."""

from __future__ import annotations

from sparroll.attention.selectors import Selector
from sparroll.calibrate.fit import MIN_TOKENS, dense_rollouts_exceed, too_little_data
from sparroll.calibrate.measure import Measurement, Study
from sparroll.calibrate.target import OutOfReach, Target, cells_for, check_target, level, needed_tokens
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule


def check_request(
    target: Target,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    *,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
) -> None:
    """Refuse a target that cannot be met, and fewer rollouts than a cell needs. Known before a model is loaded."""
    check_target(target)
    min_tokens = needed_tokens(target, min_tokens)
    rollouts = prompts * samples
    if rollouts < min_rollouts:
        raise UserError(
            f"a cell of the fit needs {min_rollouts} rollouts, and {prompts} prompts with {samples} samples each give "
            f"{rollouts}",
            "take more prompts (--count) or more samples (--samples)",
        )
    if rollouts * max_new_tokens < min_tokens:
        raise UserError(
            f"a cell of the fit needs {min_tokens} tokens, and {rollouts} rollouts of at most {max_new_tokens} give "
            f"{rollouts * max_new_tokens}",
            "take longer responses (--max-new-tokens), more prompts (--count) or more samples (--samples)",
        )


def check_ceiling(
    study: Study,
    ceiling: Measurement,
    target: Target,
    *,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
) -> None:
    """Refuse a target above the dense ceiling, with the reason why the ceiling is so low, and dense rollouts that fill
    no bin."""
    cells, min_tokens = cells_for(target, ceiling, 0), needed_tokens(target, min_tokens)
    enough = [cell for cell in cells if cell.counts(min_tokens, min_rollouts)]
    if not enough:
        raise too_little_data(cells, min_tokens, min_rollouts)
    worst = min(enough, key=lambda cell: cell.value)
    if target is None or worst.value >= level(target):
        return
    if isinstance(target, ImpossibleLimit):
        raise dense_rollouts_exceed(target, worst)
    lowest = rounded_down(worst.value)
    message = (
        f"the dense ceiling at {worst.name} is {lowest}, below the target of {target:g}: even dense rollouts miss it"
    )
    equal = _between_equal_policies(study, worst.from_context_tokens)
    if equal is not None and equal < target:
        settings = study.settings
        raise OutOfReach(
            f"{message}, because the estimator {settings.estimator} counts only the {settings.top_k} most likely tokens, "
            f"and at temperature {settings.temperature:g} too much of the probability is on others: two equal policies "
            f"would have {rounded_down(equal)} there",
            f"lower the target to {lowest} or less, sample at a lower temperature, or count every token: --estimator exact, "
            "for small vocabularies",
        )
    raise OutOfReach(
        f"{message}, because engine and trainer differ by more than any budget can repair",
        f"lower the target to {lowest} or less, or raise the engine's precision",
    )


def check_something_is_sparse(study: Study, budget: int, selector: Selector, dense_layers: tuple[int, ...]) -> None:
    """Refuse a grid whose smallest budget reads every context of the dense rollouts completely. Its rollouts would be
    the dense ones, and its tail the ceiling."""
    longest = max(int(rollout.context_tokens[-1]) for rollout in study.dense_rollouts())
    if Schedule.fixed(budget, selector, dense_layers).read_tokens(longest) >= longest:
        raise UserError(
            f"the longest context has {longest} tokens, and the smallest budget, {budget}, reads all of it: nothing would "
            "be sparse",
            f"give smaller budgets ({selector.least_budget_tokens} or more), or longer responses with --max-new-tokens",
        )


def _between_equal_policies(study: Study, start: int) -> float | None:
    """The tail that two equal policies would have in the bin that starts there: the mass of their top-k lists. None for
    an estimator that is not limited by lists."""
    if study.settings.estimator != "top_k_lower":
        return None
    statistics = study.settings.statistics()
    for rollout in study.dense_rollouts():
        assert rollout.top_k is not None, "this estimator is computed from top-k lists"
        listed_T = rollout.top_k.logp.exp().sum(-1).clamp(0, 1)
        statistics.add(listed_T, rollout.context_tokens, f"{rollout.prompt_index}#{rollout.sample_index}")
    rows = {row.from_context_tokens: row.value for row in statistics.table(study.settings.estimator).rows}
    return rows.get(start)
