"""Nested values as JSON, and back: what a manifest holds of a state besides its tensors.

A value of JSON stands for itself. An object with one key that begins with `$` stands for what JSON does not have:

| JSON | value |
|---|---|
| `{"$tensor": "model.weight"}` | the tensor of that name |
| `{"$array": "ranks.0.random.numpy.1"}` | the same as an array of numpy |
| `{"$tuple": [1, 2]}` | a tuple |
| `{"$dict": [[0, "a"]]}` | a dict whose keys are not all strings, or look like one of these |
| `{"$float": "inf"}` | `inf`, `-inf` or `nan` |
| `{"$dtype": "float32"}` | a dtype of torch |

What is read must also have the form that its reader expects. A form is a test with words for messages, a dict of forms
by key (`"*"`: for all other keys), or a list with the form of its items. The keys of a `Whole` must all be there; those
of another dict may be missing. Here are the form of what a model says of its weights, whose texts become names of
files, and the form of what a run resumes from. Only to read a dtype does this module import torch.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lockstep.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Path: TypeAlias = tuple[str, ...]

MOST_NESTED = 100
"""How deep dicts, lists and tuples may lie in one another."""
_PLAIN = (str, int, float, bool, type(None))
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def encode(value: Any, path: Path = (), tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a value as JSON.

    Args:
        value: nested dicts, lists and tuples of tensors, arrays and plain values.
        path: the keys that lead to it, for names and messages.
        tensors: where tensors are put, by the names that stand for them; None refuses them.

    Raises:
        ConfigError: there is something else in it.
    """
    if len(path) > MOST_NESTED:
        raise ConfigError(
            f"`{'.'.join(path[:3])}...` must lie at most {MOST_NESTED} dicts or lists deep to be saved. Flatten it"
        )
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if tensors is not None and torch is not None:
        if isinstance(value, torch.Tensor):
            return {"$tensor": _put(value, path, tensors)}
        # torch has neither long doubles nor other byte orders, and would drop a mask.
        is_array = numpy is not None and isinstance(value, numpy.ndarray) and not hasattr(value, "mask")
        if is_array and value.dtype.kind in "biuf" and value.itemsize <= 8:
            native = value.astype(value.dtype.newbyteorder("="), order="C")
            return {"$array": _put(torch.from_numpy(native), path, tensors)}
    # A time that is none would become None, and one in nanoseconds a number.
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind not in "mM":
        value = value.item()
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case str():
            return str.__str__(value)  # of a member of an enum, its value
        case Mapping():
            return _encode_dict(value, path, tensors)
        case list():
            return [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]}
    if torch is not None and isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    raise ConfigError(
        f"`{'.'.join(path)}` must be {'' if tensors is None else 'a tensor, '}a number, a string, None, or a dict, "
        f"list or tuple of them to be saved, but is a {type(value).__module__}.{type(value).__qualname__}. Convert it "
        "where it is added to the checkpoint: objects are not saved, because reading one would run code"
    )


