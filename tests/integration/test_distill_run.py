"""Only the adapter, against a frozen model: `distill` in whole runs, and its adapter in the hands of an engine."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from cli_runs import error_of
from integration.train_runs import Vowels, short_config, short_distill_config
from sparroll.cli import main
from sparroll.engines.adapter import BESIDE, Adapter, load_adapter
from sparroll.engines.hf.engine import HFEngine
from sparroll.engines.load_model import load_model
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train import TrainConfig, train
from sparroll.train.distill.run import DistillResult, DistillRun, distill
from sparroll.train.loop import Trainer
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.sampling.prompts import GivenPrompts, PromptStream
from sparroll.train.setup import open_run
from sparroll.train.tail_metrics import measure_tail
from sparroll.types import Prompt, TokenBatch

config = short_distill_config


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillResult]:
    out = tmp_path_factory.mktemp("runs") / "straight"
    return out, distill(config(model), out)


def lines(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(out / "metrics.jsonl")]


def same_adapter(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_leaves_an_adapter_checkpoints_and_figures_and_no_model(straight: tuple[Path, DistillResult]) -> None:
    out, result = straight
    assert (result.steps, result.adapter) == (4, out / "adapter")
    assert same_adapter(result.adapter, out / "checkpoints" / "latest" / "adapter")
    assert not list(out.rglob("model.safetensors"))
    assert not list(out.rglob("optimizer.safetensors"))
    logged = lines(out)
    assert [line["step"] for line in logged] == [0, 1, 2, 3, 4, 4]
    assert not [name for line in logged for name in line if name.startswith(("reward/", "policy/", "correction/"))]
    assert result.before is not None
    assert result.after is not None
    assert (result.before.step, result.after.step) == (0, 4)
    assert result.before.q05_low <= result.before.q05 <= result.before.q05_high
    record = json.loads((out / "result.json").read_text())
    assert record["kind"] == "distill"
    assert record["results"]["after"]["q05"] == result.after.q05


def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    model: str, straight: tuple[Path, DistillResult], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    distill(config(model), out)
    shutil.rmtree(out / "checkpoints" / "step-000004")
    again = distill(config(model), out, resume=True)
    assert lines(out) == lines(straight[0])
    assert same_adapter(out / "adapter", straight[0] / "adapter")
    assert (again.before, again.after) == (straight[1].before, straight[1].after)


def test_ctrl_c_saves_the_last_completed_step(
    model: str, straight: tuple[Path, DistillResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, original = 4, HFEngine.generate

    def generate(self: HFEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", generate)
        with pytest.raises(KeyboardInterrupt):
            distill(config(model, checkpoint={"every_steps": 0}), tmp_path / "run")
    assert not (tmp_path / "run" / "adapter").exists()
    distill(config(model, checkpoint={"every_steps": 0}), tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(straight[0])
    assert same_adapter(tmp_path / "run" / "adapter", straight[0] / "adapter")


def test_an_engine_with_the_adapter_samples_what_the_adapted_model_says(
    model: str, straight: tuple[Path, DistillResult]
) -> None:
    folder = straight[1].adapter
    plain, _ = load_model(model, torch.float32, "cpu")
    engine = HFEngine(copy.deepcopy(plain), schedule=Schedule.fixed(64))
    load_adapter(engine, model, folder)
    rollouts = engine.generate([list(range(2, 28)) * 3], 4, max_new_tokens=20, seed=5)
    scored = Scorer(Adapter.load(plain, folder).adapted).sparse(rollouts, Schedule.fixed(64))
    for rollout, score in zip(rollouts, scored, strict=True):
        assert (rollout.sparse_logp - score.logp).abs().max() < 1e-5
    by_peft = PeftModel.from_pretrained(copy.deepcopy(plain), folder).merge_and_unload().state_dict()
    for name, value in engine.model.state_dict().items():
        assert (value - by_peft[name]).abs().max() < 1e-6
    with pytest.raises(UserError, match="an adapter is for sparse rollouts"):
        load_adapter(HFEngine(copy.deepcopy(plain)), model, folder)


def test_held_out_prompts_are_of_the_level_that_evaluation_asks_for(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, original = [], Vowels.prompts

    def prompts(self: Vowels, split: str, level: int, seed: int, count: int) -> list[Prompt]:
        levels.append((split, level, count))
        return original(self, split, level, seed, count)

    settings = config(model, evaluate={"prompts": 2, "level": 3})
    run = DistillRun(open_run(settings, tmp_path / "run", resume=False))
    with monkeypatch.context() as patch:
        patch.setattr(Vowels, "prompts", prompts)
        run.evaluate()
    assert levels == [("eval", 3, 2)]


def test_train_and_distill_do_not_resume_each_others_runs(
    model: str, straight: tuple[Path, DistillResult], tmp_path: Path
) -> None:
    shutil.copytree(straight[0], tmp_path / "run", symlinks=True)
    with pytest.raises(UserError, match='was made with command = "sparroll distill"'):
        train(short_config(model), tmp_path / "run", resume=True)
    train(short_config(model, train={"steps": 1}, evaluate={"prompts": 0}), tmp_path / "trained")
    with pytest.raises(UserError, match='was made with command = "sparroll train"'):
        distill(config(model, train={"steps": 2}, evaluate={"prompts": 0}), tmp_path / "trained", resume=True)


def test_given_prompts_hold_out_every_eighth_and_are_known_by_their_text() -> None:
    prompts = [Prompt(str(number), f"text {number}", "") for number in range(17)]
    given = GivenPrompts(prompts, "mine.jsonl")
    assert [prompt.prompt_id for prompt in given.prompts("eval", 0, 0, 99)] == ["0", "8", "16"]
    assert len(given.prompts("train", 0, 0, 99)) == 14
    assert len(given.prompts("train", 0, 0, 5)) == 5
    assert len(PromptStream(given, 1, 0, TrainConfig().task.train_prompts).prompts) == 14
    many = GivenPrompts([Prompt(str(number), f"text {number}", "") for number in range(3000)], "mine.jsonl")
    assert len(PromptStream(many, 1, 0, TrainConfig().task.train_prompts).prompts) == 2625
    assert given.name != GivenPrompts(prompts[:-1], "mine.jsonl").name
    assert given.name == GivenPrompts(list(prompts), "mine.jsonl").name
    with pytest.raises(UserError, match="at least two"):
        GivenPrompts(prompts[:1], "mine.jsonl")
    with pytest.raises(UserError, match="have no rewards"):
        given.reward(prompts[0], "")


SMALL = [
    "train.steps=2", "train.prompts_per_step=2", "rollout.max_new_tokens=40", "evaluate.prompts=2",
    "mismatch.bin_tokens=50", "log.sinks=[]", "model.device=cpu", "train.micro_batch_tokens=600",
]  # fmt: skip


def command(model: str, out: Path, *more: str) -> list[str]:
    return ["distill", "--model", model, "--out", str(out), *more, *(x for each in SMALL for x in ("--set", each))]


def test_the_verb_distills_on_a_file_of_prompts_and_rollout_takes_the_adapter(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    words = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    prompts.write_text("".join(json.dumps({"prompt": f"{words[2 * n :]} {words}"}) + "\n" for n in range(9)))
    out = tmp_path / "out"
    assert main(command(model, out, "--budget", "64", "--prompts", str(prompts))) == 0
    output = capsys.readouterr()
    assert "held_out_q05_before" in output.out
    assert output.err.splitlines()[-2:] == [f"wrote {out / 'adapter'}", f"wrote {out / 'result.json'}"]
    assert json.loads((out / "config.json").read_text())["task"]["name"].startswith("prompts.jsonl#")
    message, _ = error_of(command(model, out, "--budget", "64", "--prompts", str(prompts)), capsys)
    assert message == f"{out} already holds a run"
    prompts.write_text(prompts.read_text().replace("a b", "b a"))
    message, _ = error_of(command(model, out, "--budget", "64", "--prompts", str(prompts), "--resume"), capsys)
    assert f'{out} was made with task.name = "prompts.jsonl#' in message

    sampled = {}
    for name, more in (("plain", []), ("adapted", ["--adapter", str(out / "adapter")])):
        rollout = ["rollout", "--model", model, "--out", str(tmp_path / name), "--budget", "64", "--task", "vowels"]
        assert main([*rollout, "--count", "2", "--max-new-tokens", "30", "--device", "cpu", *more]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        sampled[name] = [row["sparse_logp"] for row in rows]
    assert sampled["plain"] != sampled["adapted"]
    capsys.readouterr()
    dense = ["rollout", "--model", model, "--out", str(tmp_path / "dense"), "--task", "vowels", "--device", "cpu"]
    message, _ = error_of([*dense, "--adapter", str(out / "adapter")], capsys)
    assert message.startswith("an adapter is for sparse rollouts")


def test_the_verb_says_what_is_missing(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(command(model, tmp_path / "out"), capsys)
    assert message == "[attention] is missing"
    assert hint == "attention.kind is schedule or budget; for example sparroll distill --budget 512"
    message, _ = error_of(command(model, tmp_path / "out", "--budget", "64", "--schedule", "x"), capsys)
    assert message == "--schedule and --budget exclude each other"
    message, _ = error_of(["distill", "--budget", "64"], capsys)
    assert message == "--out is missing"
    asked = command(model, tmp_path / "out", "--budget", "64", "--set", "distill.objective=ppo_kl")
    message, _ = error_of(asked, capsys)
    assert message == "distill.objective: input should be 'kl', got 'ppo_kl'"
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 3)
    message, _ = error_of(command(model, tmp_path / "out", "--budget", "64", "--prompts", str(chat)), capsys)
    assert message == "the prompt 'chat.jsonl:2' is a chat, and the model's tokenizer has no chat template"


def test_updates_on_the_same_rollouts_bring_the_sparse_policy_to_the_dense_one(tmp_path: Path) -> None:
    """tiny-reasoner under a budget that costs it much: the KL falls to a quarter, and the tail of the same tokens rises."""
    changes: dict[str, dict[str, Any]] = {
        "task": {"name": "synthetic", "level": 1},
        "attention": {"kind": "budget", "kv_budget_tokens": 96},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 80},
        "train": {"prompts_per_step": 4, "micro_batch_tokens": 4096},
    }
    trainer = Trainer(open_run(config("tiny-reasoner", **changes), tmp_path / "run", resume=False))
    update, schedule = trainer.parts.distill, trainer.engine.schedule
    assert update is not None
    assert schedule is not None
    rollouts = trainer.sample(trainer.next_prompts(), 1)
    scores = trainer.score(rollouts)
    batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    batch.add_scores(scores)
    frozen = {name: value.clone() for name, value in trainer.policy.state_dict().items()}

    def tail() -> tuple[float, float]:
        read = Scorer(update.adapter.adapted).sparse(rollouts, schedule, top_k=20)
        mine = [rollout.read_by(score) for rollout, score in zip(rollouts, read, strict=True)]
        overall = measure_tail(mine, scores, 1000, trainer.ranks, 0).table("top_k_lower").overall
        return overall.mean, overall.q05

    before = tail()
    kl = [update(batch, schedule, step, lambda: None)["distill/kl"] for step in range(1, 13)]
    after = tail()
    assert kl[-1] < 0.25 * kl[0]
    assert after[0] > before[0] + 0.01
    assert after[1] > before[1] + 0.05
    assert all(torch.equal(value, frozen[name]) for name, value in trainer.policy.state_dict().items())


def test_an_adapter_of_another_model_is_refused(
    model: str, straight: tuple[Path, DistillResult], tmp_path: Path
) -> None:
    other = str(shutil.copytree(model, tmp_path / "other"))
    engine = HFEngine(other, schedule=Schedule.fixed(64))
    with pytest.raises(UserError, match=r"was trained on .*, not on .*other"):
        load_adapter(engine, other, straight[1].adapter)


def test_an_adapter_trained_beside_a_policy_belongs_to_that_one(model: str, tmp_path: Path) -> None:
    plain, _ = load_model(model, torch.float32, "cpu")
    Adapter(plain).write(tmp_path / "adapter", BESIDE)
    own = str(shutil.copytree(model, tmp_path / "model"))
    load_adapter(HFEngine(own, schedule=Schedule.fixed(64)), own, tmp_path / "adapter")
    with pytest.raises(UserError, match=r"was trained on .*model, not on"):
        load_adapter(HFEngine(model, schedule=Schedule.fixed(64)), model, tmp_path / "adapter")


def test_prompts_of_another_task_than_the_configuration_names_are_refused(model: str, tmp_path: Path) -> None:
    from sparroll import tasks

    with pytest.raises(UserError, match=r"names the task 'vowels', but the prompts given are of 'synthetic'"):
        distill(config(model), tmp_path / "run", task=tasks.get("synthetic"))
