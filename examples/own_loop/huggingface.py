"""Fine-tuning a model of transformers, whose `forward` computes the loss, with torch's own schedule."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from lockstep import Session

session = Session(
    "work_dirs/huggingface",
    strategy=sys.argv[1] if sys.argv[1:] else None,
    accumulative_counts=2,
    clip_grad=dict(max_norm=1.0),
    amp="bfloat16" if sys.argv[2:] == ["bf16"] else None,
    randomness=dict(seed=0),
)
# A small one with random weights; as a rule: BertForSequenceClassification.from_pretrained(...).
shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))
words = torch.randint(5, 100, (600, 12), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": row, "labels": (row[0] > 52).long()} for row in words]
train, val = DataLoader(samples[:500], batch_size=16, shuffle=True), DataLoader(samples[500:], batch_size=16)

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
model, optimizer, loader = session.prepare(model, optimizer, train, schedulers=[schedule])
val_loader = session.prepare_evaluation(val)
for _ in session.epochs(4):
    for batch in loader:
        session.step(model(**batch).loss)
        if session.is_update:
            schedule.step()
    model.eval()
    with torch.no_grad():
        hits = [session.gather(model(**batch).logits.argmax(1) == batch["labels"]) for batch in val_loader]
    session.log_metrics(accuracy=torch.cat(hits).float().mean().item())
