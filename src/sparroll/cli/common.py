"""What the verbs share: options with the same name and meaning, how the help is laid out, the objects that options
name, the output folder, Ctrl-C."""

from __future__ import annotations

import itertools
import json
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sparroll import files, locks
from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.draft_check import LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS, DraftCheck
from sparroll.errors import UserError, of_machine
from sparroll.progress import quiet_transformers, say
from sparroll.schedule import Schedule, caveats_of
from sparroll.types import LARGEST_SEED, MOST_SAMPLES

if TYPE_CHECKING:
    from sparroll.engines import base
    from sparroll.tasks.reward_function import FunctionJudge
    from sparroll.train.config.base import Section

# -- how the help is laid out --------------------------------------------------------------------------------------------

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
                say(interrupted())
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
    str, option(READING, "--selector", help="page_mean, quest, head_softmax, streaming, oracle_page, ...")
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

# -- what verbs do alike -------------------------------------------------------------------------------------------------


def as_typed(command: typer.Context) -> str:
    """The command line that this process runs, as a shell would take it again."""
    return shlex.join(["sparroll", *(command.obj or [])])


def print_json(value: Any) -> None:
    """Print a result as JSON, for programs; nothing else goes to standard output."""
    from sparroll.records import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def output_folder(path: Path) -> Path:
    """The folder, created if it is missing and checked for writing before any work starts."""
    return files.output_folder(path)


def hold_folder(command: typer.Context, path: Path) -> Path:
    """The same, for a command that goes on where it was interrupted: no other process has the folder until it ends."""
    folder: Path = command.with_resource(locks.locked(path, command.command_path))
    return folder


def run_folder(path: Path | None) -> Path:
    """The folder of a training run, where --out may be missing. The run itself holds it, in one of its processes."""
    if path is None:
        raise UserError("--out is missing", "give a folder for the results, e.g. --out runs/mine")
    return output_folder(path)


def print_config(config: Section, as_json: bool) -> None:
    """Print the resolved configuration, as a file that --config reads."""
    from sparroll.train.config.file import as_toml

    if as_json:
        print_json(config)
    else:
        print(as_toml(config), end="")


def wrote(*paths: Path, quiet: bool = False) -> None:
    """Name the files that a command wrote; every long command ends with this."""
    for path in paths:
        say(f"wrote {path}", quiet=quiet)


def interrupted() -> str:
    """What is true of any command that was interrupted."""
    last = files.last_written
    if last is None:
        return "interrupted before anything was written"
    return f"interrupted: the last file that was written is {last}"


