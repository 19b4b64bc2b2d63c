"""The command line as its users meet it: what is printed, exit codes, --json, and every bad input by name."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from cli_runs import error_of
from sparroll import doctor
from sparroll.attention import kernel_check
from sparroll.attention.kernel_check import Heads
from sparroll.attention.selectors import PageMean, Selector
from sparroll.cli import main
from sparroll.cli.schedule import plot
from sparroll.errors import UserError
from sparroll.presets import presets
from sparroll.schedule import Schedule, Step

ROOT = Path(__file__).parents[2]


def test_schedule_list_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in presets())


def test_schedule_show_prints_steps_and_a_plot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "qwen3-1.7b-0.86"]) == 0
    printed = capsys.readouterr().out
    assert "14,000  18,000      3,584" in printed
    assert "█" in printed


def test_a_step_that_begins_beyond_the_longest_context_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "qwen3-1.7b-0.86", "--context", "9000"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("-       - ")]
    # At 9,000 tokens a budget of 2,048 is 22.8 %.
    assert rows[3] == ["8,000", "9,000", "2,048", "26%", "to", "23%", "-", "-"]
    assert rows[4:6] == [["10,000", "12,000", "2,560", "-", "-", "-"], ["12,000", "14,000", "3,072", "-", "-", "-"]]
    assert rows[-1] == ["18,000", "4,096", "-", "-", "-"] and len(rows) == 8
    assert main(["schedule", "show", "qwen3-1.7b-0.86", "--context", "18000"]) == 0
    assert "18,000              4,096   23% to 23%" in capsys.readouterr().out


def test_what_does_not_fit_into_a_line_goes_on_in_the_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["schedule", "show", "qwen3-1.7b-0.86"]) == 0
    caption = "context tokens. bars: tokens read by a sparse layer; dots: the whole context"
    printed = capsys.readouterr().out
    assert caption in " ".join(printed.split()) and max(map(len, printed[printed.index(" ┤") :].splitlines())) <= 60
    assert main(["data", "list"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and "POLARIS" in printed


def test_a_measured_schedule_is_shown_over_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"value": 0.9, "low": 0.88, "high": 0.92, "tokens": 900, "rollouts": 24}
    steps = (Step(0, 64, measured=measured), Step(300, 96, measured=measured))
    path = Schedule(steps, dense_layers=(0,)).save(tmp_path / "mine.toml")
    assert main(["schedule", "show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert any(line.endswith(" 600") for line in printed.splitlines()) and "32,768" not in printed


def test_schedule_show_prints_each_group_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grouped = Schedule((Step(0, (512, 1024)), Step(4000, 1536)), dense_layers=(0,), layer_groups=((1, 2, 3), (4,)))
    path = grouped.save(tmp_path / "grouped.toml")
    assert main(["schedule", "show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "group 1   layers 1, 2, 3\ngroup 2   layers 4\n" in printed
    # At 4,000 tokens three layers read 512 and one reads 1,024.
    assert "512 / 1,024" in printed and "100% to 16%" in printed
    assert printed.count("█") > 0 and printed.count("bars: tokens read") == 2
    assert main(["schedule", "check", str(path), "--out", str(tmp_path / "checked.toml")]) == 0
    assert Schedule.load(tmp_path / "checked.toml").layer_groups == grouped.layer_groups


def test_schedule_show_as_json_is_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "qwen3-4b-0.86", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table.pop("name") == "qwen3-4b-0.86"
    assert Schedule.from_table(table).steps == Schedule.load("qwen3-4b-0.86").steps


def test_the_plot_is_as_high_as_the_budget_and_never_above_the_context() -> None:
    lines = plot(Schedule(steps=(Step(0, 512), Step(3000, 1024))), 6000)
    top, bottom = lines[0].partition("┤")[2], lines[8].partition("┤")[2]
    assert top == " " * 9 + "·" + " " * 19 + "█" * 31 or top.endswith("█" * 31)
    assert "█" not in top[:29]
    assert bottom[5:] == "█" * 55


def test_doctor_finds_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    status = {finding["what"]: finding["status"] for finding in report["findings"]}
    assert status["torch"] == status["transformers"] == status["cpu"] == status["schedules"] == "ok"
    assert {"triton", "vllm", "memory", "model cache"} <= status.keys()


def test_doctor_says_which_kernels_differ_from_their_references(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []

    def differences(selector: Selector, heads: Heads, **where: object) -> list[str]:
        asked.append((selector, heads))
        return ["3 of 100 of the scores"] if (selector.unit_tokens, where["block_tokens"]) == (2, 64) else []

    monkeypatch.setattr(kernel_check, "differences", differences)
    assert main(["doctor", "--kernels", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in report["findings"]] == ["ok"] * 5 + ["bad"] + ["ok"] * 2
    assert report["findings"][5]["value"] == "quantized_mean 2, bits 2, blocks of 64"
    assert "3 of 100 of the scores" in report["findings"][5]["note"] and not report["ok"]
    assert "do not sample with it" in report["findings"][5]["note"]
    asked.clear()
    assert main(["doctor", "--kernels", "--schedule", "qwen3-1.7b-0.86"]) == 0
    assert asked == 2 * [(Schedule.load("qwen3-1.7b-0.86").selector, Heads(group=2, dim=128))]


def test_doctor_says_which_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def differences(selector: Selector, heads: Heads, **where: object) -> list[str]:
        raise UserError("no kernels") if where["block_tokens"] == 16 else RuntimeError("out of registers\nof a thread")

    monkeypatch.setattr(kernel_check, "differences", differences)
    found = doctor.examine_kernels([doctor.KernelCase(PageMean(), Heads(), block) for block in (16, 64)])
    assert [each.status for each in found] == ["bad", "bad"]
    assert found[0].note == "not compared: no kernels"
    assert found[1].note == "it does not run: RuntimeError: out of registers"


def test_doctor_compares_each_kernel_in_blocks_that_hold_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases = doctor.kernel_cases(Schedule.fixed(1024, PageMean(128, 128, 256)))
    assert [case.block_tokens for case in cases] == [128]
    assert [case.block_tokens for case in doctor.kernel_cases()] == [16, 64] * 4


def test_doctor_refuses_to_compare_kernels_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--kernels"]) == 2
    assert "run on a GPU, and torch sees none" in capsys.readouterr().err
    assert main(["doctor", "--schedule", "qwen3-1.7b-0.86"]) == 2
    assert "add --kernels" in capsys.readouterr().err


@pytest.fixture
def metadata_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, doctor.Finding]]:
    """Lines of `doctor` on requirements, by package, where the package's metadata has these."""

    def findings(*requirements: str) -> dict[str, doctor.Finding]:
        monkeypatch.setattr(doctor.metadata, "requires", lambda name: list(requirements))
        return {finding.what: finding for finding in doctor._requirements()}

    return findings


