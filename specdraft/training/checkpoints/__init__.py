"""What a run leaves behind and goes on from: one file, whatever the strategy and the number of ranks."""
