"""Print the runs of an Aim repository as JSON, read by Aim itself, which leaves threads behind.

A repository is indexed first, as `aim up` does.
"""

from __future__ import annotations

import json
import sys

from aim import Repo
from aim.storage.context import Context

if __name__ == "__main__":
    repo = Repo.from_path(sys.argv[1])
    repo._recreate_index()
    repo.close()
    repo = Repo.from_path(sys.argv[1])
    kept = {}
    for run in map(repo.get_run, repo.list_all_runs()):
        steps, (losses, *_) = run.get_metric("train/loss", Context({})).data.items_list()
        image_steps, (images, *_) = run.get_image_sequence("digits/seven", Context({})).data.items_list()
        text_steps, (texts, *_) = run.get_text_sequence("digits/answer", Context({})).data.items_list()
        kept[run.name] = {
            "experiment": run.experiment,
            "active": run.active,
            "status": run["status"],
            "hparams": run["hparams"],
            "losses": list(zip(steps, losses, strict=True)),
            "texts": [(step, text.data) for step, text in zip(text_steps, texts, strict=True)],
            "images": [(step, image.width, image.height) for step, image in zip(image_steps, images, strict=True)],
        }
    print(json.dumps(kept))
