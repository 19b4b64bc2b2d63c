"""The model that most runs here begin with."""

from __future__ import annotations

import pytest

from integration.train_runs import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))
