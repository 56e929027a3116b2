"""What a checkpoint must have for a run to resume from it: the form in which `Saving` writes it.

It is looked at before anything of the run is built, so that a checkpoint of another form is passed over like a damaged
one.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from lockstep.checkpoint.form import (
    COUNT,
    FLAG,
    NUMBER,
    TENSOR,
    TEXT,
    WHOLE_NUMBER,
    Form,
    Kind,
    Whole,
    check_form,
    is_count,
)
from lockstep.checkpoint.loading import open_checkpoint
from lockstep.checkpoint.values import tagged
from lockstep.errors import CheckpointError
from lockstep.location import Location
from lockstep.masking import printable


def _is_option(node: Any) -> bool:
    items = tagged(node)[1] if tagged(node)[0] == "$tuple" else node
    if isinstance(items, list):
        return all(map(_is_option, items))
    return node is None or isinstance(node, bool) or any(kind.fits(node) for kind in (NUMBER, TEXT, TENSOR))


_OPTION = Kind("a plain value, or a list of them", _is_option)
# numpy takes any place in the words of its generator, and reads memory beyond them.
_PLACE = Kind("a place in 624 words", lambda node: is_count(node) and node <= 624)
_RATE = Kind("a number or a tensor", lambda node: NUMBER.fits(node) or TENSOR.fits(node))
_WINDOWS: Form = Whole(backward_passes=COUNT, per_iteration=COUNT.or_none(), open=COUNT, updates=COUNT)

_META: Form = {
    "strategy": TEXT,
    "data_shares": COUNT,
    "rank_states": COUNT,
    "validated_iter": COUNT.or_none(),
    "has_optimizer": FLAG,
    "optim_wrapper": {"*": {"windows": _WINDOWS}, "windows": _WINDOWS},
    "begun_with": Whole(options=[{"*": _OPTION}], schedules=[TEXT]),
    "param_scheduler_hook": Whole(held=[NUMBER]),
    "position": Whole(
        epoch=COUNT,
        batches=COUNT,
        samples=COUNT.or_none(),
        unit=TEXT.or_none(),
        total=COUNT.or_none(),
        global_batch=COUNT.or_none(),
        head=[_OPTION],
        layout=[_OPTION],
        held_by=COUNT.or_none(),
    ),
    "checkpoint_hook": {"best": {"*": Whole(value=NUMBER, path=TEXT)}, "runs": [TEXT]},  # "runs" is younger
}
# Schedules of torch may hold those that they are made of.
_ALWAYS: Form = Whole(epoch=COUNT, iter=COUNT, seed=WHOLE_NUMBER, world_size=COUNT, position={}, param_schedulers=[{}])
_OPTIMIZER: Form = Whole(state={"*": {}}, param_groups=[{"*": _OPTION, "lr": _RATE, "params": [TEXT]}])
_RANK: Form = Whole(
    random=Whole(
        python=Whole(version=COUNT, words=TENSOR, gauss=NUMBER.or_none()),
        torch=TENSOR,
        numpy=Whole(name=TEXT, words=TENSOR, position=_PLACE, has_gauss=COUNT, gauss=NUMBER),
    ),
    data=Whole(position=None),
)


def check_resumable(directory: Location) -> None:
    """Check that a checkpoint has what a run resumes from.

    Raises:
        CheckpointError: it lacks something, or has it in another form.
    """
    with closing(open_checkpoint(directory)) as stored:
        meta, state = stored.encoded_meta, stored.state
    try:
        check_form(meta, _ALWAYS, "meta")
        check_form(meta, _META, "meta")
        check_form(state, Whole(model={}), "state")
        check_form(state, {"ranks": {}}, "state")
        if meta.get("has_optimizer", True):
            check_form(state, Whole(optimizer=_OPTIMIZER), "state")
            if any("params" not in group for group in state["optimizer"]["param_groups"]):
                raise ValueError("a group of `state.optimizer.param_groups` must have 'params', but has none")
        holder = meta["position"].get("held_by")
        needed = {*range(min(meta.get("rank_states", 0), len(state.get("ranks", {})) + 1)), holder} - {None}
        if needed:
            check_form(state, Whole(ranks=Whole({str(rank): _RANK for rank in needed})), "state")
    except ValueError as error:
        raise CheckpointError(
            f"{directory} must have what a run saves, but {printable(str(error), lines=False)}. Do not resume from it"
        ) from error
