"""A rank that trains on the simulated accelerator, and writes what it has found; `test_training.py` says what is right.

Usage: trainings.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sim import simulator

from lockstep import dist
from training import averaged, digested, hooked, moved, offloaded, train_all, trial


def main(folder: Path) -> None:
    simulator()
    dist.init_dist("pytorch", timeout=60)
    found = train_all(folder, dist.get_world_size())
    found |= {part.__name__: part(dist.get_device()) for part in (averaged, offloaded, digested, trial, moved, hooked)}
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
