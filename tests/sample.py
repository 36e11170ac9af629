"""Selects the cases of a parametrised test for every run; `make test-all` runs them all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *taken: Any) -> list[Any]:
    """Return the cases as parameters, with all but the `taken` ones marked `thorough`."""
    cases = list(cases)
    assert all(each in cases for each in taken), "a case to be taken is none"
    return [
        each if each in taken else pytest.param(*_values(each), marks=pytest.mark.thorough)
        for each in cases
    ]


def _values(case: Any) -> Collection[Any]:
    return case if isinstance(case, tuple) else (case,)
