from __future__ import annotations

import pytest

from lockstep.launch import JobSpec


def test_an_endpoint_is_host_and_port():
    assert JobSpec(2, nnodes=2, rdzv="node0:29500").endpoint() == ("node0", 29500)
    assert JobSpec(2, nnodes=2, node_rank=1, rdzv="[fe80::1]:1").endpoint() == ("fe80::1", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"nproc": 0}, "`--nproc` must be at least 1, but is 0"),
        ({"nnodes": 0}, "`--nnodes` must be at least 1"),
        ({"nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "`--node-rank` must be from 0 to 1"),
        (
            {"node_rank": 1},
            "`--nnodes`, the number of machines, must be given for several of them, as `--node-rank` is 1",
        ),
        ({"node_rank": -1}, "`--node-rank` must be from 0 to 0"),
        (
            {"rdzv": "a:1"},
            "`--nnodes`, the number of machines, must be given for several of them, as `--rdzv` is 'a:1'",
        ),
        ({"nproc": 2, "least_nproc": 3}, "`least_nproc` must be from 1 to `nproc`, 2, but is 3"),
        ({"nnodes": 2, "rdzv": "a:1", "least_nnodes": 0}, "`least_nnodes` must be from 1 to `nnodes`, 2, but is 0"),
        ({"nnodes": 2}, "but is missing. Example: --rdzv node0:29500"),
        *(
            ({"nnodes": 2, "rdzv": rdzv}, "`--rdzv` must be HOST:PORT")
            for rdzv in ("host", ":1", "host:", "host:x", "host:0", "host:65536")
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        JobSpec(**arguments)
