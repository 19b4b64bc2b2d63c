"""recipes/mismatch-study, the model's part: the task, its arrays, the lean forward, packed weights, the dry run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sparroll.errors import UserError

RECIPE = Path(__file__).parents[2] / "recipes" / "mismatch-study"
sys.path.insert(0, str(RECIPE))

import lean_qwen3  # noqa: E402
import measure  # noqa: E402
import pretrain  # noqa: E402
import study_folder  # noqa: E402
from skill import skill  # noqa: E402
from table_batches import STAGES, draw_shape  # noqa: E402
from table_sums import EOS, LEVELS, VOCABULARY, WORD_ID, Role, Shape, TableSums, draw, problem, words  # noqa: E402

SHAPE = Shape(9, (3, 1, 2), columns=3)


def solved(prompt: str) -> tuple[list[set[str]], dict[str, list[int]]]:
    """Operands of each group and digits of each row, read from the words of a prompt."""
    table, question = prompt.removeprefix("table ").removesuffix(" ?").split(" find ")
    rows = {row.split()[0]: [int(d) for d in row.split()[1:]] for row in table.split(" ;") if row.strip()}
    groups = [set(group.split(":")[1].split()) for group in question.split(";") if group.strip()]
    return groups, rows


def test_references_take_each_operand_once_and_add_up() -> None:
    ids = draw(np.random.default_rng(3), SHAPE, 5)
    for row in ids:
        groups, rows = solved(words(row[: SHAPE.prompt_tokens]))
        response = words(row[SHAPE.prompt_tokens :])
        asked = words(row[: SHAPE.prompt_tokens]).split(" find ")[1]
        assert all(part.split(" ; ")[0] in asked for part in response.split("group ")[1:])
        assert [len(group) for group in groups] == [3, 1, 2] and len(rows) == 9
        total = np.zeros(3, dtype=int)
        for group, written in zip(groups, response.split("group ")[1:], strict=True):
            header, *rest = written.split(" : ")[1].split("answer")[0].split(" ;")
            assert set(header.split()) == group
            entries = [entry.split() for entry in rest if entry.split()]
            assert {entry[1] for entry in entries} == group and len(entries) == len(group)
            assert [entry[0] for entry in entries] == [f"n{left}" for left in range(len(group), 0, -1)]
            for entry in entries:
                assert [int(d) for d in entry[2:5]] == rows[entry[1]]
                total = (total + rows[entry[1]]) % 10
                assert [int(d) for d in entry[6:9]] == total.tolist()
        assert response.endswith("answer " + " ".join(map(str, total)) + f" {EOS}")


def test_a_remark_is_any_operand_that_a_group_so_far_began_with() -> None:
    responses = draw(np.random.default_rng(0), SHAPE, 200)[:, SHAPE.prompt_tokens :]
    names = responses[:, SHAPE.entry_starts + 1]
    remarks = responses[:, SHAPE.roles == Role.REMARK].reshape(200, SHAPE.entries, 2)
    for entry, firsts in enumerate([(0,), (0,), (0,), (0, 3), (0, 3, 4), (0, 3, 4)]):
        among = remarks[:, entry, :, None] == names[:, None, list(firsts)]
        assert among.any(-1).all() and among.any((0, 1)).all()


@torch.no_grad()
def test_heads_of_the_first_layer_start_by_looking_back_one_token_each() -> None:
    config = study_folder.new_config(layers=1)
    fresh = study_folder.new_model(config, 0).eval()
    fresh.set_attn_implementation("eager")
    ids = torch.from_numpy(problem("train", 3, 0, 0).astype(np.int64))[None, :1000]
    weights_HSS = fresh(input_ids=ids, output_attentions=True).attentions[0][0]
    for head in range(config.num_attention_heads):
        assert weights_HSS[head].diagonal(-(head + 1))[20:].mean() > 0.9


def test_every_level_has_the_length_that_its_shape_says() -> None:
    for level, shape in LEVELS.items():
        row = problem("eval", level, 0, 0)
        assert len(row) == shape.prompt_tokens + shape.response_tokens
        assert words(row[shape.prompt_tokens :]).count("group") == len(shape.group_sizes)
        if level >= 3:
            assert 4100 < len(row) < 4700


def test_the_same_place_of_a_stream_is_the_same_problem_and_splits_differ() -> None:
    assert (problem("eval", 1, 0, 4) == problem("eval", 1, 0, 4)).all()
    assert (problem("eval", 1, 0, 4) != problem("train", 1, 0, 4)).any()
    assert (problem("eval", 1, 0, 4) != problem("eval", 1, 1, 4)).any()


def test_the_reward_reads_the_answer_and_nothing_else() -> None:
    task = TableSums()
    [prompt] = task.prompts("train", 1, 0, 1)
    response = words(problem("train", 1, 0, 0)[LEVELS[1].prompt_tokens :])
    assert task.reward(prompt, response) == 1.0 and task.reward(prompt, response.removesuffix(f" {EOS}")) == 1.0
    assert task.reward(prompt, "answer " + prompt.answer + " 1") == 0.0
    assert task.reward(prompt, prompt.answer) == 0.0
    wrong = " ".join([*prompt.answer.split()[:-1], str((int(prompt.answer[-1]) + 1) % 10)])
    assert task.reward(prompt, "answer " + wrong) == 0.0


def test_impossible_shapes_and_unknown_levels_are_refused() -> None:
    with pytest.raises(UserError, match="rows must be"):
        Shape(3, (2, 2))
    with pytest.raises(UserError, match="groups must be"):
        Shape(100, (40,))
    with pytest.raises(UserError, match="no level 99"):
        problem("train", 99, 0, 0)


def test_stages_grow_when_learned_when_their_time_is_over_and_never_otherwise() -> None:
    perfect = dict.fromkeys(("form", "header", "operand", "lookup", "sum", "answer"), 0.0)
    trainer = SimpleNamespace(
        args=SimpleNamespace(last_stage=5), stage=0, steps=50, stage_began_step=0, progress=0.05, batches=Mock()
    )

    def stage_after(progress: float = 0.05, **point: float) -> int:
        trainer.stage, trainer.stage_began_step, trainer.progress = 2, 0, progress
        pretrain.Trainer.grow(trainer, perfect | {"rows": 30} | point)
        return trainer.stage

    assert stage_after() == 3
    assert stage_after(rows=4) == 2
    for role in pretrain.LEARNED:
        assert stage_after(**{role: 0.5}) == 2 and stage_after(progress=0.43, **{role: 0.5}) == 3


def test_stages_draw_shapes_within_their_ranges() -> None:
    rng = np.random.default_rng(0)
    for stage in STAGES:
        for shape in [draw_shape(rng, stage) for _ in range(30)]:
            assert stage.rows[0] <= shape.rows <= stage.rows[1] and shape.entries <= stage.entries[1]
            assert max(shape.group_sizes) <= stage.largest_group


@pytest.fixture(scope="module")
def model():
    return study_folder.new_model(study_folder.small_config(), 0).eval()


@pytest.fixture(scope="module")
def ids_BS() -> torch.Tensor:
    return torch.from_numpy(draw(np.random.default_rng(1), SHAPE, 3).astype(np.int64))


@torch.no_grad()
def test_the_lean_forward_is_transformers_forward(model, ids_BS) -> None:
    lean = lean_qwen3.logits(model, lean_qwen3.hidden_states(model, ids_BS))
    torch.testing.assert_close(lean, model(input_ids=ids_BS).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_greedy_samples_follow_the_full_forward(model, ids_BS) -> None:
    prompts = ids_BS[:, : SHAPE.prompt_tokens]
    out = lean_qwen3.sample(model, prompts, torch.zeros(3), 12, WORD_ID[EOS], rows_at_once=2)
    known = prompts
    for _ in range(12):
        known = torch.cat([known, model(input_ids=known).logits[:, -1:].argmax(-1)], 1)
    assert out.tolist() == known[:, SHAPE.prompt_tokens :].tolist()


def test_skill_of_a_uniform_policy_is_known(ids_BS) -> None:
    uniform = study_folder.new_model(study_folder.small_config(), 0)
    torch.nn.init.zeros_(uniform.model.embed_tokens.weight)
    found = skill(uniform, SHAPE, ids_BS)
    assert set(pretrain.LEARNED) < set(found)
    assert found["lookup"] == pytest.approx(1 - 1 / len(VOCABULARY), abs=1e-6)
    # Groups of 3, 1 and 2: three, two, one, one, two, one operands are still open.
    assert found["operand"] == pytest.approx(1 - 10 / 6 / len(VOCABULARY), abs=1e-6)


def test_packed_weights_are_the_same_to_the_bit(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study_folder, "FILE_BYTES", 300_000)
    weights = study_folder.stored_weights(model)
    paths = study_folder.pack(weights, tmp_path)
    assert len(paths) > 1 and all(path.stat().st_size < 400_000 for path in paths)
    back = study_folder.unpack(tmp_path, study_folder.small_config())
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    # Packed again into larger files, none of the old ones is left.
    monkeypatch.setattr(study_folder, "FILE_BYTES", 14_000_000)
    paths = study_folder.pack(weights, tmp_path)
    assert sorted(tmp_path.iterdir()) == paths and len(paths) == 1
    paths[0].unlink()
    with pytest.raises(SystemExit, match="lacks"):
        study_folder.unpack(tmp_path, study_folder.small_config())


def test_the_full_model_has_at_least_thirty_million_parameters() -> None:
    with torch.device("meta"):
        full = study_folder.Qwen3ForCausalLM(study_folder.new_config())
    assert 30e6 < sum(p.numel() for p in full.parameters()) < 32e6


def test_a_dry_run_trains_measures_and_leaves_a_folder_that_transformers_reads(tmp_path, monkeypatch) -> None:
    packed, folder, found = tmp_path / "packed", tmp_path / "model", tmp_path / "measure.json"
    monkeypatch.setattr(
        sys, "argv", ["pretrain.py", "--dry", "--steps", "3", "--out", str(packed), "--folder", str(folder)]
    )
    # Its clock counts from the import, which was when this process collected its tests.
    monkeypatch.setattr(pretrain, "BEGAN", time.time())
    pretrain.main()
    record = json.loads((packed / "train.json").read_text())
    assert {"date", "commit", "hardware", "versions"} <= record.keys()
    assert record["steps"] == 3 and record["loss_curve"][-1]["loss"] < record["loss_curve"][0]["loss"]
    monkeypatch.setattr(sys, "argv", ["measure.py", "--dry", "--packed", str(packed), "--out", str(found)])
    measure.main()
    measured = json.loads(found.read_text())
    assert len(measured["accuracy"]) == 2 and "NaN" not in found.read_text()
    # Two budgets, each over all contexts and over the bins of 32 tokens from 64 on. More budget, less harm.
    assert [row["from_context"] for row in measured["tail"]] == 2 * [None, 64, 96, 128]
    for whole, *bins in (measured["tail"][:4], measured["tail"][4:]):
        assert whole["tokens"] == sum(row["tokens"] for row in bins) == 4 * LEVELS[0].response_tokens
        assert whole["harm"] == pytest.approx(sum(row["harm"] for row in bins), abs=1e-3)
    assert 0 < measured["tail"][4]["harm"] < measured["tail"][0]["harm"]
    loaded = study_folder.Qwen3ForCausalLM.from_pretrained(folder)
    again = study_folder.load_packed(packed, study_folder.small_config())
    torch.testing.assert_close(loaded.model.norm.weight, again.model.norm.weight, rtol=0, atol=0)


def test_the_shipped_weights_are_whole_and_those_that_were_measured() -> None:
    folder = RECIPE / "model"
    weights = study_folder.unpack(folder, study_folder.new_config())
    record = json.loads((folder / "result.json").read_text())
    assert sum(tensor.numel() for tensor in weights.values()) == record["parts"][-1]["parameters"] == 30_847_488
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
