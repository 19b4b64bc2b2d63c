"""Who is in the control group is drawn as in our own loop, and found again in verl's rows, whatever their order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparroll.control.control_group import ControlGroupSettings, dense_flags
from sparroll.control.reward_gap import RewardGap
from sparroll.errors import UserError
from sparroll.integrations.verl.control_rows import READS, ControlRows
from sparroll.train.sampling.control_group import ControlGroup

SAMPLES, SEED = 4, 7
NAMES = ["5f-a", "0c-b", "99-c"]


def group() -> ControlGroup:
    return ControlGroup(RewardGap(ControlGroupSettings(1 / 4, 1 / 4)), SEED, SAMPLES, list)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def fields(keys: list[str], lengths: dict[str, int], rewards: dict[str, float]) -> dict[str, Tensor]:
    """Rows of these rollouts, by default 3 tokens of log-probability -1/2 and a reward of 0."""
    length = [lengths.get(key, 3) for key in keys]
    reward = [[0.0] * (n - 1) + [rewards.get(key, 0.0)] for key, n in zip(keys, length, strict=True)]
    return {
        "prompts": nested([torch.tensor([int(key[:2], 16), 1]) for key in keys]),
        "responses": nested([torch.arange(n) for n in length]),
        "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in length]),
        "rollout_log_probs": nested([torch.full((n,), -0.5) for n in length]),
        "rm_scores": nested([torch.tensor(row) for row in reward]),
    }


def keys_of(names: list[str]) -> list[str]:
    return [f"{name}_{sample}_0" for name in names for sample in range(SAMPLES)]


def test_the_draw_is_our_own_loops_also_where_prompts_come_in_several_batches() -> None:
    rows = ControlRows(10, 20)
    for step in (1, 2, 3):
        rows.begin(group(), step)
        flags = rows.draw(NAMES)
        assert flags is not None
        expected = dense_flags(SEED, step, 3, SAMPLES, 1 / 4)
        assert flags.flatten().tolist() == expected
        found = rows.dense_rows([*reversed(keys_of(NAMES)), "pad1_0_0"])
        assert found is not None and found.tolist() == [*reversed(expected), False]
        more = rows.draw(["aa-d"])
        assert more is not None and more.flatten().tolist() == dense_flags(SEED, step, 1, SAMPLES, 1 / 4, 3)


def test_a_reward_gap_is_that_of_the_rows_of_a_prompt_in_any_order() -> None:
    rows, compared = ControlRows(10, 20), group()
    rows.begin(compared, 1)
    flags = rows.draw(NAMES)
    assert flags is not None
    keys = keys_of(NAMES)
    dense = [key for key, flag in zip(keys, flags.flatten().tolist(), strict=True) if flag]
    # The dense rollout of the first prompt gets 1 and its sparse ones 1/3 on average; other rewards are all 0.
    other = next(key for key in keys if key.startswith(NAMES[0]) and key not in dense)
    shuffled = keys[::-1]
    rows.compare(shuffled, fields(shuffled, {dense[1]: 10}, {dense[0]: 1.0, other: 1.0}))
    pairs = compared.pairs()
    assert [pair.number for pair in pairs] == [0, 1, 2]
    assert [round(pair.differences["reward"][1], 12) for pair in pairs] == [round(2 / 3, 12), 0, 0]
    assert [pair.differences["length"][1] for pair in pairs] == [0, 7, 0]
    assert [pair.differences["truncated"][1] for pair in pairs] == [0, 1, 0]
    assert compared.decode_steps() == 2 + 9 + 2 and compared.report() == {"control/rollouts": 3.0}


def test_a_response_that_fills_the_engines_context_was_truncated() -> None:
    rows, compared = ControlRows(10, 8), group()
    rows.begin(compared, 1)
    flags = rows.draw(NAMES[:1])
    assert flags is not None
    keys = keys_of(NAMES[:1])
    dense = keys[flags.flatten().tolist().index(True)]
    rows.compare(keys, fields(keys, {dense: 6}, {}))
    assert compared.pairs()[0].differences["truncated"][1] == 1


def test_a_prompt_with_a_failed_rollout_is_left_out() -> None:
    rows, compared = ControlRows(10, 20), group()
    rows.begin(compared, 1)
    rows.draw(NAMES)
    keys = [*keys_of(NAMES)[1:], "pad1_0_0", "pad1_1_0"]
    rows.compare(keys, fields([key.replace("pad", "00") for key in keys], {}, {}))
    assert [pair.number for pair in compared.pairs()] == [1, 2]


def test_without_a_control_group_nothing_is_drawn_read_or_compared() -> None:
    rows = ControlRows(10, 20)
    rows.begin(None, 1)
    assert rows.draw(NAMES) is None and rows.dense_rows(keys_of(NAMES)) is None
    rows.compare(keys_of(NAMES), {})


def test_a_rollout_in_several_outputs_is_refused() -> None:
    rows = ControlRows(10, 20)
    rows.begin(group(), 1)
    rows.draw(NAMES)
    with pytest.raises(UserError, match="several outputs"):
        rows.dense_rows([f"{NAMES[0]}_0_1"])
    assert set(READS) == set(fields(["00_0_0"], {}, {}))
