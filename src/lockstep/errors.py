"""The errors that lockstep raises, in one tree.

```
LockstepError
├── TopologyError (ValueError)           the environment contradicts itself or lacks something
├── LaunchError (RuntimeError)           workers could not be started, or one of them failed
├── ConfigError (ValueError)             a config names something that does not exist or does not fit
│   └── CheckpointError                  a checkpoint is damaged, has been removed, or is none that a run saves
├── RegistryError (KeyError)             a registry has no such name, or has it already
└── DistError (RuntimeError)             something between ranks
    ├── PeerError                        another rank failed first; names it and its cause
    ├── CollectiveMismatchError          ranks called with arguments that do not belong together
    ├── DivergenceError                  replicas of a model are no longer equal; names the tensor and the ranks
    └── CollectiveTimeoutError (TimeoutError)   a rank did not arrive in time
```

Some modules raise subclasses of their own: of these errors, as `BuildError` in `lockstep.registry`, or of torch's, as
the agents' rendezvous in `lockstep.launch`.

`Preempted` is no error: a signal asked the training to stop, and it has.

Wrong arguments to a function raise Python's own `TypeError` and `ValueError`. Messages read "`x` must be P, but is V
(rank r of n)", then what to do; `did_you_mean` gives the hint for an unknown name. An error that was sent between ranks
names the rank on which it occurred.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches
from numbers import Real
from traceback import walk_tb
from types import TracebackType
from typing import Any, TypeVar

_CLOSE = 0.6  # how alike two names are at least that may be meant for each other, by difflib
# What other frameworks call it: arguments and attributes of their trainers and callbacks, names of their strategies.
# Such a name is no misspelling: where there is nothing of that meaning, no name is close to it.
_ELSEWHERE = {
    "save_top_k": "save_best", "monitor": "save_best", "mode": "rule", "every_n_epochs": "interval",
    "every_n_train_steps": "interval", "dirpath": "out_dir", "max_steps": "max_iters", "ddp_spawn": "ddp", "dp": "ddp",
    "fsdp2": "fsdp", "interval": "by_epoch", "optimizer": "optim_wrapper", "scheduler": "param_scheduler",
    "lr_scheduler": "param_scheduler", "callbacks": "custom_hooks", "hooks": "custom_hooks", "logger": "visualizer",
    "metrics": "val_evaluator", "criterion": "loss", "loss_fn": "loss", "output_dir": "work_dir", "fit": "train",
    "ckpt_path": "load_from", "global_step": "iter", "current_epoch": "epoch", "is_main_process": "is_main",
    "backward": "step", "sync_gradients": "is_update", "save_model": "save_pretrained", "gather_for_metrics": "gather",
    "precision": "amp", "mixed_precision": "amp", "default_root_dir": "work_dir", "project_dir": "work_dir",
    "gradient_clip_val": "clip_grad", "max_grad_norm": "clip_grad", "accumulate_grad_batches": "accumulative_counts",
    "gradient_accumulation_steps": "accumulative_counts", "num_train_epochs": "max_epochs", "log_with": "visualizer",
    "val_check_interval": "val_interval", "check_val_every_n_epoch": "val_interval", "log_dict": "log",
    "limit_train_batches": "num_batch_per_epoch", "overfit_batches": "num_batch_per_epoch", "validate": "val",
    "evaluate": "val", "global_rank": "rank", "process_index": "rank", "num_processes": "world_size",
    "is_global_zero": "is_main", "save_checkpoint": "save", "save_state": "save",
    "checkpoint_callback": "best_checkpoint",
}  # fmt: skip
OTHER_FRAMEWORKS = (
    ". For names of accelerate and Lightning, see docs/side-by-side.md; of the Trainer, docs/huggingface.md"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]+")  # of the name of a class
_LONGEST = 10_000  # characters of a message that errors on other ranks, and lines of a log, repeat
_E = TypeVar("_E", bound=Exception)


class LockstepError(Exception):
    """Base class of all errors below; catch it to catch all of them."""


class TopologyError(LockstepError, ValueError):
    """Environment variables about ranks, hosts or ports contradict each other, or some are missing."""


class LaunchError(LockstepError, RuntimeError):
    """Worker processes could not be started, or one of them failed.

    Attributes:
        exit_code: the exit code for the process that started them: that of the worker that failed first, 128 + n after
            signal n.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(LockstepError, ValueError):
    """A config names something that does not exist, or a value that does not fit."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, has been removed, or holds what no run saves; another one may be whole."""


