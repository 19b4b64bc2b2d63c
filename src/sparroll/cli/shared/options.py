"""How the help of every verb is laid out, and the options that have the same name and meaning in several of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sparroll.calibrate.defaults import BATCH, BATCH_TOGETHER
from sparroll.cli.shared import common
from sparroll.draft_check import LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS, DraftCheck
from sparroll.errors import UserError
from sparroll.progress import say
from sparroll.types import LARGEST_SEED, MOST_SAMPLES

MODEL, PROMPTS, SAMPLING = "Model and device", "Prompts", "Sampling"
READING, MEASURING, RUN, OUTPUT = "What a decode step reads", "Measuring", "The run", "Output"
GROUPS = ("Arguments", MODEL, PROMPTS, SAMPLING, READING, MEASURING, RUN, OUTPUT, "Options")
"""The headings of a verb's options, in the order of the help. Options without one are under "Options"."""


PATHS = {
    "--out": "--out runs/mine; the current folder is --out .",
    "--run": "--run runs/mine",
    "--adapter": "--adapter runs/mine/adapter",
    "--config": "--config train.toml",
    "--prompts": "--prompts prompts.jsonl",
    "--mirror": "--mirror sets",
}
"""Options that take a path, with an example of each. A schedule may also be a preset, and no preset is called \"\"."""


def option(group: str, *names: str, **settings: Any) -> Any:
    """A typer option that the help has under this heading."""
    return typer.Option(*names, rich_help_panel=group, **settings)


