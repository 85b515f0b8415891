"""Table, page and answers say what was measured; in a browser the page fits a phone and follows its dark mode."""

import re
import shutil
import subprocess
from html import unescape
from math import isfinite

import pytest

from specdraft.decoding.trace import ACCEPTED, BONUS, CORRECTED, OWN, REJECTED, Segment
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.losslessness import Difference
from specdraft.evaluation.report.comparison import gather
from specdraft.evaluation.report.pages import answer_page, drafted_share, html, table
from specdraft.evaluation.results import Request, summarize
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


# --- the table --------------------------------------------------------------------------------------------------------


SETTINGS = {"prompts": 4, "max_new_tokens": 64, "dtype": "bfloat16", "device": "cpu", "draft_tree": "chain of 4"}
SETTINGS |= {"rule": "rejection sampling", "engine": None}


@pytest.fixture
def measured(generation):
    """Build an evaluation from how many tokens were accepted in each round of each of four prompts."""

    def build(accepted, drafted=4, drafter="eagle3", temperature=0.0, difference=None, divergence=(), **settings):
        requests = []
        for prompt in range(4):
            answer = generation([0] * (1 + sum(accepted) + len(accepted)), [drafted] * len(accepted), accepted)
            answer.divergence += divergence
            baseline = generation([0] * 51, [], [])
            category = "a category with a long name" if prompt else "code"
            requests.append(Request(prompt, category, baseline, answer, [], None if prompt else difference))
        results = [summarize(requests, drafter, temperature, drafted)]
        if temperature:
            results.append(summarize(requests, drafter, temperature, drafted, drafting="sampled", beside=True))
        categories = [
            summarize([each for each in requests if each.category == name], drafter, temperature, drafted, name)
            for name in sorted({each.category for each in requests})
        ]
        return Evaluation(SETTINGS | settings, results, categories, {temperature: 0.915})

    return build


def lines(evaluation: Evaluation) -> list[str]:
    found = table(evaluation).splitlines()
    assert max(map(len, found)) <= 80 and all(line == line.rstrip() for line in found)
    return found


@pytest.mark.parametrize(("masked", "words"), [(True, ""), (False, " (not drafts)")])
def test_a_grammar_is_named(measured, masked, words):
    settings = {"grammar": "schema.json", "mask_drafts": masked}
    assert f"under the grammar schema.json{words}" in lines(measured([4, 0, 2], **settings))
    made = evaluation()
    page = text(html(made | {"settings": made["settings"] | settings}))
    assert f"under the grammar schema.json{words};" in page and "under the grammar" not in text(html(made))


def test_one_prompt_is_no_plural(measured):
    assert lines(measured([4, 0, 2], prompts=1))[0].startswith("1 prompt, up to 64 tokens each")
    made = evaluation()
    assert "1 prompt" in (page := text(html(made | {"settings": made["settings"] | {"prompts": 1}})))
    assert "1 prompts" not in page


def test_the_whole_table(measured):
    assert table(measured([4, 0, 2])) == (
        """\
4 prompts, up to 64 tokens each, drafts: chain of 4, bfloat16 on cpu
intervals: 95 %, bootstrap-t over prompts

Temperature 0: without drafting 51.0 tokens/s, distinct 4-grams 92 %
drafter        acceptance length  per request        tokens/s  speedup
eagle3         3.00 [3.00, 3.00]  3.00 [3.00, 3.00]      10.0  0.20 [0.20, 0.20]

eagle3, K = 4: draft acceptance rate 0.500, cost ratio c 0.000,
  modeled speedup 3.00; verifying 4.0 nodes costs 16.67 target steps
  position                         1     2     3     4
  conditional acceptance rate  0.667 1.000 0.500 1.000
  survival                     0.667 0.667 0.333 0.333

by category: eagle3
               acceptance length  per request        tokens/s  speedup
a cate…g name  3.00 [3.00, 3.00]  3.00 [3.00, 3.00]      10.0  0.20 [0.20, 0.20]

1 category of one request only: see the report"""
    )


def test_above_temperature_0_it_says_which_drafts_and_shows_each_category_once(measured):
    found = lines(measured([4, 0, 2], temperature=0.7, engine="vllm", benchmark="own.jsonl"))
    assert found[0] == "benchmark: own.jsonl"
    assert {"greedy drafts, as vllm drafts", "for comparison, sampled drafts"} <= set(found)
    assert sum(line.startswith("eagle3, sampled, K = 4: draft acceptance rate") for line in found) == 1
    assert found.count("by category: eagle3") == 1


