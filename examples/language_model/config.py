"""Train a language model on the standard library's text: lockstep train examples/language_model/config.py --nproc 2."""

from corpus import StandardLibrary
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from transformer import ByteTransformer, NatsPerByte

work_dir = "work_dirs/language_model"

model = dict(type=ByteTransformer, width=128, layers=4)
train_dataloader = dict(dataset=dict(type=StandardLibrary), batch_size=16, drop_last=True)  # per rank
val_dataloader = dict(dataset=dict(type=StandardLibrary, held_out=True, windows=512), batch_size=32)
val_evaluator = dict(type=NatsPerByte)

train_cfg = dict(by_epoch=False, max_iters=400, val_interval=100)
optim_wrapper = dict(
    optimizer=dict(type=AdamW, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1), clip_grad=dict(max_norm=1.0)
)
param_scheduler = [
    dict(type=LinearLR, start_factor=0.01, by_epoch=False, end=50),
    dict(type=CosineAnnealingLR, eta_min=2e-4, by_epoch=False, begin=50),
]
randomness = dict(seed=0)
