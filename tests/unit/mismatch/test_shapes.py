"""The shapes that annotations promise, checked where jaxtyping is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparroll.mismatch import acceptance, acceptance_sampled, acceptance_top_k

jaxtyping = pytest.importorskip("jaxtyping")

IDS, LOGITS = torch.arange(4).expand(2, 3, 4), torch.randn(2, 3, 4)
MORE = torch.arange(2).expand(2, 3, 2)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (acceptance, (LOGITS, LOGITS)),
        (acceptance_sampled, (-LOGITS.abs(), -LOGITS.abs())),
        (acceptance_top_k, (IDS, LOGITS.log_softmax(-1), MORE, LOGITS.log_softmax(-1)[..., :2])),
    ],
)
def test_arguments_and_results_have_the_annotated_shapes(function: Callable[..., Any], arguments: tuple) -> None:
    names = {"Float": jaxtyping.Float, "Int": jaxtyping.Int, "Tensor": torch.Tensor, "tuple": tuple}
    annotations = {name: eval(text, names) for name, text in inspect.unwrap(function).__annotations__.items()}
    results = function(*arguments)
    promised = annotations.pop("return")
    results, promised = (results, promised.__args__) if isinstance(results, tuple) else ((results,), (promised,))
    with jaxtyping.jaxtyped("context"):
        for value, annotation in zip((*arguments, *results), (*annotations.values(), *promised), strict=True):
            assert isinstance(value, annotation)