def decode(node: Any, stored: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value that JSON stands for.

    Args:
        node: what `encode` returned.
        stored: returns what is stored by itself, by its `$` key and what that holds; None where there is no such thing.

    Raises:
        CheckpointError: it is none of the forms of this module.
    """
    if isinstance(node, list):
        return [decode(item, stored) for item in node]
    if not isinstance(node, dict):
        return node
    tag, held = tagged(node)
    match tag:
        case None:
            return {key: decode(item, stored) for key, item in node.items()}
        case "$tensor" | "$array" if stored is not None:
            return stored(tag, held)
        case "$tuple" if isinstance(held, list):
            return tuple(decode(item, stored) for item in held)
        case "$dict" if isinstance(held, list):
            return {decode(key): decode(item, stored) for key, item in held}
        case "$float" if held in ("inf", "-inf", "nan"):
            return float(held)
        case "$dtype":
            import torch

            if isinstance(dtype := getattr(torch, str(held), None), torch.dtype):
                return dtype
    raise CheckpointError(f"a value must be JSON or one of the forms of lockstep, but is {node!r}")


def check_encoded(node: Any, dtypes: Mapping[str, str], path: Path = ()) -> Iterator[str]:
    """Check that JSON consists of the forms of this module, and yield the names of the tensors that it refers to.

    Args:
        node: what `encode` returned, or what somebody else's checkpoint holds.
        dtypes: the names of the tensors that there are, and of their dtypes.
        path: the keys that lead to it.

    Raises:
        ValueError: it is none of the forms; the message names the keys that lead to it.
    """
    if len(path) > 3 * MOST_NESTED:  # a tag and its list count, too
        raise ValueError(f"`{'.'.join(path[:3])}...` is nested deeper than {MOST_NESTED}")
    tag, held = tagged(node)
    match tag:
        case None:
            items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
            for key, item in items:
                yield from check_encoded(item, dtypes, (*path, str(key)))
            is_number = not isinstance(node, float) or math.isfinite(node)
            if isinstance(node, dict | list) or (isinstance(node, _PLAIN) and is_number):
                return
        case "$tensor" | "$array" if isinstance(held, str) and held in dtypes:
            if tag == "$tensor" or not dtypes[held].startswith(("bfloat16", "float8")):  # which numpy lacks
                yield held
                return
        case "$tuple" if isinstance(held, list):
            yield from check_encoded(held, dtypes, (*path, tag))
            return
        case "$dict" if isinstance(held, list) and all(_is_pair(pair) for pair in held):
            for key, item in held:
                yield from check_encoded(item, dtypes, (*path, str(key)))
            return
        case "$float" if held in ("inf", "-inf", "nan"):
            return
        case "$dtype" if isinstance(held, str):
            return
    raise ValueError(f"`{'.'.join(path)}` is none of the forms of a value, but {reprlib.repr(node)}")


def tagged(node: Any) -> tuple[str | None, Any]:
    """Return the `$` key of a node and what it holds; None and None if the node has none."""
    if isinstance(node, dict) and len(node) == 1:
        ((key, held),) = node.items()
        if key.startswith("$"):
            return key, held
    return None, None


def merge(first: Any, second: Any) -> Any:
    """Return the union of what two ranks have encoded; where both have a value, that of the first one."""
    own, others = _pairs(first), _pairs(second)
    if own is None or others is None:
        return first
    merged = {repr(key): (key, item) for key, item in others}
    for key, item in own:
        merged[repr(key)] = key, merge(item, merged[repr(key)][1]) if repr(key) in merged else item
    if tagged(first)[0] is None and tagged(second)[0] is None:
        return dict(merged.values())
    return {"$dict": [list(pair) for pair in merged.values()]}


def leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is in an encoded dict, by the keys that lead to it."""
    if isinstance(node, dict) and tagged(node)[0] is None:
        for key, item in node.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, node


class StoredKind(NamedTuple):
    """A kind of value: in words, and a test for it."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> StoredKind:
        """Return the kind that is also fitted by None."""
        return StoredKind(f"{self.words} or null", lambda node: node is None or self.fits(node))


class Whole(dict[str, Any]):
    """Forms by key, all of which must be there."""


Form: TypeAlias = StoredKind | Mapping[str, Any] | list[Any]


def require_plain_name(name: object) -> str:
    """Return the name of a file that lies directly in a folder.

    Raises:
        ValueError: it leads elsewhere, or is too long.
    """
    if not _is_plain_name(name):
        raise ValueError(f"{name!r} is not the name of a file in it, and may lead out of the folder")
    return str(name)


def check_form(node: Any, form: Form, path: str) -> None:
    """Check that an encoded value has a form.

    Args:
        node: the value, as `encode` returns it.
        form: the form.
        path: the keys that lead to it.

    Raises:
        ValueError: it has another one; the message names the keys that lead to what differs.
    """
    if isinstance(form, StoredKind):
        if not form.fits(node):
            raise ValueError(f"`{path}` must be {form.words}, but is {reprlib.repr(node)}")
    elif isinstance(form, list):
        items = tagged(node)[1] if tagged(node)[0] == "$tuple" else node
        if not isinstance(items, list):
            raise ValueError(f"`{path}` must be a list, but is {reprlib.repr(node)}")
        for i, item in enumerate(items):
            check_form(item, form[0], f"{path}.{i}")
    else:
        if not isinstance(node, dict) or tagged(node)[0] is not None:
            raise ValueError(f"`{path}` must be a dict, but is {reprlib.repr(node)}")
        if isinstance(form, Whole) and (missing := [key for key in form if key not in node]):
            raise ValueError(f"`{path}` must have {missing[0]!r}, but has {reprlib.repr(list(node))}")
        for key, item in node.items():
            if (below := form.get(key, form.get("*"))) is not None:
                check_form(item, below, f"{path}.{key}")


def is_count(value: object) -> bool:
    """Return whether a value is a number of things, which fits into 64 bits."""
    return type(value) is int and 0 <= value < 1 << 62


def check_resumable_form(meta: Any, state: Any) -> None:
    """Check that encoded metadata and an encoded state have the form in which a run saves them.

    Raises:
        ValueError: they have not; the message names the keys that lead to what differs.
    """
    check_form(meta, _ALWAYS, "meta")
    check_form(meta, _META, "meta")
    check_form(state, Whole(model={}), "state")
    check_form(state, {"ranks": {}}, "state")
    if meta.get("has_optimizer", True):
        check_form(state, Whole(optimizer=_OPTIMIZER), "state")
        if any("params" not in group for group in state["optimizer"]["param_groups"]):
            raise ValueError("a group of `state.optimizer.param_groups` must have 'params', but has none")
    holder = meta["position"].get("held_by")
    # One that is missing is enough for the error: a forged number may be of any size.
    needed = {*range(min(meta.get("rank_states", 0), len(state.get("ranks", {})) + 1)), holder} - {None}
    if needed:
        check_form(state, Whole(ranks=Whole({str(rank): _RANK for rank in needed})), "state")


def _pairs(node: Any) -> list[Any] | None:
    """Return keys and values of an encoded dict; None for what is none."""
    tag, held = tagged(node)
    return held if tag == "$dict" else [*node.items()] if isinstance(node, dict) and tag is None else None


def _is_pair(node: Any) -> bool:
    return isinstance(node, list) and len(node) == 2 and _is_key(node[0])


def _is_key(node: Any) -> bool:
    """Return whether an encoded key can be hashed when it is decoded."""
    tag, held = tagged(node)
    if tag == "$tuple":
        return isinstance(held, list) and all(map(_is_key, held))
    return tag in ("$float", "$dtype") or isinstance(node, _PLAIN)


def _encode_dict(value: Mapping[Any, Any], path: Path, tensors: dict[str, Tensor] | None) -> Any:
    items = {key: encode(item, (*path, str(key)), tensors) for key, item in value.items()}
    if all(type(key) is str for key in items) and tagged(items)[0] is None:
        return items
    return {"$dict": [[encode(key, (*path, str(key))), item] for key, item in items.items()]}


def _put(tensor: Tensor, path: Path, tensors: dict[str, Tensor]) -> str:
    name = ".".join(path)
    if name in tensors:
        raise ConfigError(f"each tensor to be saved must have a name of its own, but two are called {name}. Rename one")
    tensors[name] = tensor
    return name


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def _is_number(node: Any) -> bool:
    return type(node) in (int, float) and abs(node) <= sys.float_info.max


def _is_plain(node: Any) -> bool:
    items = tagged(node)[1] if tagged(node)[0] == "$tuple" else node
    return all(map(_is_plain, items)) if isinstance(items, list) else isinstance(node, _PLAIN)


TEXT = StoredKind("a string", lambda node: isinstance(node, str))
FLAG = StoredKind("true or false", lambda node: isinstance(node, bool))
COUNT = StoredKind("a number of things", is_count)
WHOLE_NUMBER = StoredKind("a whole number", lambda node: type(node) is int and abs(node) < 1 << 64)
NUMBER = StoredKind("a number", lambda node: _is_number(node) or tagged(node)[0] == "$float")
TENSOR = StoredKind("a tensor", lambda node: tagged(node)[0] == "$tensor")

DESCRIPTION: Form = {
    "tied": [[TEXT]],
    "pretrained": [
        Whole(
            prefix=TEXT,
            stem=StoredKind("the name of a file, without a folder", _is_plain_name),
            files=StoredKind(
                "files of JSON by their names, without folders",
                lambda node: (
                    isinstance(node, dict)
                    and all(_is_plain_name(name) and name.endswith(".json") for name in node)
                    and isinstance(node.get("config.json", {}), dict)
                ),
            ),
            names=StoredKind(
                "names by name or null",
                lambda node: node is None or (isinstance(node, dict) and all(map(TEXT.fits, node.values()))),
            ),
        )
    ],
}
"""The form of what `lockstep.weights.describe_model` returns, which a checkpoint has as `weights` in its metadata."""

_PLAIN_VALUE = StoredKind("a plain value, or a list of them", _is_plain)
# numpy takes any place in the words of its generator, and reads memory beyond them.
_PLACE = StoredKind("a place in 624 words", lambda node: is_count(node) and node <= 624)
# None where the optimizer sets its rate itself, as transformers' Adafactor does.
_RATE = StoredKind("a number or a tensor", lambda node: NUMBER.fits(node) or TENSOR.fits(node)).or_none()
_WINDOWS: Form = Whole(backward_passes=COUNT, per_iteration=COUNT.or_none(), open=COUNT, updates=COUNT)

_META: Form = {
    "strategy": TEXT,
    "data_shares": COUNT,
    "rank_states": COUNT,
    "validated_iter": COUNT.or_none(),
    "has_optimizer": FLAG,
    "optim_wrapper": {"*": {"windows": _WINDOWS}, "windows": _WINDOWS},
    "frozen": [TEXT],
    "begun_with": Whole(options=[{}], schedules=[TEXT], scheduled=[TEXT]),
    "schedules_by_epoch": [FLAG.or_none()],
    "load_from": TEXT.or_none(),
    "position": Whole(
        epoch=COUNT,
        batches=COUNT,
        samples=COUNT.or_none(),
        unit=TEXT.or_none(),
        total=COUNT.or_none(),
        global_batch=COUNT.or_none(),
        head=[_PLAIN_VALUE],
        layout=[_PLAIN_VALUE],
        held_by=COUNT.or_none(),
    ),
    "checkpoint_hook": {
        "best": {"*": Whole(value=NUMBER, path=TEXT)},
        "former_runs": [Whole(run=TEXT, epoch=COUNT, iter=COUNT)],
    },
}
# Schedules of torch may hold those that they are made of.
_ALWAYS: Form = Whole(epoch=COUNT, iter=COUNT, seed=WHOLE_NUMBER, world_size=COUNT, position={}, param_schedulers=[{}])
# Other options are of any kind: optimizers of others have dicts, dtypes ...
_OPTIMIZER: Form = Whole(state={"*": {}}, param_groups=[{"lr": _RATE, "params": [TEXT]}])
_RANK: Form = Whole(
    random=Whole(
        python=Whole(version=COUNT, words=TENSOR, gauss=NUMBER.or_none()),
        torch=TENSOR,
        numpy=Whole(name=TEXT, words=TENSOR, position=_PLACE, has_gauss=COUNT, gauss=NUMBER),
    ),
    data=Whole(position=None),
)
