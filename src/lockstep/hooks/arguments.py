"""Checks of arguments that several hooks have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.errors import CheckpointError, ConfigError, did_you_mean
from lockstep.report.figures import direction_of
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from lockstep.runner.run import TrainRun
from lockstep.session.loop import OwnLoop

_OWN_RUNS: tuple[object, ...] = (EpochBasedTrainLoop.run, IterBasedTrainLoop.run)
RULES = ("greater", "less", None)
"""Which values of a metric are better; None infers it from the metric's name."""


def rule_of(metric: str, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None) -> str:
    """Return `"greater"` or `"less"`, inferred from the metric's name.

    Args:
        metric: the metric's name.
        greater_keys: parts of names, or one, for which greater is better; None for the default ones.
        less_keys: the same for `"less"`.

    Raises:
        ConfigError: the name does not show which is better.
    """
    name = metric.rpartition("/")[2]
    greater_keys, less_keys = ([keys] if isinstance(keys, str) else keys for keys in (greater_keys, less_keys))
    if any(part.lower() in name.lower() for part in less_keys or ()):
        return "less"
    if any(part.lower() in name.lower() for part in greater_keys or ()):
        return "greater"
    rule = direction_of(name)
    if rule is None or (less_keys if rule == "less" else greater_keys) is not None:
        raise ConfigError(f"`rule` must be 'greater' or 'less' for the metric {metric!r}, whose name does not tell")
    return rule


def check_metrics(option: str, metrics: Iterable[str], runner: TrainRun) -> None:
    """Refuse metrics that no validation of a training will have, as far as their names are known before.

    Args:
        option: the argument that names them.
        metrics: the names.
        runner: the run.

    Raises:
        ConfigError: nothing is validated, or the metrics of the validation have other names.
    """
    loop = runner.val_loop
    known = None if loop is None else loop.metric_names
    for name in metrics:
        # A training loop by hand, or of the user's own, may compute metrics in its own way.
        if loop is None and getattr(type(runner.train_loop), "run", None) in _OWN_RUNS:
            raise ConfigError(f"`{option}` is the metric {name!r}, but nothing is validated. Give `val_dataloader`")
        if known is not None and name not in known:
            raise unknown_metric(option, name, known, runner)


def unknown_metric(option: str, name: str, known: Iterable[str], runner: TrainRun) -> ConfigError:
    """Return the error for a metric that a validation does not have."""
    said = did_you_mean(name, known := list(known))
    if isinstance(runner.train_loop, OwnLoop):
        said += (
            " A loop of your own hands all metrics of a validation, as those of several sets, to one call of "
            "`session.log_metrics`; values of a training iteration are for `session.log`."
        )
    elif "loss" in name and not any("loss" in one for one in known):
        said += (
            " The loss is one if the Runner has it, as loss=lambda outputs, batch: outputs.loss; or else by "
            "val_evaluator=[dict(type='LossMetric'), ...], of what the model returns as `loss`."
        )
    return ConfigError(f"`{option}` must be a metric of the validation, but is {name!r}{said}")


def not_saved_by(hook: str, key: str, found: object) -> CheckpointError:
    """Return the error for metadata of a checkpoint that are none that a hook saves."""
    return CheckpointError(f"`meta.{key}` of the checkpoint must be what {hook} saves, but is {found!r:.100}")
