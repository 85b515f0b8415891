"""Settings of the documentation's generator: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from specdraft import __version__

project = "specdraft"
author = "the specdraft authors"
copyright = author
release = version = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["Thumbs.db", ".DS_Store"]
nitpicky = True

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = f"specdraft {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
