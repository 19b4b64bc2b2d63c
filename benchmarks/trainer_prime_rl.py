"""What prime-rl's own code makes of recipes/prime-rl and of our loss, as JSON. Run by other_trainers.py, in an environment
with torch and what prime-rl's configuration needs (prime-pydantic-config, renderers, verifiers, beartype, loguru, wandb);
neither vLLM nor a GPU.

    python benchmarks/trainer_prime_rl.py CHECKOUT OUT.json

Its RLConfig reads the recipe's file, without the task, which is a package of its own. Its InferenceConfig makes vLLM's
arguments of it, its `setup_rl_loss_fn` imports our loss, and its `compute_loss` calls it.
"""

# B responses, T tokens

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer_world import World, compared, methods_of

from sparroll import files
from sparroll.corrections import correction, names
from sparroll.corrections.sparse_rl_released import SparseRLReleased

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "prime-rl" / "rl.toml"


def fields_of(kind: Any) -> list[dict[str, Any]]:
    """The fields of a dataclass in their order, and which of them may be left out."""
    return [
        {"name": field.name, "optional": field.default is not dataclasses.MISSING} for field in dataclasses.fields(kind)
    ]


def loss_of(name: str, metrics: dict[str, Tensor]) -> Any:
    """The loss of prime-rl's `compute_loss`, with ours in it, summed over the tokens. The step's metrics are left in
    `metrics`."""
    from prime_rl.configs.trainer import CustomLossConfig  # type: ignore[import-not-found]
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn  # type: ignore[import-not-found]

    path = recipe()["trainer"]["loss"]["import_path"]
    ours = setup_rl_loss_fn(CustomLossConfig(import_path=path, kwargs={"correction": name}))

    def theirs(now_BT: Tensor, world: World) -> Tensor:
        lengths = [int(count) for count in world.mask_BT.sum(dim=1)]
        parts = {
            "trainer_logprobs": now_BT,
            "inference_logprobs": world.sparse_BT,
            "advantages": world.advantage_B[:, None].expand_as(now_BT),
            "loss_mask": world.mask_BT,
        }
        packed = {part: [row[:length] for row, length in zip(of, lengths, strict=True)] for part, of in parts.items()}
        streams = dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
        loss, said = compute_loss(**packed, **streams, rl_loss_fn=ours, rl_scale=1, ce_scale=1, ref_kl_scale=1)
        metrics.update(said)
        return loss

    return theirs


def recipe() -> dict[str, Any]:
    return tomllib.loads(RECIPE.read_text(encoding="utf-8"))


def main(checkout: Path, out: Path) -> None:
    sys.path[:0] = [str(checkout / "src"), str(checkout / "packages" / "prime-rl-configs" / "src")]
    from prime_rl.configs.rl import RLConfig  # type: ignore[import-not-found]
    from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

    asked = recipe()
    # Its environment is a package that would have to be installed.
    del asked["orchestrator"]["train"]["source"]
    read = RLConfig(**asked)
    # What was read has been filled in place.
    engine = recipe()["inference"]["vllm"]
    arguments = vars(read.inference.to_namespace())
    usable = [each for each in names() if not correction(each).needs]
    usable = [each for each in usable if not isinstance(correction(each), SparseRLReleased)]
    metrics: dict[str, Tensor] = {}
    rows = [compared(each, {"correction": each}, loss_of(each, metrics)) for each in usable]
    workers = checkout / "src" / "prime_rl" / "inference" / "vllm" / "worker"
    extensions = {
        "filesystem.py": "FileSystemWeightUpdateWorker",
        "nccl.py": "NCCLWeightUpdateWorker",
        "nixl.py": "NIXLWeightUpdateWorker",
    }
    files.write_json(
        out,
        {
            "loss_inputs": fields_of(LossInputs),
            "loss_outputs": fields_of(LossOutputs),
            "loss": read.trainer.loss.model_dump(),
            "asked": engine,
            "arguments": {name: arguments[name] for name in (*engine, "logprobs_mode")},
            "data_parallel_size": arguments["data_parallel_size"],
            "sampling": read.orchestrator.train.sampling.to_sampling_args(),
            "corrections": rows,
            "metrics_are_floats": all(of.dtype == torch.float32 and of.dim() == 1 for of in metrics.values()),
            "worker_methods": sorted(
                {m for file, name in extensions.items() for m in methods_of(workers / file, [name])}
            ),
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
