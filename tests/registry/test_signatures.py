from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.registry.signatures import Arguments, BuildError, construct

if TYPE_CHECKING:
    from nowhere import Anything


class Closed:
    def __init__(self, a: int, b: Anything = None, *, c: list[int] = ()): ...


def opened(a, /, b=1, *args, **kwargs): ...


def test_names_that_are_missing_or_unknown():
    takes = Arguments.of(Closed)
    assert list(takes.named) == ["a", "b", "c"]
    assert takes.unknown(["a", "x", "c", "y"]) == ["x", "y"]
    assert takes.missing(["b"]) == ["a"]
    assert takes.missing(["a", "x"]) == []


def test_what_takes_anything_has_no_unknown_names():
    takes = Arguments.of(opened)
    assert (list(takes.named), takes.takes_others) == (["b"], True)
    assert takes.unknown(["x"]) == []
    assert Arguments.of(range).unknown(["x"]) == []  # it has no signature to read


def test_annotations_are_evaluated_where_they_can_be():
    hints = {name: parameter.annotation for name, parameter in Arguments.of(Closed).named.items()}
    assert hints == {"a": int, "b": "Anything", "c": list[int]}
    assert Arguments.of(opened).named["b"].annotation is inspect.Parameter.empty


def test_a_function_that_passes_on_all_its_arguments_is_not_said_to_take_none():
    def passes_on(**kwargs: Any) -> Closed:
        return Closed(**kwargs)

    with pytest.raises(BuildError, match=r"unknown argument `d`$"):
        construct(passes_on, {"a": 1, "d": 2}, "model")


def test_a_key_that_is_no_text_is_refused_with_pythons_own_error():
    with pytest.raises(TypeError, match="keywords must be strings") as caught:
        construct(opened, {1: 2}, "model")
    assert caught.value.__notes__ == ["while building the model `opened` with 1"]
