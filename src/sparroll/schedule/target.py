"""What the table `target` of a schedule may say: the statistic that a calibration held, and the bounds beside it. What they
mean is in calibrate/target.py and calibrate/bounds.py."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from sparroll.errors import UserError, nearest
from sparroll.mismatch.acceptance import ESTIMATORS
from sparroll.mismatch.divergence import NATS
from sparroll.schedule.steps import is_count

_OF_STATISTIC = {"acceptance": ("estimator", "top_k", "quantile", "at_least"), "impossible_share": ("nats", "at_most")}
"""The statistics that a target may be for, with the keys that only it has."""
_BESIDE = ("over_2_nats_at_most", "kl_at_most", "far_mass_at_most", "far_mass_nats")
"""Bounds that a calibration held beside the target."""
_TARGET_KEYS = ["statistic", *(key for keys in _OF_STATISTIC.values() for key in keys), *_BESIDE]


def check_target(target: dict[str, Any]) -> None:
    """Raise UserError for a target that no run could be held to. That of an acceptance may lack any of its keys."""
    for key in target:
        if key not in _TARGET_KEYS:
            raise UserError(f"unknown key {key!r} in target", nearest(str(key), _TARGET_KEYS))
    statistic = target.get("statistic", "acceptance")
    if not isinstance(statistic, str) or statistic not in _OF_STATISTIC:
        raise UserError(f"unknown target.statistic {statistic!r}", nearest(str(statistic), list(_OF_STATISTIC)))
    own = " and ".join(_OF_STATISTIC[statistic])
    for other, keys in _OF_STATISTIC.items():
        if other != statistic and (wrong := [key for key in keys if key in target]):
            raise UserError(
                f"target.{wrong[0]} belongs to the statistic {other!r}, and target.statistic is {statistic!r}",
                f"keys of {statistic!r} are {own}",
            )
    if statistic == "impossible_share" and (missing := [key for key in _OF_STATISTIC[statistic] if key not in target]):
        raise UserError(f"a target of {statistic!r} needs {missing[0]}", "for example nats = 10, at_most = 1e-4")
    for key, good, what in (
        ("nats", lambda value: is_count(value) and value in NATS, f"one of {', '.join(map(str, NATS))}"),
        ("at_most", lambda value: is_share(value) and 0 < value < 1, "between 0 and 1"),
        ("estimator", lambda value: value in ESTIMATORS, f"one of {', '.join(ESTIMATORS)}"),
        ("top_k", lambda value: is_count(value) and value > 0, "a whole number of 1 or more"),
        ("quantile", lambda value: is_share(value) and 0 < value < 1, "between 0 and 1"),
        ("at_least", lambda value: is_share(value) and value > 0, "above 0 and at most 1"),
        ("over_2_nats_at_most", is_share, "from 0 to 1"),
        ("kl_at_most", lambda value: is_number(value) and 0 < value < math.inf, "above 0 and finite"),
        ("far_mass_at_most", is_share, "from 0 to 1"),
        ("far_mass_nats", lambda value: is_count(value) and value in NATS, f"one of {', '.join(map(str, NATS))}"),
    ):
        if key in target and not good(target[key]):
            raise UserError(f"target.{key} must be {what}, got {target[key]!r}")


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_share(value: object) -> bool:
    """Whether this is a number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1