class RegistryError(LockstepError, KeyError):
    """A registry has no entry of a name, or has one already."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; the message should be readable text.
        return str(self.args[0]) if self.args else ""


class DistError(LockstepError, RuntimeError):
    """Something went wrong between ranks."""


class PeerError(DistError):
    """Another rank failed, so this one cannot go on.

    Attributes:
        rank: the rank, within the group of the collective, that failed first; None if the backend does not tell which.
        cause: that rank's error, as ``"TypeName: message"``, or the backend's message.
    """

    # What is not positional needs a default, since an unpickled error gets its attributes only after it has been made.
    def __init__(self, message: str, *, rank: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause


class CollectiveMismatchError(DistError):
    """Ranks of one group called a collective with arguments that do not belong together.

    Attributes:
        failed_ranks: the ranks of the job that had left the group before the call; otherwise those whose call differs
            from that of most of the others, or from that of the first one where there is no majority. Empty if it is
            not known.
    """

    def __init__(self, message: str, *, failed_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.failed_ranks = tuple(failed_ranks)


class DivergenceError(DistError):
    """Ranks that must hold the same values hold different ones.

    Attributes:
        name: the first tensor or value that differs.
        ranks: the ranks that differ from most of the others, or from the first one where there is no majority.
        failed_ranks: the same, as of `CollectiveMismatchError`.
        iteration: the number of complete iterations at the check that found it; 0 if the check doesn't know it.
    """

    def __init__(self, message: str, *, name: str = "", ranks: Sequence[int] = (), iteration: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = self.failed_ranks = tuple(ranks)
        self.iteration = iteration


class CollectiveTimeoutError(DistError, TimeoutError):
    """A rank did not take part in a collective within the group's timeout."""


# Errors that the user must fix: a traceback through lockstep would only hide the message.
INPUT_ERRORS = (ConfigError, LaunchError, RegistryError, TopologyError)
# What backends and stores say (torch 2.13) of a connection whose other end is gone.
PEER_IS_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited"),
    "failed to recv, got 0 bytes",
)


def caused_by(error: _E, ranks: Sequence[int]) -> _E:
    """Note on an error that all ranks raise which of them have caused it, so that the launcher names one of these.

    Args:
        error: the error.
        ranks: ranks of the job.
    """
    error.failed_ranks = tuple(ranks)  # type: ignore[attr-defined]
    return error


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of this one, and so on; an error that was being handled counts as one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def message_of(error: BaseException) -> str:
    """Return an error's message, cut where it is very long. Use it for errors that code of the user's may have raised.

    Where the error's own `__str__` raises, it is a note on that, with the line that raised the error: what an error
    says of itself must not hide that there is one.

    Example:
        >>> message_of(ValueError("boom"))
        'boom'
    """
    try:
        text = str(error)
    except BaseException as second:
        place = place_of(error.__traceback__)
        return f"(its message can't be shown: {type(second).__name__} in __str__{place and f'; raised at {place}'})"
    more = len(text) - _LONGEST
    return text if more <= 0 else f"{text[:_LONGEST]} ... ({more} characters more)"


def error_in_words(error: BaseException) -> str:
    """Return an error as ``TypeName: message``, or ``TypeName`` if it has no message; see `message_of`.

    Example:
        >>> error_in_words(ValueError("boom"))
        'ValueError: boom'
    """
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def place_of(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback outside of lockstep, torch and Python, as ``FILE:LINE``, or ""."""
    place = ""
    for frame, line in walk_tb(trace):
        spec = frame.f_globals.get("__spec__")  # of `python -m`, whose module is named __main__
        package = str(getattr(spec, "name", None) or frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("lockstep", "mmengine", "torch") and package not in sys.stdlib_module_names:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return place


def name_here(word: str) -> str:
    """Return what lockstep calls what another framework calls by a name; the name itself where none does."""
    return _ELSEWHERE.get(word, word)


def nearest(word: object, names: Iterable[object]) -> str | None:
    """Return the name closest to `word`, or None if nothing is close. A key that is no text, as of YAML, counts as one.

    Of a name that another framework has, only what it is called here is close. Letter case is ignored. Initials also
    match (`lr` for `learning_rate`), even if `word` is misspelled. Classes that share nothing but their last word are
    not close, as two hooks.

    Example:
        >>> nearest("resnet", ["ResNet", "VGG"])
        'ResNet'
        >>> nearest("lerning_rate", ["params", "lr", "momentum"])
        'lr'
        >>> nearest("SlowHook", ["EMAHook", "FlowHook"]), nearest("SlowHook", ["EMAHook", "LoggerHook"])
        ('FlowHook', None)
        >>> nearest("CosinLR", ["ExponentialLR", "CosineRestartLR"])
        'CosineRestartLR'
        >>> nearest("max_steps", ["max_iters", "max_epochs"]), nearest("max_steps", ["max_epochs"])
        ('max_iters', None)
    """
    text, known = str(word), [*map(str, names)]
    if text in _ELSEWHERE and text not in known:
        return same if (same := _ELSEWHERE[text]) in known else None
    by_folded = {name.casefold(): name for name in known}
    folded = text.casefold()
    for close in get_close_matches(folded, by_folded, n=5, cutoff=_CLOSE):
        if not _only_end_alike(text, by_folded[close]):
            return by_folded[close]
    initials = "".join(part[0] for part in folded.split("_") if part)
    return by_folded.get(initials) if len(initials) > 1 else None


def _only_end_alike(one: str, other: str) -> bool:
    """Return whether two classes share the last word of their names, and nothing before it is close."""
    words, others = ([word.casefold() for word in _WORD.findall(name)] for name in (one, other))
    if words[1:] and others[1:] and words[-1] == others[-1]:
        pairs = [(words[0], others[0]), ("".join(words[:-1]), "".join(others[:-1]))]
        return all(SequenceMatcher(None, *pair).ratio() < _CLOSE for pair in pairs)
    return False


@contextmanager
def building(argument: str) -> Iterator[None]:
    """Add to an error in the block which argument of the user's was being built.

    Example:
        >>> with building("val_evaluator"):
        ...     raise ConfigError("there is no metric `Acuracy`")
        Traceback (most recent call last):
        lockstep.errors.ConfigError: there is no metric `Acuracy`
        while building `val_evaluator`
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"while building `{argument}`")
        raise


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Return the error for an argument of a wrong type."""
    return TypeError(f"`{name}` must be {wanted}, but is {value!r} of type {type(value).__name__}")


def no_attribute(owner: object, name: str, known: Iterable[str] = ()) -> AttributeError:
    """Return the error for an attribute that `owner` has not, with the nearest public one of its own and of `known`."""
    public = [one for one in [*dir(owner), *known] if not one.startswith("_")]
    hint = did_you_mean(name, public, OTHER_FRAMEWORKS)
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=owner)


def require_known(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check the keys of a dict that is an argument.

    Raises:
        ConfigError: a key is not known; the nearest one is suggested.
    """
    for key in given:
        if key not in known:
            raise ConfigError(f"`{name}` has the unknown key {key!r}{did_you_mean(key, known)}")


