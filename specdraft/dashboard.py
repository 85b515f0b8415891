"""``python -m specdraft.dashboard project=NAME``: give a W&B project the view of ``conf/dashboard.yaml``."""

from specdraft.commands.dashboard import main

if __name__ == "__main__":
    main()
