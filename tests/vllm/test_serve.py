"""`vllm serve` with the arguments that `sparroll serve-args` prints, asked over HTTP: rollouts are sparse, and say so."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.engines import HFEngine
from sparroll.engines.report import EngineReport
from sparroll.engines.scoring import Scorer
from sparroll.engines.vllm import lists_route
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.models import resolve
from sparroll.types import Rollout
from vllm_runs import needs_vllm, random_prompts, serving

pytestmark = [needs_vllm, pytest.mark.slow]

PROMPT_TOKENS, NEW_TOKENS = 120, 60


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Schedule.fixed(64).save(tmp_path_factory.mktemp("serve") / "schedule.toml")


@pytest.fixture(scope="module")
def address(schedule: Path) -> Iterator[str]:
    with serving(serve_arguments(str(schedule), None, False)) as address:
        yield address


def post_for_bytes(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def post(url: str, body: dict[str, Any]) -> Any:
    text = post_for_bytes(url, body).decode()
    return json.loads(text) if text else None


def test_a_server_samples_what_the_oracle_samples_and_counts_it(address: str, schedule: Path) -> None:
    (prompt,) = random_prompts([PROMPT_TOKENS])
    post(f"{address}/collective_rpc", {"method": "sparroll_reset_report"})
    asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = post(f"{address}/v1/completions", {"model": str(resolve("tiny-reasoner")), **asked})
    reports = post(f"{address}/collective_rpc", {"method": "sparroll_report"})["results"]
    oracle = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    (expected,) = oracle.generate([prompt], max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[])
    assert expected.attention == "sparse"
    got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    torch.testing.assert_close(got, expected.sparse_logp, atol=1e-3, rtol=0)
    table = reports[0]
    report = EngineReport.from_table(table if isinstance(table, dict) else json.loads(table))
    assert report.layers == oracle.report().layers


def test_a_request_to_a_server_may_be_dense(address: str, schedule: Path) -> None:
    (prompt,) = random_prompts([PROMPT_TOKENS], seed=1)
    post(f"{address}/collective_rpc", {"method": "sparroll_reset_report"})
    asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    more: dict[bool, dict[str, Any]] = {
        True: {"vllm_xargs": {"sparroll_dense": True}, "cache_salt": "sparroll-dense"},
        False: {},
    }
    oracle = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    expected = oracle.generate(
        [prompt], n=2, max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[], dense=[True, False]
    )
    for rollout, dense in zip(expected, (True, False), strict=True):
        answer = post(f"{address}/v1/completions", {"model": str(resolve("tiny-reasoner")), **asked, **more[dense]})
        got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, rollout.sparse_logp, atol=1e-3, rtol=0)
    assert (expected[0].sparse_logp - expected[1].sparse_logp).abs().max() > 1e-2
    table = post(f"{address}/collective_rpc", {"method": "sparroll_report"})["results"][0]
    report = EngineReport.from_table(table if isinstance(table, dict) else json.loads(table))
    assert report.dense_request_steps == NEW_TOKENS - 1
    assert report.layers == oracle.report().layers


def test_what_a_server_reads_again_is_dense_and_comes_as_bytes(address: str) -> None:
    ids = random_prompts([40, 300, 512], seed=2)
    rollouts = [Rollout(each[:20], each[20:], torch.zeros(len(each) - 20), "length") for each in ids]
    asked = lists_route.scores_request(rollouts, temperature=1.0, top_k=20)
    found = lists_route.scores_of(post_for_bytes(f"{address}{lists_route.SCORES_PATH}", asked))
    expected = Scorer("tiny-reasoner", dtype=torch.float32).dense(rollouts, top_k=20)
    # The third one fills the server's context, where there is no place for the token that vLLM always samples.
    for scores, reference, tokens in zip(found, expected, (20, 280, 491), strict=True):
        assert scores.top_k is not None and reference.top_k is not None
        torch.testing.assert_close(scores.logp, reference.logp[:tokens], atol=1e-3, rtol=0)
        torch.testing.assert_close(scores.top_k.logp, reference.top_k.logp[:tokens], atol=1e-3, rtol=0)


def test_a_server_says_why_it_does_not_read_rollouts_again(address: str) -> None:
    rollouts = [Rollout([5, 6], [7], torch.zeros(1), "length")]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post_for_bytes(
            f"{address}{lists_route.SCORES_PATH}", lists_route.scores_request(rollouts, temperature=1.0, top_k=21)
        )
    assert refused.value.code == 400 and "20" in refused.value.read().decode()


@pytest.mark.parametrize("unknown", ["nonsense", "n"])
def test_a_server_says_which_sampling_field_it_does_not_take(address: str, unknown: str) -> None:
    asked = lists_route.samples_request([[5]], 1, top_k=20, dense=False, sampling={unknown: 1})
    with pytest.raises(urllib.error.HTTPError) as refused:
        post_for_bytes(f"{address}{lists_route.SAMPLES_PATH}", asked)
    said = refused.value.read().decode()
    assert refused.value.code == 400 and said.startswith("sampling: ") and f"'{unknown}'" in said


def test_samples_with_lists_come_as_bytes_sparse_or_dense(address: str, schedule: Path) -> None:
    (prompt,) = random_prompts([PROMPT_TOKENS], seed=3)
    oracle = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    flags = (False, True)
    expected = oracle.generate(
        [prompt], n=2, max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[], dense=flags, top_k=20
    )
    sampling = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    post(f"{address}/collective_rpc", {"method": "sparroll_reset_report"})
    for reference, dense in zip(expected, flags, strict=True):
        asked = lists_route.samples_request([prompt], 1, top_k=20, dense=dense, sampling=sampling)
        answer = post_for_bytes(f"{address}{lists_route.SAMPLES_PATH}", asked)
        (found,) = lists_route.samples_of(answer, [prompt], 1)
        assert found.response_ids == reference.response_ids
        torch.testing.assert_close(found.sparse_logp, reference.sparse_logp, atol=1e-3, rtol=0)
        assert found.top_k is not None and reference.top_k is not None
        torch.testing.assert_close(found.top_k.logp, reference.top_k.logp, atol=1e-3, rtol=0)
    table = post(f"{address}/collective_rpc", {"method": "sparroll_report"})["results"][0]
    report = EngineReport.from_table(table if isinstance(table, dict) else json.loads(table))
    assert report.dense_request_steps == NEW_TOKENS - 1 and report.layers == oracle.report().layers


def test_several_samples_of_a_prompt_are_drawn_apart_and_end_where_they_are_told_to(address: str) -> None:
    prompts = random_prompts([30, 50], seed=4)
    sampling = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "top_k": 0, "ignore_eos": True}
    asked = lists_route.samples_request(prompts, 3, top_k=5, dense=False, sampling=sampling)
    found = lists_route.samples_of(post_for_bytes(f"{address}{lists_route.SAMPLES_PATH}", asked), prompts, 3)
    assert [each.prompt_ids for each in found] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert len({tuple(each.response_ids) for each in found}) == 6
    assert all(len(each.response_ids) == NEW_TOKENS for each in found)
    # One of the tokens ends a response, as the last one of it.
    stop = found[0].response_ids[NEW_TOKENS // 2]
    asked["sampling"] |= {"stop_token_ids": [stop], "max_tokens": 200}
    cut = lists_route.samples_of(post_for_bytes(f"{address}{lists_route.SAMPLES_PATH}", asked), prompts, 3)
    for each in cut:
        assert stop not in each.response_ids[:-1] and (each.response_ids[-1] == stop or len(each.response_ids) == 200)
