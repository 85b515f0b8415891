"""The report in a real browser: it shows, it fits a phone, it is dark where the reader's screen is."""

import shutil
import subprocess

import pytest

from specdraft.evaluation.report.comparison import gather
from specdraft.evaluation.report.html import html
from specdraft.evaluation.report.svg import COLORS
from tests.evaluation.written import evaluation

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium found: install it to see the report as readers do")

QUIET = (
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# The page inside a frame as wide as a phone's screen; what it needs in width, and how it came out, becomes the title.
FRAME = """<!doctype html><iframe id="page" src="report.html" width="390" height="2400"></iframe><script>
document.getElementById("page").onload = (event) => {
  const page = event.target.contentDocument, style = (at, what) => getComputedStyle(page.querySelector(at))[what];
  const wide = [...page.querySelectorAll("svg.chart")].filter((svg) => svg.getBoundingClientRect().width < 200).length;
  document.title = [page.documentElement.scrollWidth, style("body", "backgroundColor"), style("body", "color"),
    page.querySelectorAll("svg.chart").length, wide, style("svg .f0", "fill")].join("|");
};</script>"""


def browse(folder, address, *options):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--allow-file-access-from-files", *options, f"file://{folder / address}"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("dark", [False, True])
def test_fits_a_phone_in_light_and_dark(tmp_path, dark):
    (tmp_path / "report.html").write_text(html(evaluation()), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME, encoding="utf-8")
    # 0 is dark and 1 is light.
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    page = browse(tmp_path, "frame.html", "--dump-dom", "--virtual-time-budget=4000", scheme)
    width, background, text, charts, narrow, first = page.split("<title>")[1].split("</title>")[0].split("|")
    assert int(width) == 390, "the page is wider than a phone"
    assert (int(charts), int(narrow)) == (11, 0)
    assert background == ("rgb(18, 21, 27)" if dark else "rgb(246, 247, 249)")
    assert text == ("rgb(230, 233, 239)" if dark else "rgb(28, 35, 48)")
    assert (first == "rgb(0, 114, 178)") is not dark and COLORS[0] == "#0072b2"


def test_a_screenshot_shows_something(tmp_path):
    gathered = gather([evaluation("eagle3", "a"), evaluation("medusa", "b")])
    (tmp_path / "report.html").write_text(html(gathered), encoding="utf-8")
    browse(tmp_path, "report.html", f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1000,1600")
    picture = (tmp_path / "shot.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000  # an empty page compresses to a tenth of that
