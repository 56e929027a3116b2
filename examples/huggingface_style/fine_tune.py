"""Train models that do not depend on lockstep: first on images without labels, then on a few with labels.

lockstep launch examples/huggingface_style/fine_tune.py --nproc 2
"""

from __future__ import annotations

import argparse

import torch
from modeling_digits import DigitsForImageClassification, DigitsForMaskedImageModeling
from sklearn.datasets import load_digits

from lockstep import Runner

WORK_DIR = "work_dirs/huggingface_style"
HELD_OUT, LABELLED = 359, 200


def load_samples() -> list[dict[str, torch.Tensor]]:
    """Return all images in a fixed random order, as dicts that are collated into batches of keyword arguments."""
    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.as_tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"pixel_values": images[index], "labels": labels[index]} for index in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretraining-iters", type=int, default=1000)
    args = parser.parse_args()

    torch.manual_seed(0)
    samples = load_samples()
    held_out, known = samples[:HELD_OUT], samples[HELD_OUT:]

    pretrained = DigitsForMaskedImageModeling()
    pretraining = Runner(
        model=pretrained,
        work_dir=f"{WORK_DIR}/pretraining",
        train_dataloader=dict(dataset=[{"pixel_values": sample["pixel_values"]} for sample in known], batch_size=32),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False),
        train_cfg=dict(by_epoch=False, max_iters=args.pretraining_iters),
        randomness=dict(seed=0),  # each rank hides different patches
    )
    pretraining.train()

    model = DigitsForImageClassification()
    model.digits.load_state_dict(pretrained.digits.state_dict())  # or from_pretrained(...)
    fine_tuning = Runner(
        model=model,
        work_dir=f"{WORK_DIR}/fine_tuning",
        train_dataloader=dict(dataset=known[:LABELLED], batch_size=32),
        val_dataloader=dict(dataset=held_out, batch_size=64),
        val_evaluator=dict(type="Accuracy"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False),
        train_cfg=dict(by_epoch=False, max_iters=200, val_interval=100),
        randomness=dict(seed=0),
    )
    fine_tuning.train()


if __name__ == "__main__":
    main()