def require_key(name: str, given: Collection[str], key: str) -> None:
    """Check that a dict that is an argument has a key.

    Raises:
        ConfigError: it has not; one that is close to it is named.
    """
    if key not in given:
        raise ConfigError(f"`{name}` {lacks_key(given, key)}")


def lacks_key(given: Iterable[str], key: str) -> str:
    """Return in words that a dict lacks a key that it needs; one that is close to it is named.

    Example:
        >>> lacks_key(["lr", "typ"], "type")
        "must have the key `type`, but has only ['lr', 'typ']: did you mean `type` by `typ`?"
    """
    has = sorted(map(str, given))
    near = nearest(key, has)
    hint = "" if near is None else f": did you mean `{_ELSEWHERE.get(near, key)}` by `{near}`?"
    return f"must have the key `{key}`, but has only {has}{hint}"


def require_count(name: str, value: object, least: int = 1) -> None:
    """Check an argument that is a number of things.

    Raises:
        ConfigError: it is not an int of at least `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"`{name}` must be an int of at least {least}, but is {value!r}")


def require_number(name: str, value: object, least: float = -math.inf, *, above: float = -math.inf) -> None:
    """Check an argument that is a finite number. A text is none, such as the one that YAML reads in `1e-3`.

    Raises:
        ConfigError: it is none, or it is less than `least`, or not above `above`.
    """
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not math.isfinite(number) or number < least or number <= above:
        bound = f" of at least {least:g}" if least > -math.inf else f" above {above:g}" if above > -math.inf else ""
        raise ConfigError(f"`{name}` must be a finite number{bound}, but is {value!r}")


def require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Check an argument that has few possible values.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigError(f"`{name}` must be {', '.join(others)} or {last}, but is {value!r}")


def metric_as_number(option: str, name: str, value: Any) -> float:
    """Return the value of a metric that an argument names.

    Raises:
        ConfigError: it is not one number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"`{option}` must be a metric with one number, but {name!r} is {value!r:.100}") from error


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(names: Iterable[object], most: int = 5) -> str:
    """Return names as written in a message; of many names, only the first ones.

    Example:
        >>> listed("abc"), listed(range(7), most=3)
        ('a, b, c', '0, 1, 2 and 4 more')
    """
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def ranks_in_words(ranks: Sequence[int], noun: str = "rank") -> str:
    """Return ranks, or other numbers, as written in a message, three neighbours or more as a range.

    Example:
        >>> ranks_in_words([3]), ranks_in_words([1, 2]), ranks_in_words([0, 1, 2, 5], "node")
        ('rank 3', 'ranks 1, 2', 'nodes 0-2, 5')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"{noun}{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def did_you_mean(word: object, names: Iterable[object], otherwise: str | None = None) -> str:
    """Return ``": did you mean `name`?"``, or the sorted names, or what is to be said instead, if none is close."""
    known = sorted({*map(str, names)})
    if (name := nearest(word, known)) is not None:
        return f": did you mean `{name}`?"
    if otherwise is not None:
        return otherwise
    if not known:
        return ": there are none at all."
    return f". Known: {', '.join(f'`{name}`' for name in known)}."


class Preempted(SystemExit):
    """A signal asked the training to stop, and all ranks have stopped after the same iteration.

    A script that does not catch it ends with exit code 75 (EX_TEMPFAIL of sysexits.h): start it again, to resume.

    Attributes:
        reason: which rank got which signal.
    """

    EXIT_CODE = 75

    def __init__(self, reason: str) -> None:
        super().__init__(self.EXIT_CODE)
        self.reason = reason
