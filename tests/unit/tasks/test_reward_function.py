"""Custom rewards: how a function is found, checked and called, and what every mistake in it says."""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import functools
import hashlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll.errors import UserError
from sparroll.tasks.async_calls import AsyncCalls
from sparroll.tasks.reward_function import RewardFunction, look_in
from sparroll.types import Prompt, Rollout

SOURCE = """
import asyncio
import os
import sys
from sparroll.tasks import Verdict, batch_reward

def length(prompt, response_text, rollout, *, per_token=1.0):
    return per_token * len(rollout.response_ids)

def half_graded(prompt, response_text, rollout):
    return None if response_text == "b" else Verdict(None, "broken") if response_text == "c" else Verdict(0.25)

class Judge:
    def __init__(self, worth):
        self.worth = worth
    def __call__(self, prompt, response_text, rollout):
        return self.worth
    def method(self, prompt, response_text, rollout):
        return -self.worth

judge = Judge(3)

@batch_reward
def place(prompts, response_texts, rollouts, first=0):
    return [first + place for place in range(len(prompts))]

@batch_reward
async def async_place(prompts, response_texts, rollouts):
    await asyncio.sleep(0)
    return list(range(len(prompts)))

@batch_reward
def one_for_all(prompts, response_texts, rollouts):
    return [1.0]

@batch_reward
def number(prompts, response_texts, rollouts):
    return 1.0

def nothing_is_a_text(prompt, response_text, rollout):
    return "0.5"

def infinite(prompt, response_text, rollout):
    return float("inf") if response_text == "b" else 0.0

def huge(prompt, response_text, rollout):
    return 1e7

def broken(prompt, response_text, rollout):
    return 1 / (0 if response_text == "b" else 1)

def forgotten(prompt, response_text, rollout):
    return async_broken(prompt, response_text, rollout)

async def async_broken(prompt, response_text, rollout):
    raise KeyError(response_text)

async def never(prompt, response_text, rollout):
    await asyncio.Event().wait()

async def own_timeout(prompt, response_text, rollout):
    raise TimeoutError("the judge model did not answer")

def leaves(prompt, response_text, rollout):
    sys.exit()

async def async_leaves(prompt, response_text, rollout):
    sys.exit("no key for the judge")

def vanishes(prompt, response_text, rollout):
    os._exit(0)

async def async_vanishes(prompt, response_text, rollout):
    os._exit(3)

def wanders(prompt, response_text, rollout):
    os.chdir("/")
    print("I am in", os.getcwd())
    return 1.0

async def cancels(prompt, response_text, rollout):
    raise asyncio.CancelledError

def astronomical(prompt, response_text, rollout):
    return 10 ** 400

def unspeakable(prompt, response_text, rollout):
    return 10 ** 5000

def talkative(prompt, response_text, rollout):
    raise ValueError("one\\ntwo" * 1000)

@batch_reward
def bit_by_bit(prompts, response_texts, rollouts):
    for text in response_texts:
        yield 1 / (0 if text == "b" else 1)

@batch_reward
def of_its_own_type(prompts, response_texts, rollouts):
    for text in response_texts:
        yield 1 + text

@batch_reward
def table(prompts, response_texts, rollouts):
    return {0: 0.5, 1: 0.25, 2: 1.0}

@batch_reward
def unordered(prompts, response_texts, rollouts):
    return {0.5, 0.25, 1.0}

def too_few(prompt, response_text):
    return 1.0

constant = 3

class Worst(BaseException):
    pass

def gives_up(prompt, response_text, rollout):
    raise KeyboardInterrupt("I gave up")

async def async_gives_up(prompt, response_text, rollout):
    raise KeyboardInterrupt

def worst(prompt, response_text, rollout):
    raise Worst("neither an Exception nor an exit")

def dies(prompt, response_text, rollout):
    os.abort() if response_text == "b" else None
    return 1.0

async def async_dies(prompt, response_text, rollout):
    os.abort()
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "own_rewards.py").write_text(SOURCE)
    (folder / "cannot_import.py").write_text("import there_is_no_such_package\n")
    (folder / "cannot_parse.py").write_text("def reward(:\n")
    (folder / "a_script.py").write_text("import sys\nsys.exit(2)\n")
    (folder / "ends_it_all.py").write_text("import os\nprint('bye')\nos._exit(0)\n")
    before = list(sys.path)
    look_in(folder)
    yield
    sys.path[:] = before


PROMPTS = [Prompt(f"p/{place}", "?", "") for place in range(3)]
TEXTS = ["a", "b", "c"]
ROLLOUTS = [Rollout([1], [2] * (place + 1), torch.zeros(place + 1), "stop") for place in range(3)]


def rewards(name: str, calls: AsyncCalls | None = None, **settings: Any) -> list[float]:
    calls = calls or AsyncCalls(4, 5.0)
    try:
        return RewardFunction(f"own_rewards:{name}", settings)(PROMPTS, TEXTS, ROLLOUTS, calls)
    finally:
        calls.close()


def test_a_function_sees_the_rollout_and_its_settings() -> None:
    assert rewards("length") == [1, 2, 3]
    assert rewards("length", per_token=-0.5) == [-0.5, -1, -1.5]


def test_none_and_a_verdict_without_a_reward_are_no_reward() -> None:
    graded, *others = rewards("half_graded")
    assert graded == 0.25
    assert all(math.isnan(value) for value in others)


def test_a_path_may_lead_to_any_callable() -> None:
    assert rewards("judge") == [3, 3, 3]
    assert rewards("judge.method") == [-3, -3, -3]


def test_batch_functions_get_lists() -> None:
    assert rewards("place", first=7) == [7, 8, 9]
    assert rewards("async_place") == [0, 1, 2]


def test_what_a_function_prints_is_no_result_and_the_run_stays_in_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = Path.cwd()
    assert rewards("wanders") == [1, 1, 1]
    assert Path.cwd() == before
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "I am in /\n" * 3)


def test_nothing_is_called_for_no_responses() -> None:
    assert RewardFunction("own_rewards:one_for_all")([], [], [], AsyncCalls(1, 1.0)) == []


def test_the_digest_is_of_the_functions_file() -> None:
    for name in ("length", "judge", "judge.method"):
        found = RewardFunction(f"own_rewards:{name}")
        assert found.source is not None
        assert found.source.name == "own_rewards.py"
        assert found.digest == hashlib.sha256(SOURCE.encode()).hexdigest()


def test_async_calls_run_together_within_a_bound_on_one_loop_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    import own_rewards  # type: ignore[import-not-found]

    running, most, loops = 0, 0, set()

    async def counted(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
        nonlocal running, most
        loops.add(asyncio.get_running_loop())
        running += 1
        most = max(most, running)
        # Later ones end first.
        for _ in range(10 - len(rollout.response_ids)):
            await asyncio.sleep(0)
        running -= 1
        return float(len(rollout.response_ids))

    monkeypatch.setattr(own_rewards, "counted", counted, raising=False)
    function, calls = RewardFunction("own_rewards:counted"), AsyncCalls(2, 5.0)
    for _ in range(2):
        assert function(PROMPTS, TEXTS, ROLLOUTS, calls) == [1, 2, 3]
    assert most == 2
    assert len(loops) == 1
    calls.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            r"own_rewards:broken raised ZeroDivisionError: .* \(own_rewards\.py, line 50\), for the prompt p/1",
        ),
        (
            "async_broken",
            r"own_rewards:async_broken raised KeyError: 'a' \(own_rewards\.py, line \d+\), for the prompt p/0",
        ),
        ("own_timeout", r"raised TimeoutError: the judge model did not answer"),
        ("infinite", r"own_rewards:infinite gave inf, for the prompt p/1"),
        ("huge", r"gave 10000000\.0"),
        ("nothing_is_a_text", r"gave str '0\.5' instead of a number, for the prompt p/0"),
        ("one_for_all", r"gave 1 rewards for 3 responses, for the prompt p/0 \.\.\. p/2"),
        ("number", r"gave float 1\.0 instead of a list"),
        ("leaves", r"own_rewards:leaves raised SystemExit \(own_rewards\.py, line \d+\), for the prompt p/0"),
        ("async_leaves", r"raised SystemExit: no key for the judge \(own_rewards\.py"),
        ("vanishes", r"own_rewards:vanishes raised SystemExit: os\._exit\(0\) \(own_rewards\.py, line \d+\)"),
        ("async_vanishes", r"raised SystemExit: os\._exit\(3\) \(own_rewards\.py"),
        (
            "gives_up",
            r"own_rewards:gives_up raised KeyboardInterrupt: I gave up \(own_rewards\.py, line \d+\)",
        ),
        (
            "async_gives_up",
            r"async_gives_up raised KeyboardInterrupt \(own_rewards\.py, line \d+\), for the prompt p/0",
        ),
        ("worst", r"own_rewards:worst raised Worst: neither an Exception nor an exit \(own_rewards\.py"),
        ("cancels", r"own_rewards:cancels raised CancelledError \(own_rewards\.py, line \d+\), for the prompt p/0"),
        ("astronomical", r"gave int 10+\.\.\. instead of a number"),
        ("unspeakable", r"gave int that cannot be shown instead of a number"),
        ("talkative", r"raised ValueError: one two.{380,400}\.\.\. \(own_rewards\.py"),
        ("bit_by_bit", r"raised ZeroDivisionError: .*own_rewards\.py, line \d+\), for the prompt p/0 \.\.\. p/2"),
        ("of_its_own_type", r"raised TypeError: unsupported operand"),
        ("table", r"gave dict \{0: 0\.5.* instead of a list"),
        ("unordered", r"gave set \{.* instead of a list"),
    ],
)
def test_what_goes_wrong_names_the_function_and_the_prompt(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        rewards(name)
    assert "\n" not in raised.value.message


def test_a_function_that_changes_a_rollout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would go on with tokens that nobody sampled."""
    import own_rewards

    def meddles(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
        if prompt.prompt_id == "p/1":
            rollout.response_ids[-1] = 0 if rollout.response_ids[-1] else 1
        return 1.0

    monkeypatch.setattr(own_rewards, "meddles", meddles, raising=False)
    with pytest.raises(UserError, match="meddles changed the tokens of a rollout, for the prompt p/1"):
        RewardFunction("own_rewards:meddles")(PROMPTS, TEXTS, copy.deepcopy(ROLLOUTS), AsyncCalls(2, 5.0))


def test_a_call_that_takes_too_long_is_named_with_its_limit() -> None:
    with pytest.raises(UserError, match=r"(?s)never took more than 0\.01 seconds, for the prompt p/\d") as raised:
        rewards("never", AsyncCalls(4, 0.01))
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("reward.async_seconds is the limit in training; evaluation has 60 seconds")


def test_ctrl_c_during_async_calls_is_no_error_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import own_rewards

    async def interrupted(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
        if response_text == "b":
            signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(own_rewards, "interrupted", interrupted, raising=False)
    # What a shell puts in the background is deaf to SIGINT, and so are its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rewards("interrupted")
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_a_call_is_no_error_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import own_rewards

    def interrupted(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
        signal.raise_signal(number)
        return 0.0

    monkeypatch.setattr(own_rewards, "interrupted", interrupted, raising=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                rewards("interrupted")
            assert signal.getsignal(number) is signal.default_int_handler
        finally:
            signal.signal(number, before)


def test_a_process_that_dies_in_a_function_says_in_which_one_and_how_to_go_on() -> None:
    def dying(name: str) -> None:
        faulthandler.disable()
        with suppress(UserError):
            rewards(name)

    for name, where in (("dies", "p/1"), ("async_dies", "p/0 ... p/2")):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(write, 2)
            os.close(write)
            os.close(read)
            dying(name)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            lines = said.read().splitlines()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT
        assert lines[-2] == (
            f"error: this process died while the reward own_rewards:{name} judged, for the prompt {where}: a crash in C "
            "code, os.abort() or a kill"
        )
        assert lines[-1].startswith("hint: finished work is kept") and "--resume" in lines[-1]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_plain_function_that_gives_a_coroutine_is_told_to_be_async() -> None:
    with pytest.raises(UserError, match="(?s)returned an awaitable.*async def"):
        rewards("forgotten")


def test_async_rewards_in_a_running_loop_are_refused() -> None:
    async def inside() -> None:
        rewards("async_place")

    with pytest.raises(UserError, match="one is already running in this thread"):
        asyncio.run(inside())


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        (
            "nowhere_at_all:reward",
            {},
            r"(?s)the module nowhere_at_all of the reward .* was not found.*beside the configuration",
        ),
        ("cannot_import:reward", {}, r"cannot be imported: ModuleNotFoundError: .*there_is_no_such_package"),
        ("cannot_parse:reward", {}, r"cannot be imported: SyntaxError"),
        ("a_script:reward", {}, r"a_script of the reward .* cannot be imported: SystemExit: 2"),
        ("ends_it_all:reward", {}, r"ends_it_all of the reward .* cannot be imported: SystemExit: os\._exit\(0\)"),
        ("own_rewards:lenght", {}, r"own_rewards\.py\) has no lenght"),
        ("own_rewards:constant", {}, r"own_rewards:constant is not a function, but int 3"),
        (
            "own_rewards:too_few",
            {},
            r"cannot be called as function\(prompt, response_text, rollout\): too many positional",
        ),
        (
            "own_rewards:length",
            {"per_tokn": 1},
            r"rollout, per_tokn=\.\.\.\): got an unexpected keyword argument 'per_tokn'",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardFunction(path, settings)


def test_partials_have_the_file_of_their_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import own_rewards

    monkeypatch.setattr(own_rewards, "doubled", functools.partial(own_rewards.length, per_token=2.0), raising=False)
    assert rewards("doubled") == [2, 4, 6]
    assert RewardFunction("own_rewards:doubled").digest
    assert Path(own_rewards.__file__).name == "own_rewards.py"
