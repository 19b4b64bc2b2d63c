"""verl on a CPU for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "shim")]
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    VERL_USE_EXTERNAL_MODULES="verl_on_cpu",
    VERL_USE_EXTERNAL_PLUGINS="none",
    TOKENIZERS_PARALLELISM="false",
)


@contextlib.contextmanager
def imported_ahead(marked: str) -> Iterator[None]:
    """With the process that those of the long runs go on from."""
    import runs
    from imported_ahead import VARIABLE

    with tempfile.TemporaryDirectory(prefix="sparroll-") as folder, pytest.MonkeyPatch.context() as patched:
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            process = subprocess.Popen(
                [sys.executable, str(FOLDER / "shim" / "imported_ahead.py"), str(listener.fileno())],
                # A process that forks may have one thread only, and pyarrow's allocator would start another.
                env=runs.environment() | {runs.MARK: marked, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        patched.setenv(VARIABLE, address)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="session", autouse=True)
def long_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The long run of each collected file that has one: its function `long_run`, which is given a folder. They begin
    with the first test, and two go on side by side: a run mostly starts processes, one after the other, and takes some
    gigabytes."""
    made: dict[str, Callable[[Path], Any]] = {
        item.module.__name__: item.module.long_run
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item.module, "long_run")
    }
    if not made:
        yield {}
        return
    import runs

    marked = str(tmp_path_factory.getbasetemp())
    with imported_ahead(marked), ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(make, tmp_path_factory.mktemp("run")) for name, make in made.items()}
        pool.shutdown(wait=False, cancel_futures=True)
        # Where the tests ended early, runs may still go on.
        runs.kill_marked(marked)