def test_many_positions_and_long_acceptance_stay_within_80_columns(measured):
    found = lines(measured([17, 12, 3, 9], drafted=17, drafter="eagle3 2026-01-02_10-20-30"))
    assert [line.split()[1:] for line in found if line.startswith("  position")] == [
        [str(i) for i in range(start, min(start + 8, 18))] for start in (1, 9, 17)
    ]
    assert "eagle3…-20-30  11.2 [11.2, 11.2]  11.2 [11.2, 11.2]" in "\n".join(found)
    assert "0.000 0.000     -" not in "\n".join(found)
    short = lines(measured([1, 0], drafted=3))
    assert "  conditional acceptance rate  0.500 0.000     -" in short


def test_a_lossy_rule_says_so(measured):
    found = lines(
        measured([4, 0, 2], temperature=1.0, divergence=[0.1, 0.3], rule=f"lossy: Typical({'0.12345, ' * 9})")
    )
    assert found[2].startswith("above temperature 0 the rule is lossy: Typical(") and found[3].startswith("  0.12345")
    assert "  LOSSY: the first token of a round is 0.200 (total variation, mean) away" in found


@pytest.mark.parametrize("drafter", ["eagle3", "eagle3 of a run with a name as long as a line of the table"])
@pytest.mark.parametrize(("ulps", "near_tie"), [(2.0, True), (123456.0, False), (float("inf"), False)])
def test_differences_are_judged(measured, drafter, ulps, near_tie):
    text = " ".join(
        " ".join(lines(measured([4], drafter=drafter, difference=Difference(3, 0.1, ulps, near_tie)))).split()
    )
    what = f"1 of 4 answers of {drafter} differ from the target's own"
    gap = f"logits up to {ulps:.1f} units in the last place of bfloat16 apart"
    gap = gap if isfinite(ulps) else "one ends where the other goes on"
    assert (
        f"{what}: near-ties, {gap}" if near_tie else f"!!! NOT LOSSLESS: {what} !!! at temperature 0, {gap}"
    ) in text
    assert ("NOT LOSSLESS" in text) is not near_tie


# --- an answer, token by token ----------------------------------------------------------------------------------------


def answer(*segments: Segment) -> str:
    whole = answer_page(segments)
    assert whole.startswith("<!doctype html><html>") and whole.endswith("</pre></body></html>")
    assert "http" not in whole and "<script" not in whole and "prefers-color-scheme: dark" in whole
    for tag in ("u", "s", "b", "i", "span"):  # the key shows each
        assert re.search(rf"<p .*<{tag}>", whole)
    return whole.split('<pre class="sample">')[1].removesuffix("</pre></body></html>")


def test_marks_do_not_depend_on_color():
    drafted = (Segment("  a<b", ACCEPTED), Segment("c&", REJECTED))
    page = answer(*drafted, Segment("d", CORRECTED), Segment("e", BONUS), Segment("\n", OWN))
    assert page == "  <u>a&lt;b</u><s>c&amp;</s><b>d</b><i>e</i><span>\n</span>"


def test_without_its_rejected_drafts_the_page_shows_the_answer():
    page = answer(
        Segment("if", OWN), Segment("  not\n    x", REJECTED), Segment("\n\n a", ACCEPTED), Segment(" b", CORRECTED)
    )
    shown = re.sub(r"<s>.*?</s>", "", page, flags=re.DOTALL)
    assert re.sub(r"<.+?>", "", shown) == "if\n\n a b"


def test_the_drafted_share_leaves_rejected_drafts_out():
    recorded = [("abc", ACCEPTED), ("rejected", REJECTED), ("d", CORRECTED), ("", OWN)]
    assert drafted_share([{"text": text, "status": status} for text, status in recorded]) == pytest.approx(3 / 4)
    assert drafted_share([]) == 0


def test_a_step_stands_beside_its_roofline():
    roofline = {"bytes": 4e7, "flops": 2e7, "bandwidth": 2e10, "rate": 1e11, "step_seconds": 2e-3}
    found = evaluation() | {"roofline": roofline}
    for alone in found["baseline"]:
        alone["target_step_seconds"] = 5e-3
    page = text(html(found))
    words = "its 40 MB of weights and to compute with them takes at least 2.00 ms at the 20 GB/s"
    assert f"A step takes 5.00 ms; to read {words}" in page
    assert "roofline" not in evaluation()
