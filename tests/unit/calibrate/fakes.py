"""An engine and a scorer whose acceptance follows a known law: enough of both protocols to test what measures with them."""

from __future__ import annotations

import torch
from torch import nn

from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.sampling import request_seed
from sparroll.plan.check_rate import drafts_per_token
from sparroll.schedule import Schedule
from sparroll.types import Checks, Rollout, TokenScores, TopK

LAYERS = 4
CEILING = 0.97
GROUP_SHARES = (0.9, 0.1)
"""How much of what a budget loses is lost in each of two groups of layers."""
NOTHING = float("-inf")
DENSE_ELSEWHERE = -30.0
"""Log-probability of every token but 0 under the dense policy, which is certain of 0."""


def law(context_T, schedule):
    """Acceptance: the ceiling where the context is read whole, else it falls with context over budget."""
    if schedule is None:
        return torch.full(context_T.shape, CEILING)
    if schedule.layer_groups:
        lost = [CEILING - law(context_T, group) for group in schedule.groups]
        return CEILING - sum(share * each for share, each in zip(GROUP_SHARES, lost, strict=True))
    budget_T = schedule.kv_budget_tokens(context_T)
    return torch.where(context_T <= budget_T, CEILING, CEILING - 0.1 * (context_T / budget_T - 1)).clamp_min(0.0)


def jitter(rollout_seed, tokens):
    generator = torch.Generator().manual_seed(rollout_seed)
    return 0.02 * (torch.rand(tokens, generator=generator) - 0.5)


def lists(acceptance_T):
    """A sparse top-2 list that shares exactly this mass with the dense list {0: 1}."""
    ids = torch.tensor([[0, 2]]).expand(len(acceptance_T), 2)
    return TopK(ids, torch.stack([acceptance_T.log(), (1 - acceptance_T).log()], 1).float())


def read_share(schedule):
    """Of the context, as the engine and its rollouts say it."""
    return 1.0 if schedule is None else min(1.0, schedule.steps[0].budgets[0] / 1000)


class FakeEngine:
    """Rollouts of 50 to 400 tokens, drawn from seed, prompt and sample."""

    def __init__(self):
        self.kind = "hf"
        self.most_schedules, self.max_batch, self.cache_tokens = 1, 64, None
        self.schedule = None
        self.compression = None
        self.weight_version = 0
        self.vocabulary = 3
        self.generated = []
        """(schedule name, seed) of each call."""
        self.fail = False

    def set_schedule(self, schedule):
        self.schedule = schedule

    def set_compression(self, compression):
        self.compression = compression

    def reset_report(self):
        self._report = EngineReport("fake", "fake", None, 0)

    def report(self):
        return self._report

    def generate(
        self,
        prompts,
        n=1,
        *,
        max_new_tokens,
        temperature=1.0,
        stop_ids=None,
        seed=0,
        top_k=0,
        schedules=None,
        on_progress=None,
    ):
        if schedules is None:
            self.generated.append((self.schedule.name if self.schedule else None, seed))
        else:
            self.generated.append((tuple(dict.fromkeys(each.name for each in schedules)), seed[0]))
            assert self.schedule is not None and len(schedules) == len(prompts) * n <= self.max_batch
        if self.fail:
            raise RuntimeError("the engine broke")
        own = schedules or [self.schedule] * (n * len(prompts))
        rollouts = [
            self._rollout(
                prompt, index, sample, _own(seed, index, sample, n), max_new_tokens, top_k, own[index * n + sample]
            )
            for index, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        contexts = sum(int(r.context_tokens.sum()) for r in rollouts)
        read = int(contexts * read_share(self.schedule))
        self._report.layers = [LayerReport(context_tokens=contexts, read_tokens=read)] * LAYERS
        if on_progress:
            on_progress(len(rollouts), len(rollouts))
        return rollouts

    def _rollout(self, prompt, index, sample, own, max_new_tokens, top_k, schedule):
        tokens = min(max_new_tokens, 50 + (own * 7919) % 351)
        context_T = len(prompt) + torch.arange(tokens)
        acceptance_T = (law(context_T, schedule) + jitter(own, tokens)).clamp(0.01, 0.999)
        check = schedule.check if schedule else None
        checked = checked_fields(acceptance_T, check, own) if check else {}
        acceptance_T = checked.pop("acceptance_T", acceptance_T)
        return Rollout(
            prompt_ids=list(prompt),
            response_ids=[0] * tokens,
            sparse_logp=acceptance_T.log(),
            finish_reason="stop" if tokens % 2 else "length",
            prompt_index=index,
            sample_index=sample,
            seed=own,
            kv_read_share=read_share(schedule),
            top_k=lists(acceptance_T) if top_k else None,
            **checked,
        )


def checked_fields(acceptance_T, check, own):
    """What a check makes of drafts: half of what they lose is taken back, one draft in ten of those that would be lost
    is rejected, and a token is far off where the drafts share less than .8."""
    tokens = len(acceptance_T)
    rejected = 0.1 * float((CEILING - acceptance_T).clamp_min(0).mean())
    windows = -(-tokens // check.window_tokens)
    cut = round(windows * (1 - (1 - rejected) ** check.window_tokens))
    taken_back = round(tokens * (drafts_per_token(rejected, check.window_tokens) - 1))
    dense = TopK(torch.tensor([[0, 1]]).expand(tokens, 2), torch.tensor([[0.0, NOTHING]]).expand(tokens, 2))
    kept_T = acceptance_T + (CEILING - acceptance_T).clamp_min(0) / 2
    return {
        "acceptance_T": kept_T,
        "dense": TokenScores(kept_T.log() - torch.where(acceptance_T < 0.8, 2.5, 0.0), dense),
        "draft_acceptance": acceptance_T,
        "checks": Checks(windows, cut, tokens + taken_back - cut, taken_back),
    }


def _own(seed, index, sample, n):
    """A number for one rollout, from its seed as real engines derive it."""
    return (request_seed(seed, index, sample) if isinstance(seed, int) else seed[index * n + sample]) % 10_007


class FakeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))
        self.config = type("Config", (), {"num_hidden_layers": LAYERS})()


