"""A full disk and memory that has run out: one line with a hint that says what is kept, and never a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from cli_runs import error_of, save_model
from integration.train_runs import SHORT, assert_same_weights, short_config, write_model
from sparroll.cli import main
from sparroll.engines import HFEngine
from sparroll.errors import UserError, of_machine
from sparroll.evaluate.rollout_file import RolloutFile
from sparroll.train import train
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.sinks import JsonLines, read_lines

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/metrics.jsonl")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL, "the disk is full, writing runs/a/metrics.jsonl"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (SafetensorError("I/O error: File too large (os error 27)"), "a file grew larger than this system lets it"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "a file grew larger than this system lets it"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "runs/a"), "the system refuses runs/a: File name too long"),
        (OSError(errno.EROFS, "Read-only file system"), "the system refuses: Read-only file system"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "out of memory on the device: CUDA out of memory"),
    ],
)
def test_errors_of_the_machine_are_known_whoever_raises_them(error: BaseException, message: str) -> None:
    known = of_machine(error)
    assert known is not None
    assert known.message == message


def test_torch_says_how_much_memory_was_missing() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    known = of_machine(caught.value)
    assert known is not None
    assert known.message == "out of memory: 1,073,741,824.0 GiB more were needed"


@pytest.mark.parametrize(
    "error", [ValueError("x"), RuntimeError("mat1 and mat2"), UserError("out of memory"), OSError(2, "no")]
)
def test_other_errors_keep_their_traceback(error: BaseException) -> None:
    assert of_machine(error) is None


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        (RolloutFile, "add", FULL, "the disk is full, writing"),
        (HFEngine, "generate", MemoryError(), "out of memory"),
    ],
)
def test_a_verb_says_what_it_keeps(
    owner: type, name: str, error: BaseException, message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> None:
        raise error

    prompts, model = tmp_path / "prompts.txt", save_model(tmp_path / "model")
    prompts.write_text("a b\n")
    capsys.readouterr()
    command = ["rollout", "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        told, hint = error_of([*command, "--max-new-tokens", "2"], capsys)
    assert told.startswith(message)
    assert hint.endswith("; nothing was finished yet; run the same command to start again")
    assert main([*command, "--max-new-tokens", "2"]) == 0


def test_a_training_run_says_which_step_is_saved_and_goes_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    config = short_config(model, **SHORT, checkpoint={"every_steps": 1})
    saves = iter([False, True, True])
    whole = checkpoint.save_file

    def on_a_small_disk(*arguments: object) -> None:
        if next(saves):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", on_a_small_disk)
        with pytest.raises(UserError, match="the disk is full"):
            train(config, tmp_path / "out")
    said = capsys.readouterr().err
    assert "step 2 could not be saved, the last checkpoint is of step 1; --resume goes on there" in said
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["latest", "step-000001"]
    train(config, tmp_path / "out", resume=True)
    train(config, tmp_path / "straight")
    assert_same_weights(tmp_path / "out", tmp_path / "straight", 2)


def test_half_a_line_of_metrics_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    position = sink.write(1, {"x": 1.0}, [])
    written = os.write

    def half(handle: int, data: bytes) -> int:
        if len(data) < 10:
            raise FULL
        return written(handle, data[:-5])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            sink.write(2, {"x": 2.0}, [])
    sink.close()
    JsonLines(tmp_path / "metrics.jsonl", position).close()
    assert [line["x"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1.0]