class Verb(TyperCommand):
    """A command whose help has its options under headings, and whose summary in the list of verbs is never cut."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses an empty path, such as --out "" from an unset variable of a shell script, which Python would take for
        the current folder."""
        for word, following in itertools.pairwise([*args, None]):
            name = (word or "").removesuffix("=")
            if name in PATHS and (word != name or following == ""):
                raise UserError(f"{name} is empty", f"name a path, such as {PATHS[name]}")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Says a word where Ctrl-C came before or after the work that has words of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            if not getattr(stop, "__notes__", None):
                say(common.interrupted())
            raise typer.Exit(130) from None

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence of the command's docstring."""
        words = " ".join((self.help or "").split())
        return f"{words.partition('. ')[0].removesuffix('.')}."

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, parameters in grouped(self.get_params(ctx)).items():
            rows = [record for record in (each.get_help_record(ctx) for each in parameters) if record is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def grouped(parameters: list[Any]) -> dict[str, list[Any]]:
    """The options and arguments of a verb under their headings, in the order of GROUPS."""
    found: dict[str, list[Any]] = {heading: [] for heading in GROUPS}
    for parameter in parameters:
        other = "Arguments" if parameter.param_type_name == "argument" else "Options"
        found[getattr(parameter, "rich_help_panel", None) or other].append(parameter)
    return {heading: members for heading, members in found.items() if members}


# -- options -------------------------------------------------------------------------------------------------------------

Json = Annotated[bool, option(OUTPUT, "--json", help="Print the result as JSON, and nothing else, on standard output.")]
Out = Annotated[Path, option(OUTPUT, "--out", help="Folder for the results; created if missing.")]
RunOut = Annotated[
    Path | None,
    option(OUTPUT, "--out", help="Folder for the results; created if missing. Needed unless --print-config is given."),
]
PrintConfig = Annotated[
    bool,
    option(OUTPUT, "--print-config", help="Print every setting as TOML (with --json as JSON), and run nothing."),
]
Model = Annotated[str, option(MODEL, "--model", help="tiny-reasoner, a folder, or a name on the Hugging Face hub.")]
Engine = Annotated[
    str, option(MODEL, "--engine", help="Who samples. hf: transformers. vllm: vLLM, which must be installed.")
]
Device = Annotated[
    str | None, option(MODEL, "--device", help="cpu, cuda or cuda:1; default: cuda if there is one, else cpu.")
]
Dtype = Annotated[
    str | None, option(MODEL, "--dtype", help="Precision of the weights: fp32, bf16 or fp16; default: as stored.")
]
Adapter = Annotated[
    Path | None,
    option(MODEL, "--adapter", help="Folder of a LoRA adapter for sparse responses, made by distill or train."),
]
MaxBatch = Annotated[int, option(MODEL, "--max-batch", min=1, help="Responses that decode together.")]
MeasuredBatch = Annotated[
    int | None,
    option(
        MODEL,
        "--max-batch",
        min=1,
        help=f"Responses that decode together; default: {BATCH}, or {BATCH_TOGETHER} with vLLM where no drafts are checked, "
        "so that several budgets or schedules are sampled together.",
    ),
]
Prompts = Annotated[
    Path | None,
    option(
        PROMPTS,
        "--prompts",
        help="One prompt per line (.txt), or rows with the key `prompt` (JSONL, JSON, CSV, Parquet).",
    ),
]
Task = Annotated[str | None, option(PROMPTS, "--task", help="Take prompts of a built-in task, e.g. synthetic.")]
Level = Annotated[int, option(PROMPTS, "--level", min=0, help="Difficulty of the task's prompts.")]
Count = Annotated[
    int, option(PROMPTS, "--count", min=1, help="How many prompts to take of the task, or at most of the file.")
]
Chat = Annotated[
    bool, option(PROMPTS, "--chat", help="Put each text prompt into the model's chat template as a user message.")
]
Thinking = Annotated[
    bool | None,
    option(
        PROMPTS,
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template, on or off; default: the template's own.",
    ),
]
PromptTemplate = Annotated[
    str | None,
    option(
        PROMPTS,
        "--prompt-template",
        help="Name of a packaged template, or a file; default: the one that fits each row.",
    ),
]
Mirror = Annotated[
    Path | None,
    option(PROMPTS, "--mirror", help="Folder with copies of hub sets; default: the hub and its cache."),
]
Samples = Annotated[int, option(SAMPLING, "--samples", min=1, max=MOST_SAMPLES, help="Rollouts per prompt.")]
MaxNewTokens = Annotated[int, option(SAMPLING, "--max-new-tokens", min=1, help="Longest response, in tokens.")]
Temperature = Annotated[
    float,
    option(
        SAMPLING, "--temperature", min=0, help="Temperature of all policies that are sampled or compared; 0 is greedy."
    ),
]
TopP = Annotated[
    float,
    option(
        SAMPLING,
        "--top-p",
        min=0,
        max=1,
        help="Draw from the fewest most likely tokens with at least this mass; 1: from all.",
    ),
]
Seed = Annotated[int, option(SAMPLING, "--seed", min=0, max=LARGEST_SEED, help="The same seed gives the same result.")]
OneSchedule = Annotated[
    str | None, option(READING, "--schedule", help="A preset or a schedule file; default: dense, the whole context.")
]
OneBudget = Annotated[
    int | None,
    option(READING, "--budget", min=1, help="A fixed KV budget in tokens, instead of a schedule."),
]
ForceSchedule = Annotated[
    bool, option(READING, "--force-schedule", help="Use a schedule although it was made for another model.")
]
CheckWindow = Annotated[
    int | None,
    option(
        READING,
        "--check-window",
        min=LEAST_WINDOW_TOKENS,
        max=MOST_WINDOW_TOKENS,
        help="Verify rollouts: the dense policy checks windows of so many tokens. Default: as the schedule says, or "
        f"{DraftCheck.window_tokens} with --check-floor.",
    ),
]
CheckFloor = Annotated[
    float | None,
    option(
        READING,
        "--check-floor",
        help="No token is more than log(1 / floor) nats less likely under the dense policy; 1: exactly the dense policy. "
        f"Default: as the schedule says, or {DraftCheck.floor} with --check-window.",
    ),
]
CompressionKind = Annotated[
    str | None, option(READING, "--compression", help="Drop tokens from the KV cache: r_kv, snap_kv or streaming.")
]
CompressionSet = Annotated[
    list[str] | None,
    option(READING, "--compression-set", help="A setting of the compression, e.g. budget_tokens=256; repeatable."),
]
SelectorKind = Annotated[
    str,
    option(
        READING,
        "--selector",
        help="page_mean, quest, head_softmax, streaming, ..., or with settings: quantized_mean,page_tokens=4,bits=4.",
    ),
]
PageTokens = Annotated[
    int,
    option(READING, "--page-tokens", min=1, max=128, help="Tokens in a page, which are read or left out together."),
]
FirstTokens = Annotated[
    int | None,
    option(
        READING,
        "--first-tokens",
        min=0,
        help="First tokens of a context that are always read; default: 16, in whole pages.",
    ),
]
RecentTokens = Annotated[
    int | None,
    option(
        READING,
        "--recent-tokens",
        min=0,
        help="Last tokens of a context that are always read; default: 32, in at least two whole pages.",
    ),
]
DenseLayers = Annotated[
    str,
    option(
        READING, "--dense-layers", help="Layers that always read the whole context, e.g. 0,1; none: all are sparse."
    ),
]
Mode = Annotated[
    str,
    option(
        MEASURING,
        "--mode",
        help="faithful: generate with every budget. replay: read one set of dense rollouts again, which is cheaper.",
    ),
]
Estimator = Annotated[
    str,
    option(
        MEASURING, "--estimator", help="top_k_lower (the published scale), top_k_upper, exact (small vocabularies)."
    ),
]
BinTokens = Annotated[int, option(MEASURING, "--bin-tokens", min=1, help="Width of the context-length bins.")]
