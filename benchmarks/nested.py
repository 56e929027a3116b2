"""Dicts of scalars and lists of parameters against one call for each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as torch_dist

from benchmarks.measure import Row, compare
from lockstep import dist


def rows() -> Iterator[Row]:
    scalars = {f"loss_{i}": torch.zeros(()) for i in range(20)}

    def one_by_one() -> None:
        for value in scalars.values():
            torch_dist.all_reduce(value)

    yield compare(
        "nested",
        "all_reduce_dict, 20 scalars",
        ours=lambda: dist.all_reduce_dict(scalars),
        theirs=one_by_one,
        baseline="20 calls of torch.distributed",
        rounds=600,
        goal="<= 0.25",
    )
    params = list(_model_of_25m().parameters())

    def bare_params() -> None:
        for param in params:
            torch_dist.all_reduce(param.data)

    for coalesce in (True, False):
        yield compare(
            "nested",
            f"all_reduce_params, 25 M parameters, coalesce={coalesce}",
            ours=lambda coalesce=coalesce: dist.all_reduce_params(params, coalesce=coalesce),
            theirs=bare_params,
            baseline=f"{len(params)} calls of torch.distributed",
            rounds=15,
        )


def _model_of_25m() -> torch.nn.Module:
    """Shapes as in a convolutional network of that size: a few large matrices, many small vectors."""
    layers: list[torch.nn.Module] = []
    for width, depth in ((256, 24), (512, 12), (1024, 12), (2048, 2)):
        for _ in range(depth):
            layers += [torch.nn.Linear(width, width, bias=False), torch.nn.LayerNorm(width)]
    return torch.nn.ModuleList(layers)
