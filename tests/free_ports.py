"""Ports for processes that a test starts."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections, any of which may take a port between the test's look and the
process that listens."""


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().choice(_PORTS)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
