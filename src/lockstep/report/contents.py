"""The curves of a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.report.figures import Chart, Line, Point
from lockstep.report.records import MODES, Record, RunRecords, number

_PLACE = {"mode", "epoch", "iter", "utc"}
_PARTS_OF_A_STEP = ("time", "data_time", "comm_time")
_AMOUNTS = ("samples_per_second", "tokens_per_second", "flops_per_second")
_MOST_LINES = 6
_COMPUTE = "compute"
_DATA = "wait for data"
_EXCHANGE = "wait for gradients"


def charts_of(run: RunRecords) -> list[Chart]:
    """Return the charts of a run: losses, metrics, then throughput, times, learning rates and the rest."""
    names = _names(run.train)
    losses = [name for name in names if "loss" in name]
    rates = [name for name in names if name.rpartition(".")[2] == "lr"]
    charted = {*losses, *rates, *_PARTS_OF_A_STEP, *_AMOUNTS, "mfu", "memory_mib", "grad_norm"}
    charts = [
        *_loss_charts(run, losses),
        *_metric_charts(run),
        _chart(run, "Throughput", {"samples_per_second": "all ranks"}, unit=f"{run.counted_in}/s", from_zero=True),
        _chart(run, "Tokens", {"tokens_per_second": "all ranks"}, unit="tokens/s", from_zero=True),
        _flops_chart(run),
        _step_chart(run),
        _chart(run, "Learning rate", dict(zip(rates, rates, strict=True)), from_zero=True),
        _chart(run, "Gradient norm", {"grad_norm": "before clipping"}),
        _chart(run, "Peak memory", {"memory_mib": "rank that holds most"}, unit="MiB", from_zero=True),
        *(_chart(run, name, {name: "train"}) for name in names if name not in charted),
    ]
    return [chart for chart in charts if chart.lines]


def points_of(records: Sequence[Record], name: str) -> list[Point]:
    """Return pairs of an iteration and the value recorded there under a name."""
    return [(float(record["iter"]), value) for record in records if (value := number(record.get(name))) is not None]


def metric_names(run: RunRecords) -> list[str]:
    """Return the names of the metrics of all evaluations."""
    return _names(run.evaluations)


def _names(records: Sequence[Record]) -> list[str]:
    """Return the names that have a number in some record, in order of appearance."""
    values = [item for record in records for item in record.items()]
    return list(dict.fromkeys(name for name, value in values if name not in _PLACE and number(value) is not None))


def _chart(run: RunRecords, title: str, labels: Mapping[str, str], unit: str = "", *, from_zero: bool = False) -> Chart:
    """Return a chart of training values; `labels` maps recorded names to the names shown."""
    lines = [Line(label, points) for name, label in labels.items() if (points := points_of(run.train, name))]
    return Chart(title, lines, unit, from_zero=from_zero)


def _loss_charts(run: RunRecords, names: Sequence[str]) -> list[Chart]:
    several = len(names) > 1
    lines = [Line(f"train {name}" if several else "train", points_of(run.train, name)) for name in names]
    for mode in MODES:
        for name in metric_names(run):
            if "loss" in name:
                lines += _evaluation_lines(run, mode, name, f"{mode} {name.removeprefix(f'{mode}_')}")
    if len(lines) > _MOST_LINES:
        return [Chart(line.name, [line]) for line in lines]
    return [Chart("Loss", lines)]


def _metric_charts(run: RunRecords) -> list[Chart]:
    charts = []
    for name in metric_names(run):
        if "loss" in name:
            continue
        lines = [line for mode in MODES for line in _evaluation_lines(run, mode, name, mode)]
        title = name.replace("_", " ")
        charts.append(Chart(title.capitalize() if title.islower() else title, lines, run.unit(name)))
    return charts


def _evaluation_lines(run: RunRecords, mode: str, name: str, label: str) -> list[Line]:
    """Return the line of one metric, or no line if it was not evaluated in that mode."""
    points = points_of(run.evaluated(mode), name)
    return [Line(label, points, marked=True)] if points else []


def _flops_chart(run: RunRecords) -> Chart:
    """Return a chart of the model FLOPs as a share of the peak, or, where that is not known, in a second."""
    title, unit = "Model FLOPs utilization", "%"
    points = [(at, 100 * value) for at, value in points_of(run.train, "mfu")]
    if not points:
        title, unit = "Model FLOPs", "GFLOP/s"
        points = [(at, value / 1e9) for at, value in points_of(run.train, "flops_per_second")]
    return Chart(title, [Line("all ranks", points)] if points else [], unit, from_zero=True)


def _step_chart(run: RunRecords) -> Chart:
    """Return a stacked chart of the parts of a step's time, as the mean over ranks."""
    records = [r for r in run.train if all(number(r.get(name)) is not None for name in ("time", "data_time"))]
    is_measured = any("comm_time" in record for record in records)
    parts: dict[str, list[Point]] = {}
    for record in records:
        whole, data, exchange = (1e3 * (number(record.get(name)) or 0.0) for name in _PARTS_OF_A_STEP)
        # If only some exchanges are measured, they may be longer than the mean step.
        exchange = max(0.0, min(exchange, whole - data))
        values = {_COMPUTE: whole - data - exchange, _EXCHANGE: exchange, _DATA: data}
        for name, value in values.items():
            if name != _EXCHANGE or is_measured:
                parts.setdefault(name, []).append((float(record["iter"]), value))
    return Chart("Time of a step", [Line(name, points) for name, points in parts.items()], "ms", stacked=True)
