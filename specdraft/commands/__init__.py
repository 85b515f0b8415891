"""What people run, one command a file; ``train.py``, ``evaluate.py`` and ``export`` at the top are doors to it."""
