"""A sweep's folder: settings, dense rollouts, and a pair of files for each measurement. After a kill at any moment,
each measurement is either complete or absent.

    OUT/settings.json                   what is measured and how; a resumed sweep must have the same settings
    OUT/rollouts.safetensors            the dense rollouts
    OUT/NAME.safetensors, OUT/NAME.json one measurement: its statistics, and its table as JSON, which is written last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sparroll import files
from sparroll.calibrate.check_figures import CheckFigures
from sparroll.calibrate.measure import Measurement, Study, digest
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.divergence import Divergence
from sparroll.progress import OnProgress, Stages
from sparroll.resume import begin_or_resume, refuse_results_of_nothing
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TopK

FORMAT = 2
"""Measurements of format 1 hold no KL."""


class Store:
    """The folder of one sweep. Opening it checks the settings, and removes unfinished files that a kill left behind.

    shared: whether other processes write to the folder at the same time; then unfinished files are left alone.
    """

    def __init__(self, out: Path | str, settings: Mapping[str, Any], *, shared: bool = False):
        self.folder = files.output_folder(out)
        path = self.folder / "settings.json"
        begun = holds_measurements(self.folder)
        refuse_results_of_nothing(path, begun)
        if begun:
            _check_format(path)
        begin_or_resume(path, {"format": FORMAT, **settings}, begun=begun or shared)
        if not shared:
            files.remove_unfinished(self.folder)

    def load(self, name: str) -> Measurement | None:
        """The finished measurement of that name; None if there is none."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        table = files.read_table(path, _again(path))
        try:
            schedule = table["schedule"]
            return Measurement(
                schedule=None if schedule is None else Schedule.from_table(schedule, table["name"]),
                statistics=TailStatistics.from_state(_load_tensors(path.with_suffix(".safetensors"))),
                estimator=table["tail"]["estimator"],
                kv_read_share=table["kv_read_share"],
                mode=table["mode"],
                seed=table["seed"],
                wall_seconds=table["wall_seconds"],
                checked=CheckFigures.from_table(table["checked"]) if "checked" in table else None,
                divergence=Divergence.from_table(table["divergence"]) if "divergence" in table else None,
            )
        except (KeyError, TypeError) as error:
            raise _damaged(path, f"it lacks {error}") from None

    def save(self, name: str, measurement: Measurement) -> Path:
        """Write a finished measurement in the place of an older one. Returns the path of its JSON file."""
        # The older one's table must not stand beside the new statistics.
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        _write_tensors(self.folder / f"{name}.safetensors", measurement.statistics.state())
        return files.write_json(self.folder / f"{name}.json", measurement_table(measurement))

    def ceiling(self, study: Study, on_progress: OnProgress | None) -> Measurement:
        """The study's dense ceiling and its dense rollouts, read from the folder, or made and saved now."""
        if study.rollouts is None:
            study.rollouts = self.load_rollouts()
        found = self.load("dense")
        if found is None and study.settings.estimator == "exact":
            # Whole distributions are not kept, so these rollouts are scored while they are sampled.
            found = study.ceiling(on_progress)
            self.save_rollouts(study.dense_rollouts())
            self.save("dense", found)
        if found is None:
            stages = Stages(on_progress, 2)
            self.save_rollouts(study.dense_rollouts(stages.next("dense rollouts")))
            found = study.ceiling(stages.next("scores"))
            self.save("dense", found)
        return found

    def measured(self, name: str, measure: Callable[[], Measurement]) -> Measurement:
        """The measurement of that name, read from the folder, or made and saved now."""
        found = self.load(name)
        if found is None:
            found = measure()
            self.save(name, found)
        return found

    def load_rollouts(self) -> list[Rollout] | None:
        """The dense rollouts; None if none were saved yet."""
        path = self.folder / "rollouts.safetensors"
        return rollouts_from(_load_tensors(path)) if path.exists() else None

    def save_rollouts(self, rollouts: list[Rollout]) -> None:
        _write_tensors(self.folder / "rollouts.safetensors", rollout_tensors(rollouts))


def measured_all(
    study: Study, asked: Mapping[str, Schedule], stages: Stages, store: Store | None = None
) -> dict[str, Measurement]:
    """The measurements of these schedules, by the names under which the folder keeps them: read from there, or made and kept
    now, as many at a time as the study samples together. Without a store none is kept. Each takes one of the stages."""
    found = {name: None if store is None else store.load(name) for name in asked}
    missing = [name for name, measurement in found.items() if measurement is None]
    for _ in range(len(asked) - len(missing)):
        stages.next("measured before")
    while missing:
        first = asked[missing[0]]
        alike = [name for name in missing if asked[name].kind == first.kind]
        # Of the engine that will sample them: another one may hold fewer.
        names = alike[: study.schedules_at_once(first)]
        missing = [name for name in missing if name not in names]
        together = [asked[name] for name in names]
        progress = stages.next(_in_words(together), len(names))
        for name, measurement in zip(names, study.measure_together(together, on_progress=progress), strict=True):
            if store is not None:
                store.save(name, measurement)
            found[name] = measurement
    measured = {name: measurement for name, measurement in found.items() if measurement is not None}
    assert measured.keys() == asked.keys(), "a schedule was left out"
    return measured


