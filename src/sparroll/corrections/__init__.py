"""What to multiply each token's loss by, because the policy that sampled it is not the one that is trained.
`correction(name, ...)` makes a correction: a pure function on log-probabilities, for any trainer. Each is a small
frozen dataclass in its own file, and its fields are its settings. To add one, write the file and list the class in
`_CORRECTIONS`.

Not here: the loss and its clip (train/update/loss.py), and measuring how far apart the policies are (mismatch/).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparroll.corrections.accepted_mass import AcceptedMass, TopKLists
from sparroll.corrections.base import Correction, CorrectionResult
from sparroll.corrections.geometric import Geometric
from sparroll.corrections.icepop import IcePop
from sparroll.corrections.importance import Importance
from sparroll.corrections.jackpot import Jackpot
from sparroll.corrections.mis import MIS
from sparroll.corrections.none import NoCorrection
from sparroll.corrections.seq_tis import SeqTIS
from sparroll.corrections.sparse_rl import SparseRL
from sparroll.corrections.sparse_rl_released import SparseRLReleased
from sparroll.corrections.tis import TIS
from sparroll.corrections.veto import Veto
from sparroll.errors import UserError, nearest
from sparroll.types import is_real

__all__ = [
    "AcceptedMass",
    "Correction",
    "CorrectionResult",
    "TopKLists",
    "check_needs",
    "correction",
    "names",
]

_CORRECTIONS: dict[str, Any] = {
    "none": NoCorrection,
    "tis": TIS,
    "seq_tis": SeqTIS,
    "mis": MIS,
    "geometric": Geometric,
    "icepop": IcePop,
    "veto": Veto,
    "sparse_rl": SparseRL,
    "sparse_rl_released": SparseRLReleased,
    "importance": Importance,
    "jackpot": Jackpot,
}


def names() -> list[str]:
    return sorted(_CORRECTIONS)


def correction(name: str, **settings: float | str) -> Correction:
    """The correction of that name. Raises UserError for unknown names, unknown settings and weights that make no sense.

    >>> result = correction("tis", weight_max=2.0)(dense_logp=dense_BT, sparse_logp=sparse_BT, mask=mask_BT)
    """
    if name not in _CORRECTIONS:
        raise UserError(f"unknown correction {name!r}", f"known: {', '.join(names())}")
    known = [field.name for field in dataclasses.fields(_CORRECTIONS[name])]
    kinds = get_type_hints(_CORRECTIONS[name])
    for key, value in settings.items():
        if key not in known:
            hint = nearest(key, known) if known else "it has no settings"
            raise UserError(f"correction {name!r} has no setting {key!r}", hint)
        if get_origin(kinds[key]) is Literal:
            _check_choice(name, key, value, get_args(kinds[key]))
        else:
            _check_weight(name, key, value)
            settings[key] = float(value)
    made = _CORRECTIONS[name](**settings)
    for what in ("weight", "keep"):
        least, largest = getattr(made, f"{what}_min", None), getattr(made, f"{what}_max", None)
        if least is not None and largest is not None and least > largest:
            raise UserError(f"correction {name!r}: {what}_min ({least}) is above {what}_max ({largest})")
    return made


def check_needs(made: Correction, given: tuple[str, ...]) -> None:
    """Raise UserError where the correction needs an argument that is not among those `given`."""
    missing = [need for need in made.needs if need not in given]
    if missing:
        raise UserError(
            f"the correction {type(made).__name__} needs {', '.join(missing)}, which this run does not have",
            "choose another with --set correction.name=tis, or call it from Python with what it needs",
        )


def _check_choice(name: str, key: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UserError(f"correction {name!r}: unknown {key} {value!r}", f"known: {', '.join(choices)}")


def _check_weight(name: str, key: str, value: Any) -> None:
    if not is_real(value) or not math.isfinite(value) or value < 0 or (key.endswith("_max") and value == 0):
        raise UserError(f"correction {name!r}: {key} must be a positive number, got {value!r}")
