"""The protocol of engines, and `under`, which runs something under another schedule for a while. No engine is defined
here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from torch import Tensor, nn

from sparroll.compression import Compression
from sparroll.engines.report import EngineReport
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule
from sparroll.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Engine(Protocol):
    """Samples rollouts from a model under a schedule or a compression; with neither, under dense attention.

    An engine is a context manager: leaving the block closes it.

    >>> with make_engine("hf", "tiny-reasoner") as engine:
    ...     rollouts = engine.generate(["a = 7 ; a ?"], max_new_tokens=64)
    """

    kind: str
    """Name of the engine: "hf" or "vllm"."""
    model_name: str
    tokenizer: PreTrainedTokenizerBase | None
    """None where the model came without one. Prompts must then be token ids."""
    vocabulary: int
    """Number of token ids."""
    context_limit: int | None
    """Largest number of tokens of a prompt and its response together; None where the model names no limit."""
    max_batch: int
    """Largest number of rollouts that decode together."""
    schedule: Schedule | None
    """What decides which tokens a step reads; None where a step reads every token in the cache."""
    compression: Compression | None
    """What decides which tokens leave the cache; None where every token stays. It cannot be combined with a
    schedule."""
    cache_tokens: int | None
    """How many tokens' K and V it can hold at a time; None where only the device's memory limits them."""
    most_schedules: int
    """How many schedules requests that decode in the same steps may have of their own. 1: those of one schedule decode after
    those of another."""
    weight_version: int
    """Rises with each `load_weights`; 0 for the weights that the engine was made with."""

    # -- what is read ----------------------------------------------------------------------------------------------------

    def set_schedule(self, schedule: Schedule | str | None) -> None:
        """Set the schedule from the next `generate` on. None is dense, unless a compression is set. To set one for a
        while only, use `under`."""
        ...

    def set_compression(self, compression: Compression | str | None) -> None:
        """Set the compression from the next `generate` on; None keeps every token. Raises UserError where the engine
        cannot drop tokens."""
        ...

    def check_schedule(self, schedule: Schedule, capacity: Schedule | None = None) -> None:
        """Raise UserError where the engine could not run this schedule; with `capacity`, where another one of this model
        could not that is started for that (see `make_engine`). Changes nothing."""
        ...

    # -- generating ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        seed: int | Sequence[int] = 0,
        top_k: int = 0,
        dense: Sequence[bool] | None = None,
        schedules: Sequence[Schedule] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order; the same seed gives the same rollouts in any batch.

        prompts: strings, which are tokenized as they are, or token ids.  temperature: 0 is greedy.
        top_p: below 1, each token is drawn from the fewest most likely ones with at least this mass.
        The log-probabilities of rollouts are those of the distribution that was drawn from, after temperature and top_p.
        stop_ids: default, the model's end-of-sequence ids.  seed: one for all, or one per request, prompt by prompt.
        top_k: also return the k most likely tokens at each step and their log-probabilities.
        dense: one flag per request, prompt by prompt like a list of seeds: True where the request's decode steps read
        everything although the engine has a schedule or a compression. Such a rollout is the one that the engine would
        sample with neither. With neither the flags change nothing.
        schedules: one per request, prompt by prompt: what its decode steps read by in place of the engine's schedule, whose
        selector, dense layers and check they have. Such a rollout is the one that the engine would sample under that
        schedule.
        on_progress: called with (rollouts finished, rollouts in all) after each rollout that ends.
        """
        ...

    def report(self) -> EngineReport:
        """Which attention ran, layer by layer."""
        ...

    def reset_report(self) -> None:
        """Start counting anew."""
        ...

    # -- weights and memory ----------------------------------------------------------------------------------------------

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Take over the policy's weights. `version` must rise; every rollout carries it. A sleeping engine wakes."""
        ...

    def shared_model(self) -> PreTrainedModel | None:
        """The model that the engine samples from, where others in this process, such as a Scorer, can read it. None
        where they cannot; `model_name` then says what to load."""
        ...

    def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Free memory until the engine is woken, as far as it can. 0: nothing is freed. 1: the cache is dropped, and
        the weights move to host memory. 2: both are dropped; `load_weights` must follow before the next `generate`."""
        ...

    def wake(self) -> None:
        """Take the memory back. Does nothing if the engine is awake."""
        ...

    def close(self) -> None:
        """Free everything; `generate` then raises UserError. A second call does nothing."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def samples_densely(engine: Engine) -> bool:
    """Whether the engine's rollouts come from the dense policy: it has no schedule and no compression."""
    return engine.schedule is None and engine.compression is None


@contextmanager
def under(engine: Engine, *, schedule: Schedule | None, compression: Compression | None = None) -> Iterator[None]:
    """Run the block under this schedule or compression; where both are None, under dense attention. What was in force
    before is restored afterwards, also after an exception.

    >>> with under(engine, schedule=None):
    ...     dense = engine.generate(prompts, max_new_tokens=64)
    """
    before = engine.schedule, engine.compression
    try:
        _put_in_force(engine, schedule, compression)
        yield
    finally:
        _put_in_force(engine, *before)


def _put_in_force(engine: Engine, schedule: Schedule | None, compression: Compression | None) -> None:
    # An engine has only one of the two at a time, so the compression is removed before the schedule is set, and set
    # after that.
    engine.set_compression(None)
    engine.set_schedule(schedule)
    engine.set_compression(compression)
