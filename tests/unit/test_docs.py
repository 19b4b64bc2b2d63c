"""The documentation against the program: commands parse, the reference is complete, links between files exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_reference import PAGE, page, verbs
from sparroll.attention.selectors import make_selector, selector_kinds
from sparroll.draft_check import DraftCheck
from sparroll.schedule import Schedule
from sparroll.train.config.base import keys_of, kinds_of
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.file import load_config
from sparroll.train.config.run import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
)


def _blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.S | re.M)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def _commands() -> list[tuple[str, str]]:
    found = []
    for path in PAGES:
        for block in _blocks(path, "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(path.name, line) for line in lines if re.search(r"(^|/|\s)sparroll [a-z]", line)]
    return found


def test_the_reference_is_what_the_program_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/cli_reference.py"


@pytest.mark.parametrize(("page", "line"), _commands())
def test_every_command_in_the_docs_has_an_existing_verb_and_options(page: str, line: str) -> None:
    words = shlex.split(line)
    start = next(place for place, word in enumerate(words) if word.split("/")[-1] == "sparroll")
    known = dict(verbs())
    name = " ".join(words[start + 1 : start + 3])
    name = name if name in known else words[start + 1]
    assert name in known, f"{page}: sparroll has no verb {name}"
    options = {option for parameter in known[name].params for option in parameter.opts}
    for word in words[start + 1 :]:
        if word.startswith("--"):
            assert word in options, f"{page}: sparroll {name} has no option {word}"


def test_every_toml_in_the_docs_is_accepted(tmp_path: Path) -> None:
    schedule, train = 0, 0
    for path in PAGES:
        for block in _blocks(path, "toml"):
            file = tmp_path / "block.toml"
            file.write_text(block)
            if block.startswith("format = 1"):
                Schedule.load(file)
                schedule += 1
            elif block.startswith("# train.toml"):
                load_config(file)
                train += 1
    assert (schedule, train) == (1, 4)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_setting_in_the_docs_is_a_section_or_key_of_a_configuration(path: Path) -> None:
    sections = [item for config in (TrainConfig, DistillConfig) for item in config.model_fields.items()]
    known = {name for name, _ in sections}
    known |= {f"{name}.{key}" for name, field in sections for kind in kinds_of(field) for key in keys_of(kind)}
    for key in re.findall(r"--set '?([a-z_]+(?:\.[a-z0-9_]+)?)=", path.read_text(encoding="utf-8")):
        assert key in known or key.startswith("correction."), f"{path.name} sets {key}"


def test_the_rewards_of_the_docs_train_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from integration.train_runs import SHORT, short_config, steps, write_model
    from sparroll.tasks.reward_function import look_in
    from sparroll.train import train

    page = ROOT / "docs" / "rewards.md"
    (tmp_path / "my_rewards.py").write_text(_blocks(page, "python")[0])
    (tmp_path / "train.toml").write_text(_blocks(page, "toml")[0])
    monkeypatch.setattr(sys, "path", list(sys.path))
    look_in(tmp_path)
    terms = load_config(tmp_path / "train.toml").model_dump()["reward"]["terms"]
    changes = SHORT | {"train": {"steps": 1}, "reward": {"terms": terms}}
    train(short_config(write_model(tmp_path / "model"), **changes), tmp_path / "run")
    (line,) = steps(tmp_path / "run")
    means = {name: line[f"reward/term/{name}"] for name in ("task", "brevity", "judged", "novelty")}
    assert 0 < means["task"] < 1
    assert 0.5 < means["brevity"] <= 1
    assert (means["judged"], means["novelty"]) == (1, 1)
    assert line["reward/mean"] == pytest.approx(means["task"] + 0.2 * means["brevity"] + 0.5, abs=1e-5)


def test_the_selector_of_the_docs_works_as_written() -> None:
    code = next(block for block in _blocks(ROOT / "docs" / "selectors.md", "python") if "class NewestKey" in block)
    exec(compile(code, "selectors.md", "exec"), {"__name__": "selectors_page"})
    assert "newest_key" in selector_kinds()
    schedule = Schedule.fixed(128, make_selector({"kind": "newest_key", "page_tokens": 16}))

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparroll.engines.hf.engine import HFEngine

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    engine = HFEngine(Qwen3ForCausalLM(config), schedule=schedule)
    (rollout,) = engine.generate([list(range(30)) * 8], max_new_tokens=4)
    assert rollout.attention == "sparse"


def test_the_control_group_of_the_docs_works_as_written() -> None:
    (code,) = _blocks(ROOT / "docs" / "control-group.md", "python")
    found: dict[str, Any] = {}
    exec(compile(code, "control-group.md", "exec"), found)
    assert sum(found["dense"]) == 4 and found["alarm"] == ""
    assert found["report"]["control/reward_gap"] == 0


def test_the_checked_schedule_of_the_docs_is_made_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(block for block in _blocks(ROOT / "docs" / "verified-rollouts.md", "python") if "checked-512" in block)
    exec(compile(code, "verified-rollouts.md", "exec"), {})
    schedule = Schedule.load("checked-512.toml")
    assert schedule.check == DraftCheck(64, 0.01) and schedule.dense_layers == ()
    assert [schedule.of_layer(layer).kv_budget_tokens(30_000) for layer in (0, 1, 2, 27)] == [2048, 2048, 512, 512]


def test_links_between_files_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_selector_is_documented() -> None:
    text = (ROOT / "docs" / "selectors.md").read_text(encoding="utf-8")
    kinds = [path.stem for path in (ROOT / "src/sparroll/attention/selectors").glob("*.py")]
    assert {"page_mean", "oracle"} <= set(kinds)
    assert all(f"`{kind}" in text for kind in kinds if kind not in ("__init__", "base"))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/life-of-a-step.md"])
def test_every_path_of_a_file_that_a_newcomer_reads_exists(name: str) -> None:
    for path in re.findall(r"\w[\w./-]*/\w+\.py\b", (ROOT / name).read_text(encoding="utf-8")):
        assert (ROOT / "src/sparroll" / path).is_file() or (ROOT / path).is_file(), f"{name} names {path}"


def test_every_file_and_folder_in_the_tree_of_the_readme_is_where_the_tree_has_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^```\n(src/sparroll/\n.*?)^```", text, flags=re.S | re.M)
    assert tree is not None
    named: list[Path] = []
    folders: dict[int, Path] = {}
    here = ROOT
    for line in tree[1].splitlines():
        indent = len(line) - len(line.lstrip())
        if indent <= 4:
            folders = {depth: folder for depth, folder in folders.items() if depth < indent}
            entry = folders[max(folders)] / line.split()[0] if folders else ROOT / line.split()[0]
            here = entry if entry.suffix == "" else entry.parent
            folders |= {indent: here} if here == entry else {}
            named.append(entry)
        named += [here / name for name in re.findall(r"\b\w+\.py\b", line)]
    missing = [str(path.relative_to(ROOT)) for path in named if not path.exists()]
    assert len(named) > 70 and missing == []
