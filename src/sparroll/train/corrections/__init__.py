"""Corrections for sampling from another policy than the one trained, by name. A correction is a small frozen dataclass in
a file of its own; its fields are its settings. To add one: write the file, list the class in `_CORRECTIONS`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sparroll.errors import UserError, nearest
from sparroll.train.corrections.base import Correction, CorrectionResult
from sparroll.train.corrections.icepop import IcePop
from sparroll.train.corrections.none import NoCorrection
from sparroll.train.corrections.tis import TIS

__all__ = ["Correction", "CorrectionResult", "correction", "names"]

_CORRECTIONS: dict[str, Any] = {"none": NoCorrection, "tis": TIS, "icepop": IcePop}


def names() -> list[str]:
    return sorted(_CORRECTIONS)


def correction(name: str, **settings: float) -> Correction:
    """The correction of that name. Unknown names, unknown settings and weights that make no sense are errors.

    >>> result = correction("tis", weight_max=2.0)(dense_logp=dense_BT, sparse_logp=sparse_BT, mask=mask_BT)
    """
    if name not in _CORRECTIONS:
        raise UserError(f"unknown correction {name!r}", f"known: {', '.join(names())}")
    known = [field.name for field in dataclasses.fields(_CORRECTIONS[name])]
    for key, value in settings.items():
        if key not in known:
            hint = nearest(key, known) if known else "it has no settings"
            raise UserError(f"correction {name!r} has no setting {key!r}", hint)
        _check_weight(name, key, value)
    made = _CORRECTIONS[name](**settings)
    least, largest = getattr(made, "weight_min", 0.0), getattr(made, "weight_max", math.inf)
    if least > largest:
        raise UserError(f"correction {name!r}: weight_min ({least}) is above weight_max ({largest})")
    return made


def _check_weight(name: str, key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (key == "weight_max" and value == 0):
        raise UserError(f"correction {name!r}: {key} must be a positive number, got {value!r}")
