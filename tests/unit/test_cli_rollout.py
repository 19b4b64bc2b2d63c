"""`sparroll rollout`: prompts in, JSONL out, interrupted and resumed; each bad input by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runs import CONTEXT_TOKENS, error_of, save_model
from sparroll.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a b c\n\nd e f g 1 2 3\nx y z\n")
    return path


def _command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    first = ["rollout", "--model", str(model), "--prompts", str(prompts), "--out", str(out)]
    return [*first, "--max-new-tokens", "20", *more]


def _rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]


def test_rollouts_are_written_with_the_log_probability_of_each_token(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(model, prompts, tmp_path / "out", "--samples", "2")) == 0
    output = capsys.readouterr()
    assert output.err.strip().splitlines()[-1] == f"wrote {tmp_path / 'out' / 'record.json'}"
    assert output.out.startswith("prompt 0: a b c\n  ")
    assert " tokens, stopped)\nprompt 1: d e f g 1 2 3\n" in output.out
    rows = _rows(tmp_path / "out")
    assert f"  {rows[0]['response']}  (" in output.out
    assert not any("<eos>" in row["response"] for row in rows)
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(3) for s in range(2)]
    assert all(len(row["sparse_logp"]) == len(row["response_ids"]) for row in rows)
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["results"]["rollouts"] == 6
    assert record["results"]["kv_read_share"] == 1.0


def test_a_tiny_top_p_draws_what_greedy_sampling_takes(model: Path, prompts: Path, tmp_path: Path) -> None:
    assert main(_command(model, prompts, tmp_path / "nucleus", "--top-p", "0.000001")) == 0
    assert main(_command(model, prompts, tmp_path / "greedy", "--temperature", "0")) == 0
    nucleus, greedy = _rows(tmp_path / "nucleus"), _rows(tmp_path / "greedy")
    assert [row["response_ids"] for row in nucleus] == [row["response_ids"] for row in greedy]
    assert all(set(row["sparse_logp"]) == {0.0} for row in nucleus)
    assert json.loads((tmp_path / "nucleus" / "config.json").read_text())["top_p"] == 1e-6


def test_json_output_is_json_and_nothing_else(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(model, prompts, tmp_path / "out", "--json")) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["rollouts"].endswith("rollouts.jsonl")
    assert output.err == ""


def test_an_interrupted_run_goes_on_and_ends_with_the_same_file(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.engines.hf.engine import HFEngine

    small = ["--n", "2", "--max-batch", "1", "--budget", "64"]
    assert main(_command(model, prompts, tmp_path / "straight", *small)) == 0
    generate, calls = HFEngine.generate, []

    def interrupted(self: HFEngine, *arguments: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *arguments, **settings)

    monkeypatch.setattr(HFEngine, "generate", interrupted)
    capsys.readouterr()
    assert main(_command(model, prompts, tmp_path / "out", *small)) == 130
    assert "run the same command to continue" in capsys.readouterr().err
    # A kill in the middle of a write leaves half a line behind.
    with (tmp_path / "out" / "rollouts.jsonl").open("a") as sink:
        sink.write('{"prompt_index": 2, "sam')
    assert len(_rows(tmp_path / "straight")) == 6
    assert main(_command(model, prompts, tmp_path / "out", *small)) == 0
    assert _rows(tmp_path / "out") == _rows(tmp_path / "straight")
    # The first call finished two prompts, so the second one's counters are those of one prompt.
    found = {name: json.loads((tmp_path / name / "record.json").read_text())["results"] for name in ("straight", "out")}
    assert {name: (each["rollouts"], each["engine_rollouts"]) for name, each in found.items()} == {
        "straight": (6, 6),
        "out": (6, 2),
    }
    tokens = {name: each["engine"]["generated_tokens"] for name, each in found.items()}
    lengths = [len(row["response_ids"]) for row in _rows(tmp_path / "out")]
    assert tokens == {"straight": sum(lengths), "out": sum(lengths[4:])}


def test_a_call_with_nothing_left_to_do_leaves_the_record_of_the_call_that_did_it(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _command(model, prompts, tmp_path / "out", "--budget", "64")
    assert main(command) == 0
    path = tmp_path / "out" / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"date": "2020-01-01T00:00:00+00:00", "wall_seconds": 77.0}))
    before = path.read_text()
    assert f"wrote {path}" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert path.read_text() == before
    assert json.loads(capsys.readouterr().out)["engine"] == record["results"]["engine"]
    assert main(command) == 0
    assert f"{path} stays as it was: nothing was left to do" in capsys.readouterr().err
    # The record of an earlier version does not say how many rollouts the engine counted.
    record["results"].pop("engine_rollouts")
    path.write_text(json.dumps(record))
    assert main(command) == 0
    assert json.loads(path.read_text()) == record
    rows = (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "rollouts.jsonl").write_text("".join(rows[:-1]))
    assert main(command) == 0
    assert json.loads(path.read_text())["date"] > "2026"


def test_an_interrupt_before_anything_is_finished_says_so(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.engines.hf.engine import HFEngine

    def interrupted(self: HFEngine, *arguments: object, **settings: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(HFEngine, "generate", interrupted)
    assert main(_command(model, prompts, tmp_path / "out")) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "interrupted: nothing was finished yet; run the same command to start again"


def test_the_folder_of_a_training_run_is_refused(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model": {"name": "tiny-reasoner"}, "train": {"steps": 1}}')
    message, hint = error_of(_command(model, prompts, tmp_path), capsys)
    assert message == f"{tmp_path} was made by another command: config.json is not of this one" and "--out" in hint
    assert "steps" in (tmp_path / "config.json").read_text()


def test_a_folder_with_other_rollouts_is_not_mixed(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(model, prompts, tmp_path / "out")) == 0
    capsys.readouterr()
    message, hint = error_of(_command(model, prompts, tmp_path / "out", "--seed", "1"), capsys)
    assert "was made with seed = 0, and seed = 1 is asked for now" in message
    assert "--out" in hint


def test_empty_prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n")
    message, hint = error_of(_command(model, path, tmp_path / "out"), capsys)
    assert message == f"there are no prompts in {path}"
    assert "one prompt per line" in hint


def test_a_prompt_longer_than_the_context(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a " * (CONTEXT_TOKENS + 5))
    message, hint = error_of(_command(model, path, tmp_path / "out"), capsys)
    assert f"has {CONTEXT_TOKENS + 5} tokens, the model's context holds {CONTEXT_TOKENS}" in message
    path.write_text("a " * (CONTEXT_TOKENS - 5))
    message, hint = error_of(_command(model, path, tmp_path / "out2"), capsys)
    assert "exceed the context" in message
    assert "at most 5" in hint


def test_an_output_folder_that_cannot_be_written_is_refused_before_any_work(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    message, hint = error_of(_command(Path("no-such-model"), prompts, tmp_path / "file" / "out"), capsys)
    assert message.startswith("cannot write to the folder")
    assert "--out" in hint


def test_a_model_that_is_not_there(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(_command(tmp_path / "nothing", prompts, tmp_path / "out"), capsys)
    assert message == f"there is no folder '{tmp_path / 'nothing'}'"
    assert hint


def test_an_unsupported_model_is_refused_with_the_reason(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "windowed", use_sliding_window=True, sliding_window=32, max_window_layers=0)
    # Saving shows a bar, unless a verb has run before.
    capsys.readouterr()
    message, hint = error_of(_command(folder, prompts, tmp_path / "out"), capsys)
    assert "Qwen3ForCausalLM is not supported" in message
    assert "sliding" in message
    assert hint


def test_nan_logits(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    message, hint = error_of(_command(folder, prompts, tmp_path / "out"), capsys)
    assert "NaN logits" in message
    assert "weights" in hint


def test_prompts_come_from_exactly_one_place(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rollout", "--model", str(model), "--out", str(tmp_path / "out")]
    message, _ = error_of(command, capsys)
    assert message == "give either --prompts FILE or --task NAME"
    message, _ = error_of([*command, "--task", "synthetik"], capsys)
    assert message == "unknown task 'synthetik'"


def test_a_schedule_for_another_model_needs_force(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, hint = error_of(_command(model, prompts, tmp_path / "out", "--schedule", "qwen3-1.7b-0.86"), capsys)
    assert "was made for Qwen/Qwen3-1.7B" in message
    assert "--force-schedule" in hint
    command = _command(model, prompts, tmp_path / "out", "--schedule", "qwen3-1.7b-0.86", "--force-schedule")
    assert main(command) == 0


def test_rollouts_with_a_compression_say_so_and_what_was_saved(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--compression", "r_kv"]
    for setting in ("budget_tokens=6", "every_tokens=3", "window_tokens=2", "importance_weight=0.2"):
        settings += ["--compression-set", setting]
    assert main(_command(model, prompts, tmp_path / "out", "--temperature", "0", *settings)) == 0
    assert "kv_saved_share" in capsys.readouterr().out
    rows = _rows(tmp_path / "out")
    assert {row["compression_name"] for row in rows} == {"r_kv-6"}
    assert "evicted" in {row["attention"] for row in rows}
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["config"]["compression"]["importance_weight"] == 0.2
    assert 0 < record["results"]["kv_saved_share"] < 1
    assert record["results"]["engine"]["compression_name"] == "r_kv-6"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--compression", "rkv"], "unknown compression 'rkv'"),
        (["--compression", "r_kv", "--budget", "64"], "--compression excludes --schedule and --budget"),
        (["--compression", "r_kv", "--compression-set", "budget_tokens"], "takes name=value, got 'budget_tokens'"),
        (
            ["--compression", "r_kv", "--compression-set", "budget_tokens=6.5"],
            "must be a whole number from 1 on, got 6.5",
        ),
        (["--compression-set", "budget_tokens=6"], "--compression-set needs --compression"),
    ],
)
def test_a_compression_that_cannot_be_is_refused(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    assert message in error_of(_command(model, prompts, tmp_path / "out", *settings), capsys)[0]


def test_the_weights_precision_can_be_chosen(model: Path, prompts: Path, tmp_path: Path) -> None:
    assert main(_command(model, prompts, tmp_path / "fp32", "--dtype", "fp32")) == 0
    assert main(_command(model, prompts, tmp_path / "bf16", "--dtype", "bf16")) == 0
    fp32, bf16 = (torch.tensor(_rows(tmp_path / name)[0]["sparse_logp"][:1]) for name in ("fp32", "bf16"))
    # The first token is drawn from the same prompt: rounded weights move its log-probability a little.
    assert 0 < float((fp32 - bf16).abs()) < 0.05


def test_an_unknown_precision_is_refused(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(model, prompts, tmp_path / "out", "--dtype", "int3")) == 2
    assert "unknown --dtype 'int3'" in capsys.readouterr().err