class FakeScorer:
    """Dense: everything on token 0. Sparse: the law."""

    def __init__(self):
        self.model = FakeModel()
        self.calls = []

    def dense(self, rollouts, *, temperature=1.0, top_k=0, at_ids=None, on_progress=None):
        self.calls.append("dense")
        scores = []
        for number, rollout in enumerate(rollouts):
            tokens = len(rollout.response_ids)
            certain = TopK(torch.tensor([[0, 1]]).expand(tokens, 2), torch.tensor([[0.0, NOTHING]]).expand(tokens, 2))
            asked = None if at_ids is None else torch.where(at_ids[number] == 0, 0.0, DENSE_ELSEWHERE)
            scores.append(TokenScores(torch.zeros(tokens), certain, asked))
        return scores

    def sparse(self, rollouts, schedule, *, temperature=1.0, top_k=0, on_progress=None):
        self.calls.append(schedule.name)
        accepted = [self._accepted(rollout, schedule) for rollout in rollouts]
        return [TokenScores(each.log(), lists(each)) for each in accepted]

    def exact_acceptance(self, rollouts, *, temperature=1.0, on_progress=None):
        self.calls.append("exact")
        return [rollout.top_k.logp[:, 0].exp() for rollout in rollouts]

    def exact_replay(self, rollouts, schedule, *, temperature=1.0, on_progress=None):
        self.calls.append("exact replay")
        return [self._accepted(rollout, schedule) for rollout in rollouts]

    def _accepted(self, rollout, schedule):
        noise = jitter(rollout.seed, len(rollout.response_ids))
        return (law(rollout.context_tokens, schedule) + noise).clamp(0.01, 0.999)


def study(prompts=6, samples=4, **settings):
    defaults = {"max_new_tokens": 400, "samples": samples, "bin_tokens": 100, "replicates": 40}
    return Study(
        FakeEngine(), FakeScorer(), [[1] * 20 for _ in range(prompts)], MeasureSettings(**{**defaults, **settings})
    )


FIXED = Schedule.fixed(128, dense_layers=(0,))
