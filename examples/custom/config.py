"""The digits example with a custom hook and metric: lockstep train examples/custom/config.py --nproc 2."""

from custom import TimeBudget, WorstClass

from lockstep.evaluator import Accuracy

_base_ = "../digits/config.py"

work_dir = "work_dirs/custom"

val_evaluator = [dict(type=Accuracy), dict(type=WorstClass)]
custom_hooks = [dict(type=TimeBudget, seconds=60)]

train_cfg = dict(max_epochs=100)
default_hooks = dict(checkpoint=dict(save_best="worst_class_accuracy"))
