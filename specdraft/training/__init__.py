"""Training: the LightningModule, its callbacks (live acceptance, checkpoints), strategies, and the planner."""