def test_doctor_reads_the_packages_own_metadata(metadata_says: Callable[..., dict[str, doctor.Finding]]) -> None:
    extras = ["triton>=99; platform_system == 'Linux' and extra == 'dev'", "ruff>=0.12; extra == 'dev'"]
    found = metadata_says("torch<3,>=2.11", "rich>=99", "nowhere<6,>=5", "other>=1; python_version < '3'", *extras)
    assert [(each.what, each.status) for each in found.values()] == [
        ("torch", "ok"), ("rich", "bad"), ("nowhere", "bad"), ("triton", "--")
    ]  # fmt: skip
    assert found["torch"].note == "supported: >=2.11,<3"
    assert (found["nowhere"].value, found["nowhere"].note) == ("missing", "install nowhere>=5,<6")
    assert not doctor.healthy([found["rich"]])
    assert doctor.healthy([found["triton"]])


def test_doctor_says_where_there_is_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    (found,) = doctor._requirements()
    assert (found.status, found.value) == ("bad", "sparroll is not installed")


def test_everything_that_doctor_explains_is_an_extra_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(entry).name for extra in project["optional-dependencies"].values() for entry in extra}
    assert doctor.USES.keys() <= declared


def test_unknown_preset_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["schedule", "show", "qwen3-1.7b-0.87"], capsys)
    assert message == "unknown schedule preset 'qwen3-1.7b-0.87'"
    assert "did you mean 'qwen3-1.7b-0.8" in hint


def test_broken_toml_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("format = 1\nsteps = [\n")
    message, hint = error_of(["schedule", "show", str(path)], capsys)
    assert message.startswith(f"the schedule file {path} is not valid TOML: ")
    assert "at end of document" in message
    assert "schedule show" in hint


def test_a_budget_that_is_not_whole_pages_names_the_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Schedule.fixed(512).table()
    table["steps"][0]["kv_budget_tokens"] = 500
    import tomli_w

    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(table))
    message, hint = error_of(["schedule", "show", str(path)], capsys)
    assert message.endswith("kv_budget_tokens must be a multiple of page_tokens (16), got 500")
    assert hint == "use 496 or 512"


def test_a_misspelt_option_and_a_missing_argument_are_short_errors(capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["schedule", "show", "--contxt", "5"], capsys)
    assert "--contxt" in message
    assert "schedule show --help" in hint
    message, _ = error_of(["schedule", "show"], capsys)
    assert "Missing argument" in message


def test_the_entry_point_ends_with_the_exit_code_and_no_traceback() -> None:
    code = "import sys; from sparroll.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "schedule", "show", "nonsense"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")})
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown schedule preset 'nonsense'\nhint: ")


def test_running_out_of_device_memory_says_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def full() -> list[str]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("sparroll.cli.schedule.presets", full)
    message, hint = error_of(["schedule", "list"], capsys)
    assert message == "out of memory on the device: CUDA out of memory"
    assert "--max-batch" in hint
