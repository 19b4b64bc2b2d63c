"""recipes/mismatch-study: the measurements beside the grid, of eviction, remainders and checks."""

from __future__ import annotations

import sys

import pytest
import torch

import study_recipe
from sparroll import records

registered = study_recipe.registered

import eviction  # noqa: E402
import study  # noqa: E402
import study_checks  # noqa: E402


def test_eviction_without_need_is_dense_and_says_what_it_saves_otherwise(tmp_path, monkeypatch) -> None:
    model, out = tmp_path / "model", tmp_path / "eviction.json"
    study.write_dry_model(model)
    given = ["--model", str(model), "--out", str(out), "--device", "cpu", "--level", "0", "--problems", "2"]
    monkeypatch.setattr(sys, "argv", ["eviction.py", *given, "--kinds", "snap_kv", "--budgets", "40", "4096"])
    eviction.main()
    dense, tight, ample = records.read(out, "study-eviction")["results"]["runs"]
    assert tight["policy"]["budget_tokens"] == 40 and tight["kv_saved_share"] > 0
    # The room for a compression that never comes is all that differs.
    same = ("solved_share", "kv_read_share", "response_tokens_mean")
    assert dense["policy"] is None and [ample[name] for name in same] == [dense[name] for name in same]


def test_corrections_of_a_remainder_are_printed_line_by_line(monkeypatch, capsys) -> None:
    import remainder

    asked = ["--model", "tiny-reasoner", "--response-tokens", "40", "--budgets", "64", "--units", "4x4"]
    monkeypatch.setattr(sys, "argv", ["remainder.py", *asked, "--variants", "none", "plain", "both"])
    remainder.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[3] for line in lines] == ["none", "plain", "both"]
    # Each variant reads another thing, and none of them is dense.
    assert len({line[4] for line in lines}) == 3
    assert all(0 < float(line[6]) < 1 for line in lines)


def test_checks_are_sampled_row_by_row_and_go_on_where_they_were_cut(tmp_path, monkeypatch, capsys) -> None:
    def run(*more: str) -> dict:
        command = ["study_checks.py", "--quick", "--out", str(tmp_path), *more]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(study_checks, "QUICK", study_checks.QUICK | {"problems": 2, "windows": [8]})
        study_checks.main()
        return records.read(tmp_path / "checks.json", "study-checks")["results"]

    whole = run()
    rows = {row["sampler"]: row for row in whole["rows"]}
    names = ["dense", "sparse-24", "sparse-48", "verified-48-8-0.01", "sparse-24-in-4x4", "verified-24-in-4x4-8-0.01"]
    names += ["verified-24-8-0.01", "verified-24-8-1"]
    assert list(rows) == names and whole["missing"] == []
    assert abs(rows["dense"]["largest_nats"]) < 1e-4 and rows["dense"]["kv_read_share"] == 1
    assert rows["verified-24-8-1"]["largest_nats"] < 1e-4, "a floor of 1 samples from the dense policy"
    assert rows["verified-24-8-0.01"]["draft_acceptance_q05"] < 1 and rows["verified-24-8-0.01"]["windows"] > 0
    # Four times as much in two of the four layers and none dense; elsewhere layers 0 and 1 are.
    assert [rows[name]["units"] for name in names].count("4x4") == 2
    assert rows["sparse-24-in-4x4"]["kv_read_share"] < rows["sparse-24"]["kv_read_share"]
    # A cut run has the rows that it finished, and its next call adds only the missing ones, with the same figures.
    for name in names[-2:]:
        (tmp_path / "rows" / f"{name}.json").unlink()
    assert run("--minutes", "0")["missing"] == names[-2:]
    again = run()
    timed = ("seconds", "sampling_seconds", "check_seconds")
    for one, other in zip(whole["rows"], again["rows"], strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    assert "waits for another call" in capsys.readouterr().out


def test_nats_off_are_averaged_over_tokens_with_an_error_over_rollouts() -> None:
    found = study_checks.far([torch.tensor([0.0, 3.0]), torch.tensor([0.0, 21.0])])
    assert found["kl"] == 6.0 and found["largest_nats"] == 21.0
    assert [found[f"over_{nats}_nats_share"] for nats in (2, 10, 20)] == [0.5, 0.25, 0.25]
    # Means of 1.5 and 10.5 a token: a standard deviation of 9 / sqrt(2), over sqrt(2).
    assert found["kl_standard_error"] == pytest.approx(4.5)
