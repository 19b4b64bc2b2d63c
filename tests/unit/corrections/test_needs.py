"""A correction that a run cannot feed is refused while the configuration is read; all others can be configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from sparroll import corrections
from sparroll.errors import UserError
from sparroll.train.config.file import load_config


@dataclass(frozen=True)
class Hungry:
    needs: ClassVar[tuple[str, ...]] = ("top_k", "reward_model", "logits")


def test_a_missing_input_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corrections._CORRECTIONS, "hungry", Hungry)
    with pytest.raises(UserError, match=r"(?s)Hungry needs reward_model, logits, which.*hint: choose another"):
        load_config(None, ["correction.name=hungry"])
    corrections.check_needs(Hungry(), ("logits", "reward_model", "top_k"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", corrections.names())
def test_every_correction_can_be_configured(name: str) -> None:
    made = load_config(None, [f"correction.name={name}"]).correction.make()
    assert made == corrections.correction(name)


def test_settings_that_are_words_can_be_configured() -> None:
    words = {"name": "importance", "level": "sequence", "action": "truncate", "weight_max": "3"}
    config = load_config(None, [f"correction.{key}={value}" for key, value in words.items()])
    assert config.correction.make() == corrections.correction(
        "importance", level="sequence", action="truncate", weight_max=3
    )
