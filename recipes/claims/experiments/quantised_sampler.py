"""A sampler whose weights are rounded to 8 bits, as another source of mismatch: the same statistics, alone and beside
sparse attention, and what it does to training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import SamplerMaker, opened, run_mean, sampled, scorer_of, tokens_of, trained
from claim_tasks import DENSE, ClaimTask, budget
from claim_tokens import intervals
from torch import Tensor
from transformers import PreTrainedModel

NAME = "quantised-sampler"
ABOUT = (
    "How far is a sampler with weights in 8 bits from the policy, by the statistics that sparse attention is judged by?"
)
FORMATS = ("int8", "fp8", "int4")


class Rounded:
    """A policy's weights as a sampler with fewer bits has them: what the engine computes with after it has scaled them
    back. Matrices only, embeddings and the output head stay; each output row has a scale of its own."""

    def __init__(self, policy: PreTrainedModel, form: str):
        self.policy, self.form = policy, form

    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        kept = {id(self.policy.get_input_embeddings().weight), id(self.policy.get_output_embeddings().weight)}
        matrices = {name for name, each in self.policy.named_parameters() if each.dim() == 2 and id(each) not in kept}
        return {
            name: rounded(each.detach(), self.form) if name in matrices else each.detach()
            for name, each in self.policy.state_dict().items()
        }


def rounded(weight_OI: Tensor, form: str) -> Tensor:
    """The nearest values that the format has, with one scale a row: int8 and int4 are symmetric, fp8 is e4m3.

    >>> rounded(torch.tensor([[1.0, -0.5, 0.2]]), "int4")
    tensor([[ 1.0000, -0.5714,  0.1429]])
    """
    most = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[form]
    scale_O1 = weight_OI.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / most
    scaled_OI = weight_OI.float() / scale_O1
    values_OI = scaled_OI.to(torch.float8_e4m3fn).float() if form == "fp8" else scaled_OI.round()
    return (values_OI * scale_O1).to(weight_OI.dtype)


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    """Measurements of all formats with dense and sparse attention, once whatever seeds are asked for, and runs of the
    first format."""
    made = []
    for task in tasks[-1:] if tasks[0].toy else tasks:
        for form in FORMATS[:1] if task.toy else (None, *FORMATS):
            about = {"task": task.name, "does": "measure", "form": form}
            made.append(Cell(f"{task.name}-{form or 'whole'}", about))
    for seed in seeds:
        for task in tasks[-1:] if tasks[0].toy else tasks:
            for attention, reading in (("dense", DENSE), ("sparse", budget(task.middle_budget))):
                for form in FORMATS[:1] if task.toy else (None, *FORMATS[:1]):
                    if task.toy and attention == "sparse":
                        continue
                    about = {
                        "task": task.name,
                        "does": "train",
                        "form": form,
                        "attention": attention,
                        "reading": reading,
                    }
                    made.append(Cell(f"{task.name}-{attention}-{form or 'whole'}-{seed}", about, seed))
    return made


def run(cell: Cell, place: Place) -> Table:
    form = cell.config["form"]
    if cell.config["does"] == "train":
        sampler: SamplerMaker | None = None if form is None else lambda policy: Rounded(policy, form)
        return trained(place, cell.config["reading"], cell.seed, correction={"name": "tis"}, sampler=sampler)[1]
    task, rows = place.task, []
    readings = [DENSE, *(budget(each) for each in (task.low_budget, task.middle_budget))]
    scorer = scorer_of(task, task.model)
    with opened(task, task.model, readings) as engine:
        if form is not None:
            engine.load_weights(Rounded(scorer.model, form).merged(), engine.weight_version + 1)
        for reading in readings[:1] if task.toy else readings:
            tokens = tokens_of(scorer, task, sampled(engine, task, reading, cell.seed))
            bins = {start: intervals(each)["q05"] for start, each in tokens.bins(task.bin_tokens).items()}
            rows.append({"budget": reading.get("kv_budget_tokens"), "statistics": intervals(tokens), "bins": bins})
    return {"rows": rows}


def results(done: Sequence[Done]) -> Table:
    """All measurements, and a line per task, attention and format of what was trained."""
    measured = [
        {"task": each["task"], "form": each["form"], **row}
        for each in done
        if each["does"] == "measure"
        for row in each.result["rows"]
    ]
    lines = []
    runs = [each for each in done if each["does"] == "train"]
    kinds = grouped(runs, lambda each: (each["task"], each["attention"], each["form"]))
    for (task, attention, form), of in kinds.items():
        gains = [each.result["accuracy_change"] for each in of]
        whole = [each.result["accuracy_change"] for each in kinds.get((task, attention, None), [])]
        line = {"task": task, "attention": attention, "form": form, "accuracy_change": over_seeds(gains)}
        line["against_whole_weights"] = None if form is None else difference(whole, gains)
        for name in ("q05", "mean", "over_2_nats", "over_10_nats", "kl"):
            line[name] = over_seeds([run_mean(each.result, f"claims/{name}") for each in of])
        lines.append(line)
    return {"measured": measured, "lines": lines}
