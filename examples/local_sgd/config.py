"""The digits example under a custom strategy: lockstep train examples/local_sgd/config.py --nproc 2."""

from local_sgd import LocalSGDStrategy

_base_ = ["../digits/config.py"]

work_dir = "work_dirs/local_sgd"
strategy = dict(type=LocalSGDStrategy, interval=4)
