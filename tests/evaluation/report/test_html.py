"""The page says what the evaluation holds; in a real browser it shows, fits a phone and follows its dark mode."""

import re
import shutil
import subprocess
from html import unescape

import pytest

from specdraft.evaluation.report.comparison import gather
from specdraft.evaluation.report.html import html
from tests.evaluation.written import evaluation

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium found: install it to see the report as readers do")

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
    page.querySelectorAll("svg.chart").length, wide, style("svg .series-0", "color")].join("|");
};</script>"""


def text(page: str) -> str:
    """What a reader reads, in one line."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)).split())


def test_numbers_settings_and_advice_are_shown():
    page = text(html(evaluation()))
    for words in (
        "2.10 acceptance length at temperature 0",
        "2.10× measured speedup over the same loop without drafting",
        "36% of the drafted tokens accepted, K = 3",
        "90% distinct 4-grams",
        "Draft 3 tokens. --speculative-config '{",
        "Without drafting 60.0 tokens/s; 90% of the 4-grams",
        "eagle3 · greedy drafts 2.10 [1.80, 2.40] 2.10 [1.80, 2.40] 0.360 120.5 2.10 [1.80, 2.40] 0.100 1.20 3.0",
        "code · eagle3 2.10",
        "eagle3, temperature 0, code: 100% of the text was drafted",
        "<no>",
        "temperatures 0.0, 1.0",
        "target name: organization/a_name",
        "torch 2",
        "2026-01-02 00:00",
    ):
        assert words in page, words
    assert "differ from" not in page and "None" not in page


def test_what_is_unknown_is_a_dash_and_what_is_empty_has_no_heading():
    bare = evaluation() | {"cost_models": [], "checks": [], "advice": [], "samples": [], "categories": []}
    bare["results"] = [bare["results"][0] | {"speedup": None, "speedup_interval": None}]
    bare["baseline"] = bare["baseline"][:1]
    page = text(html(bare))
    assert "– measured speedup" in page and "120.5 – 0.100" in page
    for heading in (
        "Speedup of decoding",
        "Side by side",
        "By category",
        "decoded text",
        "Predicted by",
        "Temperature 1",
    ):
        assert heading not in page, heading


@pytest.mark.parametrize(
    ("ulps", "lossless", "words"),
    [
        ([1.0, 2.5], True, "These are near-ties: the logits of the first tokens that differ are up to 2.5 units"),
        ([300.0, None], False, "NOT LOSSLESS: one answer ends where the other goes on."),
    ],
)
def test_differing_answers_and_lossy_rules_are_said_at_the_top(ulps, lossless, words):
    recorded = evaluation()
    recorded["results"][0] |= {
        "differences": [{"ulps": each} for each in ulps],
        "lossless": lossless,
        "divergence": 0.1,
    }
    top = text(html(recorded)).partition("Draft 3 tokens.")[0]
    assert f"2 of 4 answers of eagle3 differ from the target's own at temperature 0. {words}" in top
    assert "the first token of a round of eagle3 is 0.100 (total variation" in top


def test_several_drafters_are_named_with_their_figures():
    page = text(html(gather([evaluation("eagle3", "a"), evaluation("medusa", "b")])))
    assert page.startswith("eagle3 a, medusa b for organization/") and "eagle3 a: acceptance length at" in page


def test_nothing_in_an_evaluation_can_break_the_page():
    recorded = evaluation("<b>&")
    recorded["settings"]["benchmark"] = recorded["machine"]["processor"] = "<i>'\""
    page = html(recorded)
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "<i>'" not in page
    assert "<script" not in page and "http" not in page


def browse(folder, address, *options):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--allow-file-access-from-files", *options, f"file://{folder / address}"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout


@in_browser
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
    assert first == ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)")


@in_browser
def test_a_screenshot_shows_something(tmp_path):
    gathered = gather([evaluation("eagle3", "a"), evaluation("medusa", "b")])
    (tmp_path / "report.html").write_text(html(gathered), encoding="utf-8")
    browse(tmp_path, "report.html", f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1000,1600")
    picture = (tmp_path / "shot.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000  # an empty page compresses to a tenth of that
