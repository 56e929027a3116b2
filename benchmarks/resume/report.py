"""The page with both tables."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.resume.data import BATCH, GLOBAL_BATCH, SAMPLES, STOPS
from benchmarks.resume.rank import COMPARED, SAVED
from benchmarks.resume.rank import GLOBAL_BATCH as TRAINED_BATCH


def write_page(data: list[str], strategies: list[str], path: Path) -> None:
    """Write the page as Markdown."""
    intro = _INTRO.format(
        version=torch.__version__.split("+")[0], samples=SAMPLES, stops=len(STOPS), batch=GLOBAL_BATCH, per_rank=BATCH
    )
    under = _UNDER.format(saved=SAVED, compared=COMPARED, batch=TRAINED_BATCH)
    path.write_text("\n".join([intro, *data, "", under, *strategies]) + "\n", encoding="utf-8")


_INTRO = """# Stopped and resumed in another form

`make resume-matrix` stops runs and resumes them, on real ranks over gloo (CPU, torch {version}). It fails if a
figure is not what it should be. [Decision 21](decisions/0021-a-position-in-the-global-order.md) says how a position
is kept.

## Every sample once, on any number of ranks

A run over {samples} samples is saved after each of its first {stops} iterations, on 1, 2, 3 and 4 ranks. From each
of these checkpoints it resumes on 1, 2, 3 and 4 ranks (in the last two changes, on as many, and from 2 on 3). A
hook notes which samples each training step of each rank gets. A resumed run counts if these samples, before the
stop and after it, are the global orders of the epochs, item by item: each sample of an epoch is trained on once,
also what workers had read ahead at the stop. *By epoch* trains 3 epochs, the others two or more.

- *Global batch kept*: {batch} samples on all ranks together. Iterations are as many, and losses the same, as in one
  process that never stops; the table has the largest difference.
- *Batch per rank kept*: {per_rank} samples on each rank, so that the global batch changes.
- *Rounded up*: as by default, samples from the beginning of the order are repeated at the end of an epoch until all
  ranks have equally many, as the ranks that end the epoch need. The other rows repeat none.
"""

_UNDER = """## Under any strategy

The language-model example (small) with AdamW, a warm-up, a cosine and clipped gradients is saved after {saved}
iterations, in the middle of its second epoch. It resumes under each strategy with the same global batch of {batch}.
A cell has the largest difference of the next {compared} losses from those of the run that never stopped. After
loading, weights, moments, schedules and rates are compared with those that were saved, and so is the average of an
`EMAHook`, in a second run (not for DeepSpeed 3, where `EMAHook` is refused). They are equal unless noted.

The last row is of runs with dropout that resume under the same strategy, on as many ranks. There the losses are those
of the run that never stopped bit for bit, except on three and more ranks of DDP: after its first step it arranges its
buckets anew, and the gradients of three ranks are then added in another order.
"""
