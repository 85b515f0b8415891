"""Lightning callbacks, wired in ``conf/callbacks``: live acceptance, checkpoints, guards, progress, samples."""