def _in_words(schedules: Sequence[Schedule]) -> str:
    """What is measured, for a progress bar."""
    first, last = schedules[0], schedules[-1]
    what = first.name if len(schedules) == 1 else f"{len(schedules)} schedules, {first.name} to {last.name}"
    check = first.check
    return what if check is None else f"{what}, windows of {check.window_tokens}, floor {check.floor:g}"


def holds_measurements(out: Path | str) -> bool:
    """Whether a sweep that was begun in the folder has kept anything, which another call does not sample again."""
    return any(Path(out).glob("*.safetensors"))


def fingerprint(study: Study) -> dict[str, Any]:
    """What must be the same for the measurements of two calls to belong together."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in study.scorer.model.parameters()}
    return {
        "engine": study.engine.kind,
        # The same values in bf16 and in fp32 have the same digest, but give other results.
        "dtype": sorted(dtypes),
        **study.settings.table(),
        "prompts": digest([prompt if isinstance(prompt, str) else list(prompt) for prompt in study.prompts]),
        "rollouts": study.given_rollouts,
        "weights": weights_digest(study.scorer.model),
    }


def weights_digest(model: nn.Module) -> str:
    """A short digest of a model's weights: of names, shapes and up to 64 evenly spaced values of every tensor."""
    seen = []
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, max(len(flat) - 1, 0), min(64, len(flat)), dtype=torch.float64).long()
        seen.append([name, list(tensor.shape), flat[places.to(flat.device)].double().tolist()])
    return digest(seen)


def measurement_table(measurement: Measurement) -> dict[str, Any]:
    """A measurement as plain data."""
    return {
        "name": measurement.name,
        "schedule": measurement.schedule.table() if measurement.schedule else None,
        "mode": measurement.mode,
        "seed": measurement.seed,
        "kv_read_share": measurement.kv_read_share,
        "wall_seconds": round(measurement.wall_seconds, 3),
        "tail": measurement.tail().table(),
        **({"checked": measurement.checked.table()} if measurement.checked else {}),
        **({"divergence": measurement.divergence.table()} if measurement.divergence else {}),
    }


def rollout_tensors(rollouts: list[Rollout]) -> dict[str, Tensor]:
    """Dense rollouts as flat tensors, with everything that scoring and the statistics read."""
    tensors = {
        "prompt_ids": torch.tensor([token for r in rollouts for token in r.prompt_ids]),
        "response_ids": torch.tensor([token for r in rollouts for token in r.response_ids]),
        "sparse_logp": torch.cat([r.sparse_logp for r in rollouts]),
        "numbers": torch.tensor([_numbers(rollout) for rollout in rollouts]),
    }
    lists = [rollout.top_k for rollout in rollouts if rollout.top_k is not None]
    if lists and len(lists) == len(rollouts):
        all_lists = TopK.cat(lists)
        tensors |= {"top_k_ids": all_lists.ids, "top_k_logp": all_lists.logp}
    return tensors


def _numbers(rollout: Rollout) -> list[int]:
    lengths = [len(rollout.prompt_ids), len(rollout.response_ids)]
    place = [rollout.prompt_index, rollout.sample_index, rollout.seed, rollout.weight_version]
    return [*lengths, *place, int(rollout.finish_reason == "stop")]


def rollouts_from(tensors: Mapping[str, Tensor]) -> list[Rollout]:
    """The inverse of `rollout_tensors`."""
    numbers = tensors["numbers"].tolist()
    prompts = tensors["prompt_ids"].split([row[0] for row in numbers])
    lengths = [row[1] for row in numbers]
    responses, logp = tensors["response_ids"].split(lengths), tensors["sparse_logp"].split(lengths)
    lists: list[TopK] | list[None] = [None] * len(numbers)
    if "top_k_ids" in tensors:
        lists = TopK(tensors["top_k_ids"], tensors["top_k_logp"]).split(lengths)
    rollouts = []
    for place, (_, _, prompt_index, sample_index, seed, version, stopped) in enumerate(numbers):
        rollouts.append(
            Rollout(
                prompt_ids=prompts[place].tolist(),
                response_ids=responses[place].tolist(),
                sparse_logp=logp[place],
                finish_reason="stop" if stopped else "length",
                prompt_index=prompt_index,
                sample_index=sample_index,
                seed=seed,
                weight_version=version,
                top_k=lists[place],
            )
        )
    return rollouts


def _check_format(path: Path) -> None:
    """Raise UserError where the folder's measurements are of another format: they lack figures, or have unknown ones."""
    found = files.read_table(path, "choose another folder with --out").get("format")
    if found != FORMAT:
        raise UserError(
            f"{path.parent} holds measurements of format {found}, and this sparroll reads format {FORMAT}, in which they "
            "have the KL, too",
            "choose another folder with --out; they cannot be continued",
        )


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"cannot read {path}: {reason}", _again(path))


def _again(path: Path) -> str:
    """What to do about a damaged file. A measurement is made anew where its table is missing; the rollouts have none."""
    table = path.with_suffix(".json")
    return f"delete {table if table.exists() else path} to measure it again"


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    files.write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
