"""How many threads torch works with on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Work on small tensors of the host in the calling thread alone. As a decorator, a function does.

    torch splits an operation over as many threads as there are cores, and they wait for each other. Where engines, loaders
    and other runs use the cores as well, a small operation then takes several times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
