"""Harmless advice that would hide what matters on a terminal."""

import logging
import warnings

from transformers.utils import logging as transformers_logging

_HARMLESS = (
    r".*does not have many workers.*",  # packed sequences lie in memory
    r"The number of training batches .* is smaller than the logging interval.*",  # lines are logged by step, not epoch
    r".*isinstance\(treespec, LeafSpec\).*",  # inside Lightning
    r"The dirpath has changed from.*",  # a resumed run has a directory of its own; the best head is brought along
    r".*ended before the epoch ended and your dataloader is not resumable.*",  # the data module resumes it
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r"It is recommended to use `self\.log\(.*sync_dist=True.*",  # the counts are summed over ranks before
    r"`torch\.distributed\.\w+_tensor` is deprecated.*",  # inside DeepSpeed
    r"Starting from v1\.9\.0, `tensorboardX`.*",
)


def silence_warnings() -> None:
    """Hide Lightning's banners and the warnings above; everything else still shows."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("httpx", "httpx2"):  # a line for every request
        logging.getLogger(name).setLevel(logging.WARNING)
    # Why the launcher kills the first rank when another one has ended.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()  # of loading weights
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
