"""The protocol is whole: every engine has it under the same names and signatures, and nothing outside engines/ asks which
engine it holds."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparroll import compression
from sparroll.engines import base
from sparroll.engines.base import Engine, under
from sparroll.engines.hf.engine import HFEngine
from sparroll.errors import UserError
from sparroll.schedule import Schedule

SOURCE = Path(base.__file__).parents[1]
FIELDS = set(Engine.__annotations__)
METHODS = {name for name, value in vars(Engine).items() if inspect.isfunction(value) and not name.startswith("_")}
SCHEDULE, OTHER = Schedule.fixed(64, dense_layers=(0,)), Schedule.fixed(96, dense_layers=(0,))
EVICTION = compression.make_compression("streaming", budget_tokens=64)


FILES = {"Engine": "base.py", "HFEngine": "hf/engine.py", "VLLMEngine": "vllm/engine.py"}


def class_tree(name: str) -> ast.ClassDef:
    """Read and not imported: VLLMEngine needs vLLM."""
    tree = ast.parse((SOURCE / "engines" / FILES[name]).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def arguments(method: ast.FunctionDef) -> list[tuple[str, str]]:
    """(name, default) of each argument."""
    found, given = [argument.arg for argument in method.args.args], method.args.defaults
    defaults = [""] * (len(found) - len(given)) + [ast.unparse(default) for default in given]
    keywords = zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True)
    named = [(keyword.arg, ast.unparse(value) if value else "") for keyword, value in keywords]
    return [*zip(found, defaults, strict=True), *named]


def methods_of(tree: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["HFEngine", "VLLMEngine"])
def test_every_engine_has_every_method_with_the_protocols_arguments(name: str) -> None:
    asked, own = methods_of(class_tree("Engine")), methods_of(class_tree(name))
    # Inherited, a method would be the protocol's own, which does nothing.
    assert METHODS - own.keys() == set()
    assert {method: arguments(own[method]) for method in METHODS} == {
        method: arguments(asked[method]) for method in METHODS
    }


@pytest.mark.parametrize("name", ["HFEngine", "VLLMEngine"])
def test_every_engine_sets_every_field(name: str) -> None:
    tree = class_tree(name)
    stored = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    stored |= {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
    assert FIELDS - stored == set()


def test_nothing_outside_engines_knows_which_engine_it_holds() -> None:
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "engines" in path.parents:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"HFEngine", "VLLMEngine"}
        assert not named, f"{path.relative_to(SOURCE)} names {named}; take an Engine, made by make_engine"


@pytest.fixture
def engine() -> HFEngine:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=200, eos_token_id=2,
    )  # fmt: skip
    return HFEngine(AutoModelForCausalLM.from_config(config))


def test_an_engine_has_the_fields_at_run_time(engine: HFEngine) -> None:
    assert {name for name in FIELDS if not hasattr(engine, name)} == set()
    assert (engine.vocabulary, engine.context_limit, engine.max_batch, engine.kind) == (50, 200, 64, "hf")
    assert engine.shared_model() is engine.model


@pytest.mark.parametrize("before", [None, SCHEDULE, EVICTION], ids=["dense", "schedule", "compression"])
@pytest.mark.parametrize("inside", [None, OTHER, EVICTION], ids=["dense", "schedule", "compression"])
def test_what_was_in_force_comes_back_after_an_exception(engine: HFEngine, before: object, inside: object) -> None:
    both = {"schedule": None, "compression": None}
    was, asked = (both | {"compression" if one is EVICTION else "schedule": one} for one in (before, inside))
    engine.set_schedule(was["schedule"])
    engine.set_compression(was["compression"])

    def fail() -> None:
        with under(engine, **asked):
            assert {"schedule": engine.schedule, "compression": engine.compression} == asked
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {"schedule": engine.schedule, "compression": engine.compression} == was


def test_what_was_in_force_comes_back_where_the_other_schedule_is_refused(engine: HFEngine) -> None:
    engine.set_compression(EVICTION)
    with pytest.raises(UserError, match="layer"), under(engine, schedule=Schedule.fixed(64, dense_layers=(7,))):
        pytest.fail("the block was entered")
    with pytest.raises(UserError, match="exclude each other"), under(engine, schedule=OTHER, compression=EVICTION):
        pytest.fail("the block was entered")
    assert (engine.schedule, engine.compression) == (None, EVICTION)


def test_a_closed_engine_says_so_and_closing_twice_is_no_error(engine: HFEngine) -> None:
    with engine as same:
        assert same is engine
        engine.sleep(2)
        engine.wake()
        assert len(engine.generate([[5, 6]], max_new_tokens=2, stop_ids=[])) == 1
    engine.close()
    for use in (
        lambda: engine.generate([[5, 6]], max_new_tokens=2),
        lambda: engine.load_weights({}, 1),
        lambda: engine.shared_model(),
    ):
        with pytest.raises(UserError, match="the engine is closed\nhint: make another one"):
            use()


def test_closing_leaves_a_model_that_was_passed_in_as_it_was(engine: HFEngine) -> None:
    model = engine.model
    engine.close()
    assert len(HFEngine(model).generate([[5, 6]], max_new_tokens=2, stop_ids=[])) == 1
