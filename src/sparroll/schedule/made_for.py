"""Whether a schedule was made for a model: by their fingerprints, or by their names where one of these is not known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sparroll.errors import UserError
from sparroll.models import packaged_name, trained_from
from sparroll.models.fingerprint import ModelFingerprint, of_model, weights_of

if TYPE_CHECKING:
    from sparroll.schedule.schedule import Schedule

_FORCED = "Schedule.load(..., force=True)"


def check_fits(schedule: Schedule, model: str, found: ModelFingerprint | None = None) -> None:
    """Raise UserError if the schedule was made for another model. For the arguments see `Schedule.check_model`."""
    if schedule.model is None and schedule.fingerprint is None:
        return
    if schedule.fingerprint is not None and found is None:
        found = of_model(model)
    if schedule.fingerprint is None or found is None:
        reason = None if not model or _same_name(schedule, model) else ""
    else:
        reason = dataclasses.replace(schedule.fingerprint, weights=None).difference(found)
        if reason is None and not _same_weights(schedule, model):
            reason = "its weights are others"
    if reason is not None:
        raise UserError(
            f"schedule {schedule.name!r} was made for {schedule.model or 'another model'}, not for "
            f"{trained_from(model) or 'this one'}{': ' if reason else ''}{reason}",
            f"calibrate one for this model, or force this one: --force-schedule, attention.force = true, {_FORCED}",
        )


def _same_name(schedule: Schedule, model: str) -> bool:
    return schedule.model is None or _short(trained_from(schedule.model)) in (
        _short(trained_from(model)),
        _short(model),
    )


def _same_weights(schedule: Schedule, model: str) -> bool:
    """Whether the model has the weights that the fingerprint names, or its training began with them. True where the
    fingerprint names none, and for a module without a name. A folder without weights is told by its name."""
    assert schedule.fingerprint is not None
    if schedule.fingerprint.weights is None or not model:
        return True
    began = trained_from(model)
    known = [digest for name in (model, began) if (digest := weights_of(name)) is not None]
    if schedule.fingerprint.weights in known:
        return True
    if not known and Path(model).is_dir():
        # A folder with the config alone, which is enough to plan for.
        return _same_name(schedule, model)
    if schedule.model is None:
        return not known
    # The schedule was made on a checkpoint of the same training, or the model that the training began with is not
    # on this machine any more.
    relatives = trained_from(schedule.model) != schedule.model or weights_of(began) is None
    return relatives and trained_from(schedule.model) == began


def _short(model: str) -> str:
    return packaged_name(model).rstrip("/").rsplit("/", 1)[-1].lower()