@contextmanager
def interruptible(what_is_kept: str, log: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C into exit code 130 and a line that says what is kept and how to continue. A full disk and memory that
    has run out are errors with the same line.

    log: the file of what is finished; where it is empty, the line says that nothing is."""

    def kept() -> str:
        nothing = log is not None and not (log.is_file() and log.stat().st_size)
        return "nothing was finished yet; run the same command to start again" if nothing else what_is_kept

    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        raise typer.Exit(130) from None
    except Exception as error:
        known = of_machine(error)
        if known is None:
            raise
        raise UserError(known.message, f"{known.hint}; {kept()}") from error


def refuse_idle(command: typer.Context, idle: bool, why: str, *names: str) -> None:
    """Raise UserError if the command line gives one of these options, by the names of their parameters, although they
    are idle: without effect, for this reason."""
    for each in command.command.params if idle else ():
        if each.name in names and getattr(command.get_parameter_source(each.name), "name", "") == "COMMANDLINE":
            raise UserError(f"{each.opts[0]} has no effect {why}", "leave it out")


def refuse_idle_prompt_options(command: typer.Context, prompts_file: Path | None, task: str | None) -> None:
    """Raise UserError for --level where no task has levels."""
    from sparroll.tasks import is_data

    refuse_idle(command, prompts_file is not None, "with --prompts: a file has no levels", "level")
    refuse_idle(command, task is not None and is_data(task), f"with --task {task}, which has no levels", "level")


def load_schedule(
    schedule: str | None, budget: int | None, model: str, force: bool = False, layers: int | None = None
) -> Schedule | None:
    """The schedule that --schedule or --budget names; None (dense) if neither is given."""
    if schedule is not None and budget is not None:
        raise UserError(
            "--schedule and --budget exclude each other", "--budget reads the same number of tokens at every length"
        )
    if schedule is not None:
        return Schedule.load(schedule, model=model, force=force)
    return None if budget is None else fixed_budget(budget, layers)


def say_caveats(*schedules: Schedule | None) -> None:
    """Say, before anything runs, what must be known of the schedules that a command takes."""
    for line in caveats_of(schedules):
        say(line, alarm=True)


def with_check(schedule: Schedule | None, window: int | None, floor: float | None) -> Schedule | None:
    """The schedule with the check that --check-window and --check-floor name; as it is if neither is given. What only
    one of them names is taken from the schedule's own check, or is the default."""
    if window is None and floor is None:
        return schedule
    asked = "--check-window" if window is not None else "--check-floor"
    if schedule is None:
        raise UserError(
            f"{asked} checks what is drafted under a schedule, and dense rollouts and those under a compression have no "
            "drafts",
            "add --schedule or --budget, or leave it out",
        )
    own = schedule.check or DraftCheck()
    check = DraftCheck(
        own.window_tokens if window is None else window,
        own.floor if floor is None else floor,
    )
    return schedule if check == schedule.check else schedule.checked(check.window_tokens, check.floor)


def load_compression(
    kind: str | None, settings: list[str], schedule: Schedule | None, engine: str
) -> Compression | None:
    """The policy that --compression and --compression-set name; None if neither is given."""
    if kind is None:
        if settings:
            raise UserError("--compression-set needs --compression", f"known: {', '.join(compression_kinds())}")
        return None
    if schedule is not None:
        raise UserError(
            "--compression excludes --schedule and --budget",
            "the compression has a budget itself: --compression-set budget_tokens=512",
        )
    if engine != "hf":
        raise UserError(f"--compression needs --engine hf, got {engine}", "vLLM cannot drop tokens from its cache")
    chosen = dict(_setting("--compression-set", text) for text in settings)
    if "kind" in chosen:
        raise UserError("--compression-set sets no kind", "the policy is what --compression says")
    return make_compression(kind, **chosen)


def load_judge(path: str | None, settings: list[str]) -> FunctionJudge | None:
    """The function that --reward and --reward-set name; None if neither is given."""
    from sparroll.tasks.async_calls import AsyncCalls
    from sparroll.tasks.reward_function import FunctionJudge, RewardFunction, look_in

    if path is None:
        if settings:
            raise UserError("--reward-set needs --reward", "for example --reward my_rewards:brevity")
        return None
    if ":" not in path:
        raise UserError(f"--reward takes package.module:function, got {path!r}")
    look_in(Path.cwd())
    function = RewardFunction(path, dict(_setting("--reward-set", text) for text in settings))
    return FunctionJudge(function, AsyncCalls())


def _setting(option: str, text: str) -> tuple[str, Any]:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        raise UserError(f"{option} takes name=value, got {text!r}", "for example budget_tokens=512")
    for read in (int, float, _toml):
        try:
            return name.strip(), read(raw)
        except ValueError:
            continue
    return name.strip(), raw.strip()


def _toml(raw: str) -> Any:
    """true, false, lists and quoted strings, as in a configuration. Raises ValueError for anything else."""
    return tomllib.loads(f"value = {raw}")["value"]


def layer_numbers(text: str) -> tuple[int, ...]:
    """The layers that --dense-layers names."""
    if text.strip() == "none":
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UserError(f"--dense-layers takes numbers of layers, got {text!r}", "for example 0,1, or none") from None


def fixed_budget(kv_budget_tokens: int, layers: int | None = None) -> Schedule:
    """One budget at every length. Layers 0 and 1 stay dense, as published, if the model has that many."""
    return Schedule.fixed(kv_budget_tokens, dense_layers=tuple(range(min(2, layers if layers is not None else 2))))


def load_engine(
    kind: str,
    model: str,
    schedule: Schedule | None,
    device: str | None,
    max_batch: int = 64,
    capacity: Schedule | None = None,
    gpu_memory_share: float = 0.85,
    dtype: str | None = None,
) -> base.Engine:
    """An engine with the model loaded, without progress bars of transformers.

    capacity: a schedule with the selector and dense layers of those that will be set later; only vLLM needs to know it.
    """
    from sparroll.engines.make import dtype_named, make_engine

    quiet_transformers()
    return make_engine(
        kind,
        model,
        schedule=schedule,
        capacity=capacity,
        dtype=dtype_named(dtype),
        device=device,
        max_batch=max_batch,
        gpu_memory_share=gpu_memory_share,
    )


def print_facts(facts: dict[str, Any]) -> None:
    """Print the plain values of a summary, one per line. Nested tables are only in the record."""
    flat = {
        name: "-" if value in (None, "") else value
        for name, value in facts.items()
        if not isinstance(value, dict | list)
    }
    width = max(len(name) for name in flat)
    for name, value in flat.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
