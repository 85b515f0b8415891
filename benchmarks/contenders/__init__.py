"""The training steps that ``train_step.py`` compares, one file each, all on one problem with the same weights."""
