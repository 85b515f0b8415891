"""``specdraft forecast RUN...``: how much data and training is enough; ``--help`` says more."""

import json
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specdraft.entry import CONF, entry_point


@entry_point(CONF, "forecast")
def run(config: DictConfig) -> None:
    """Read the runs, fit their learning curves, print what to expect; write JSON and a page."""
    # Imported here so that --help answers at once.
    from specdraft.files import write_text
    from specdraft.forecast import forecast, html, table

    found, charts = forecast(config.runs, config.factors, config.worth, config.seed)
    output = Path(HydraConfig.get().runtime.output_dir)
    print(table(found))
    print(f"\nresults: {write_text(output / 'forecast.json', json.dumps(found, indent=2, allow_nan=False))}")
    print(f"report:  {write_text(output / 'forecast.html', html(found, charts))}")


def main() -> None:
    """Words that are neither settings nor options are runs, as a shell expands them from ``runs/*``."""
    words = sys.argv[1:]
    runs = [word for word in words if "=" not in word and not word.startswith("-")]
    if runs and not {"-c", "--cfg", "-p", "--package", "--info", "-i"} & set(words):
        sys.argv[1:] = [f"runs={json.dumps(runs)}", *(word for word in words if word not in runs)]
    run()


if __name__ == "__main__":
    main()
