"""What SkyRL's own code makes of the settings in docs/other-trainers.md, as JSON. Run by other_trainers.py, in an
environment with vLLM for CPU, Ray and what SkyRL imports (cloudpathlib, zstandard, loguru, jaxtyping); no GPU.

    python benchmarks/trainer_skyrl.py CHECKOUT OUT.json

Its command line is read by its own configuration, its `build_vllm_cli_args` makes vLLM's arguments of it, and its policy
loss runs under each of its corrections that we name. vLLM 0.32 has moved a module that SkyRL, which is written for 0.26,
imports; it is given under the old name.
"""

# B responses, T tokens

from __future__ import annotations

import importlib
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions
from torch import Tensor
from trainer_world import World, compared, methods_of

from sparroll import files

ENGINE = "generator.inference_engine.engine_init_kwargs"
PREFIX = "trainer.algorithm.off_policy_correction"
CORRECTIONS: dict[str, dict[str, str]] = {
    "tis": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": "2.0"},
    "seq_tis": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": "2.0"},
    "icepop": {
        "token_mask_is_threshold_low": "0.5",
        "token_mask_is_threshold_high": "5.0",
        "tis_ratio_type": "token",
        "token_tis_ratio_clip_high": "5.0",
    },
    "mis": {
        "sequence_mask_metric": "product",
        "product_mask_low": "0.5",
        "product_mask_high": "2.0",
        "tis_ratio_type": "sequence",
        "sequence_tis_ratio_clip_high": "2.0",
    },
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": "0.9", "geo_mask_high": "1.1"},
    "veto": {"outlier_token_is_threshold_low": "1e-4"},
}
"""Ours -> SkyRL's settings for the same, as the page gives them."""


def asked(name: str = "tis") -> list[str]:
    """The words of the command line on the page, with one of the corrections."""
    words = [
        f"{ENGINE}.additional_config.sparroll.schedule=qwen3-4b-0.86",
        f"{ENGINE}.logprobs_mode=processed_logprobs",
    ]
    return words + [f"{PREFIX}.{key}={value}" for key, value in CORRECTIONS[name].items()]


def loss_of(config: Any) -> Any:
    """SkyRL's policy loss under a configuration, summed over the tokens."""
    losses = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")

    def theirs(now_BT: Tensor, world: World) -> Tensor:
        loss: Tensor = losses.ppo_policy_loss(
            now_BT,
            world.dense_BT,
            world.advantage_B[:, None].expand_as(now_BT),
            config.trainer.algorithm,
            world.mask_BT.float(),
            world.sparse_BT,
        )[0]
        return loss

    return theirs


def main(checkout: Path, out: Path) -> None:
    sys.path[:0] = [str(checkout), str(checkout / "skyrl-gym")]
    if sys.version_info < (3, 12):
        # pydantic takes no other one there.
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[attr-defined, misc]
    sys.modules["vllm.entrypoints.openai.cli_args"] = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    configuration = importlib.import_module("skyrl.train.config").SkyRLTrainConfig
    servers = checkout / "skyrl" / "backends" / "skyrl_train" / "inference_servers"
    utils = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.utils")
    engines = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.engine_utils")
    read = configuration.from_cli_overrides(asked())
    arguments = vars(utils.build_vllm_cli_args(read))
    rows = [
        compared(name, settings, loss_of(configuration.from_cli_overrides(asked(name))))
        for name, settings in CORRECTIONS.items()
    ]
    extension = {
        "new_inference_worker_wrap.py": "NewInferenceWorkerWrap",
        "layerwise_reload.py": "LayerwiseReloadWorkerMixin",
    }
    files.write_json(
        out,
        {
            "asked": asked(),
            "arguments": {name: arguments[name] for name in ("additional_config", "logprobs_mode")},
            "data_parallel_size": arguments["data_parallel_size"],
            "sampling": engines.get_vllm_sampling_params(read.generator.sampling_params),
            "corrections": rows,
            "worker_methods": sorted(
                {m for file, name in extension.items() for m in methods_of(servers / file, [name])}
            ),
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
