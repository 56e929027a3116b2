"""LoRA: small trainable matrices, added by peft to the frozen weights of a model of transformers."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from lockstep import Session

session = Session(
    "work_dirs/lora",
    strategy=sys.argv[1] if sys.argv[1:] else None,
    randomness=dict(seed=0),
)
# A small one with random weights; as a rule: BertForSequenceClassification.from_pretrained(...).
shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["classifier"]))
words = torch.randint(5, 100, (600, 12), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": row, "labels": (row[0] > 52).long()} for row in words]
train, val = DataLoader(samples[:500], batch_size=16, shuffle=True), DataLoader(samples[500:], batch_size=16)

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
model, optimizer, loader = session.prepare(model, optimizer, train)
val_loader = session.prepare_evaluation(val)
for _ in session.epochs(4):
    for batch in loader:
        session.step(model(**batch).loss)
    model.eval()
    with torch.no_grad():
        hits = [session.gather(model(**batch).logits.argmax(1) == batch["labels"]) for batch in val_loader]
    session.log_metrics(accuracy=torch.cat(hits).float().mean().item())
