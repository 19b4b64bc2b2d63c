"""A checkpoint that does not hold the model's tensors is refused by their names, wherever a model is loaded."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparroll
from cli_runs import error_of, save_model
from sparroll.engines import HFEngine
from sparroll.engines.load_model import check_checkpoint
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.plan.model_shape import model_shape
from sparroll.train import load_config, train

Tensors = dict[str, torch.Tensor]
NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small")


def _changed(whole: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(whole, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda tensors: (tensors.pop(DOWN), tensors.pop(NORM)), f"it lacks {NORM}, {DOWN}"),
    "embeddings missing": (lambda tensors: tensors.pop("model.embed_tokens.weight"), "it lacks "),
    "unexpected": (
        lambda tensors: tensors.update({"model.layers.3.mlp.extra": torch.zeros(1)}),
        "it holds model.layers.3.mlp.extra, which the model does not have",
    ),
    "misshapen": (
        lambda tensors: tensors.update({DOWN: torch.zeros(32, 65)}),
        f"{DOWN} has shape [32, 65] instead of [32, 64]",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_tensors_that_do_not_fit_are_named(kind: str, whole: Path, tmp_path: Path) -> None:
    change, message = BROKEN[kind]
    folder = _changed(whole, tmp_path / "model", change)
    for load in (HFEngine, Scorer, check_checkpoint):
        with pytest.raises(UserError) as caught:
            load(folder)
        assert "does not fit its config" in caught.value.message
        assert message in caught.value.message


def test_many_missing_tensors_are_counted(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(UserError, match=r"it lacks model\.layers\.3\..*, .*, .* and \d+ more"):
        HFEngine(folder)


@pytest.mark.parametrize("cut", [3, 200, 60_000])
def test_cut_off_weights_are_refused(cut: int, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    for load in (HFEngine, check_checkpoint):
        with pytest.raises(UserError, match="a file of weights is damaged or cut off"):
            load(folder)


def test_a_shared_head_may_be_in_the_checkpoint_or_not(whole: Path, tmp_path: Path) -> None:
    assert "lm_head.weight" not in load_file(whole / "model.safetensors")
    check_checkpoint(whole)
    twice = _changed(
        whole,
        tmp_path / "twice",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    HFEngine(twice)
    check_checkpoint(twice)
    head = _changed(
        whole,
        tmp_path / "head",
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}),
    )
    engines = [HFEngine(folder) for folder in (whole, head)]
    weights = [engine.model.get_input_embeddings().weight for engine in engines]
    assert torch.equal(*weights)


@pytest.mark.parametrize("verb", ["rollout", "profile", "calibrate", "evaluate", "train", "distill"])
def test_every_verb_refuses_such_a_checkpoint(
    verb: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _changed(whole, tmp_path / "model", lambda tensors: tensors.pop(NORM))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\nc d\ne f\n")
    asks = {
        "train": ["--set", f"model.name={folder}", "--set", "model.device=cpu"],
        "distill": ["--model", str(folder), "--prompts", str(prompts), "--budget", "64"],
        "evaluate": ["--model", str(folder), "--tasks", "synthetic", "--count", "1"],
        "calibrate": ["--model", str(folder), "--prompts", str(prompts), "--budget", "64", "--samples", "8"],
    }
    ask = asks.get(verb, ["--model", str(folder), "--prompts", str(prompts), "--budget", "64"])
    message, _ = error_of([verb, *ask, "--out", str(tmp_path / "out")], capsys)
    assert message.endswith(f"it lacks {NORM}")


def test_a_trainer_in_python_refuses_it_too(whole: Path, tmp_path: Path) -> None:
    folder = _changed(whole, tmp_path / "model", lambda tensors: tensors.pop(NORM))
    with pytest.raises(UserError, match=f"it lacks {NORM}"):
        train(load_config(None, [f"model.name={folder}", "model.device=cpu", "log.sinks=[]"]), tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "x"), ("num_attention_heads", 0), ("vocab_size", None)])
def test_whatever_a_config_makes_transformers_raise_is_one_line(
    key: str, value: object, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match="cannot load the model '.*model': "):
        HFEngine(folder)


def test_a_file_and_a_path_that_is_not_there_are_refused_without_asking_the_hub(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparroll.engines.load_model.AutoModelForCausalLM.from_pretrained", None)
    for name in ("/gone/model", "./gone", "gone/", "a/b/c", "~/gone"):
        with pytest.raises(UserError, match=re.escape(f"there is no folder {name!r}")):
            HFEngine(name)
    with pytest.raises(UserError, match="is a file") as caught:
        HFEngine(str(whole / "config.json"))
    assert caught.value.hint == f"give {whole}"


def test_the_folder_of_a_run_names_its_newest_model(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / f"checkpoints/step-{step:06}/model").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is the folder of a training run, not of a model") as caught:
        HFEngine(tmp_path)
    assert caught.value.hint == f"its newest model is {tmp_path}/checkpoints/step-000010/model"


def test_a_folder_without_model_weights_or_tokenizer_says_what_it_lacks(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no config\.json in"):
        HFEngine(tmp_path)
    pickled = tmp_path / "pickled"
    shutil.copytree(whole, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"are no safetensors, but pytorch_model\.bin"):
        HFEngine(pickled)
    (pickled / "pytorch_model.bin").rename(pickled / "model.safetensors")
    for path in pickled.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"there are no files of a tokenizer in"):
        HFEngine(pickled)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_damaged_generation_config_is_refused(text: str, whole: Path, tmp_path: Path) -> None:
    """transformers passes over it, and then nothing ends where the model's authors said."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json is damaged"):
        HFEngine(folder)


def test_an_end_that_no_token_can_be_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [99999, -1]}')
    with pytest.raises(UserError, match=r"no response could end: the model's eos_token_id is 99999, -1"):
        HFEngine(folder).generate(["a b"], max_new_tokens=2)


def test_no_checkpoints_own_code_runs_or_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trust_remote_code is left out, transformers asks on standard input, and a yes that is piped in runs it."""
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    for read in (model_shape, check_checkpoint, HFEngine):
        with pytest.raises(UserError):
            read(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    source = Path(sparroll.__file__).parent
    calls = [
        (path.name, ast.unparse(node))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.match(r"Auto\w+\.from_pretrained", ast.unparse(node.func))
    ]
    assert len(calls) > 5 and not [call for call in calls if "trust_remote_code=" not in call[1]]
