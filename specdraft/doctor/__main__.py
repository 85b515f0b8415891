"""``python -m specdraft.doctor checkpoint=PATH [target.name=...]``; ``--help`` says more."""

from specdraft.commands.doctor import main

if __name__ == "__main__":
    main()
