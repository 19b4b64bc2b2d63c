"""recipes/code-lm: budgets by KV head are replayed exactly, chosen for a given reading, and end in a record."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from sparroll.schedule import Step
from sparroll.types import Rollout

RECIPE = Path(__file__).parents[2] / "recipes" / "code-lm"
sys.path.insert(0, str(RECIPE))

import head_budgets  # noqa: E402
from cells import PUBLISHED, Rule  # noqa: E402
from head_choice import Curve, Places, filled, halfway  # noqa: E402
from head_replay import Replays, chosen  # noqa: E402
from measure_cells import Comparison  # noqa: E402
from texts import Text, open_text  # noqa: E402

FINE = Rule("quantized_mean", 4, 4)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """tiny-reasoner and the first 180 tokens of a solved sum, of which 60 are the prompt."""
    model, text = open_text("tiny-reasoner", 1, 0)
    whole = text.sequences[0]
    short = Rollout(whole.prompt_ids[:60], whole.prompt_ids[60:180], torch.zeros(120), "stop")
    return Comparison(model, Text("short", [short], (60, 181), {}), "cpu")


@pytest.mark.parametrize("rule", [PUBLISHED, FINE], ids=lambda rule: rule.name)
def test_heads_with_one_budget_are_replayed_as_the_schedule_says(comparison: Comparison, rule: Rule) -> None:
    rollout = comparison.text.sequences[0]
    replays = Replays(comparison.model, rollout, rule.selector())
    torch.testing.assert_close(replays.hidden((None,) * 6), comparison._dense[0], rtol=0, atol=2e-5)
    by_layer = dataclasses.replace(rule.schedule(96, 6), steps=(Step(0, (64, 112)),), layer_groups=((2, 3), (4, 5)))
    both = {
        rule.schedule(96, 6): (None, None, *[(96, 96)] * 4),
        by_layer: (None, None, *[(64, 64)] * 2, *[(112, 112)] * 2),
    }
    for schedule, budgets in both.items():
        expected = comparison._hidden(rollout, schedule)
        assert (expected - comparison._dense[0]).abs().max() > 0.1
        torch.testing.assert_close(replays.hidden(budgets, keep=True), expected, rtol=0, atol=2e-5)
        # The states that were kept are those of a pass from the start.
        changed = (*budgets[:4], (64, 96), (96, 64))
        again = Replays(comparison.model, rollout, rule.selector())
        torch.testing.assert_close(replays.hidden(changed), again.hidden(changed), rtol=0, atol=0)


def test_each_head_reads_as_much_as_its_own_budget_says() -> None:
    torch.manual_seed(0)
    query, keys, selector = torch.randn(1, 6, 40, 32), torch.randn(1, 2, 140, 32), FINE.selector()
    context = torch.arange(101, 141)
    read = chosen(query, keys, context, (64, 120), selector, 0.2)
    positions = torch.arange(140) < context[:, None, None]
    tokens = (read.repeat_interleave(4, 3)[0] & positions).sum(2)
    for head, budget in enumerate((64, 120)):
        assert tokens[:, head].tolist() == selector.read_tokens(context, torch.tensor(budget)).tolist()
    alone = chosen(query, keys, context, (120, 120), selector, 0.2)
    assert torch.equal(alone[:, :, 1], read[:, :, 1]) and not torch.equal(alone[:, :, 0], read[:, :, 0])


def test_tokens_go_where_they_remove_most() -> None:
    steep = Curve((64, 128, 192), (64.0, 128.0, 192.0), (0.5, 0.2, 0.1))
    flat = Curve((64, 128, 192), (64.0, 128.0, 192.0), (0.11, 0.1, 0.1))
    assert filled([steep, flat], 256, 16) == [192, 64]
    assert filled([steep, flat], 160, 16) == [96, 64]
    # Half a step's reading is left, and nobody gets it.
    assert filled([steep, flat], 168, 16) == [96, 64]
    # A loss that does not fall takes nothing; a dent above the hull is stepped over.
    assert filled([Curve((64, 128), (64.0, 128.0), (0.1, 0.2))], 128, 16) == [64]
    assert Curve((64, 96, 128), (64.0, 96.0, 128.0), (0.3, 0.29, 0.1)).hull() == [0, 2]
    # Where contexts are within the larger budget, a step costs less.
    short = Curve((64, 128), (64.0, 80.0), (0.3, 0.2))
    assert filled([short, flat], 152, 16) == [128, 64]


def test_halfway_reads_half_of_both() -> None:
    assert halfway([192, 64, 128], 128, 16) == [160, 96, 128]
    assert sum(halfway([144, 112, 144, 112], 128, 16)) == 512


def test_places_are_the_sparse_layers_and_their_heads() -> None:
    by_head, by_layer = (Places.of(4, 2, (0, 1), by) for by in ("head", "layer"))
    assert by_head.groups == (((2, 0),), ((2, 1),), ((3, 0),), ((3, 1),))
    assert by_head.budgets([1, 2, 3, 4]) == (None, None, (1, 2), (3, 4))
    assert by_layer.budgets([1, 2]) == (None, None, (1, 1), (2, 2))
    assert Places.of(4, 2, (0, 1), "all").budgets([7]) == (None, None, (7, 7), (7, 7))


def test_budgets_by_head_pay_where_they_surely_lose_less_and_by_enough() -> None:
    assert head_budgets.pays(-0.15, [-0.3, -0.01]) is True
    assert head_budgets.pays(-0.14, [-0.3, -0.01]) is False and head_budgets.pays(-0.3, [-0.6, 0.01]) is False
    assert head_budgets.pays(-0.3, [None, None]) is None


def test_a_dry_run_ends_in_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head_budgets.main(["--model", "tiny-reasoner", "--dry", "--out", str(tmp_path)])
    record = head_budgets.records.read(tmp_path / "head-budgets.json", head_budgets.KIND)
    (setting,) = record["results"]["settings"]
    assert record["config"]["dry"] and record["config"]["sequences"] == {"choice": 1, "comparison": 2}
    assert setting["choice"].keys() == {"layer-kl", "head-kl", "layer-acceptance", "head-acceptance"}
    for choice in setting["choice"].values():
        assert [layer is None for layer in choice["budgets"]] == [True] * 2 + [False] * 4
        assert 90 < choice["read_tokens"] <= 95
        # The even budgets are a candidate, so on its own sequences a choice is never worse.
        assert min(choice["loss_of_candidates"].values()) <= choice["loss_of_candidates"]["even"]
    pair = setting["pairs"]["head-kl against layer-kl"]
    # Two sequences are too few for an interval, and to say whether budgets by head pay.
    assert pair["kl_change_interval"] == [None, None] and setting["pays"] is None
    assert "KL by head against by layer" in capsys.readouterr().out
