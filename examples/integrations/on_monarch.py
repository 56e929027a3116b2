"""Each process of a Monarch mesh is one rank, as an actor: `python on_monarch.py`."""

from __future__ import annotations

from monarch.actor import Actor, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env
from small import by_runner

from lockstep.dist import destroy_dist


class Rank(Actor):
    @endpoint
    def train(self, work_dir: str) -> None:
        try:
            by_runner(work_dir)
        finally:
            destroy_dist()  # the actor's process goes on


if __name__ == "__main__":
    processes = this_host().spawn_procs(per_host={"gpus": 2})
    setup_torch_elastic_env(processes)
    processes.spawn("ranks", Rank).train.call("work_dirs/small").get()
    processes.stop().get()
