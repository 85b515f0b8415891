"""What would make ranks wait for each other, or count otherwise than one, is found."""

from specdraft.check import Level
from tests.check.mine import failure, outcome

ALIGN = "alignment = align(batch, self.steps)"
START = "    def start("
COUNT = """
    def count_supervised(self, batch):
        from specdraft.drafters.alignment import count_supervised

        return count_supervised(batch, self.steps)

    def start("""


def test_a_batch_with_nothing_to_learn_goes_the_same_way():
    empty = f"{ALIGN}\n        if not len(alignment.supervised[0]): return TrainingLoss(torch.zeros(()), {{}})"
    more = ("import constructor_arguments", "import constructor_arguments, TrainingLoss")
    said = failure("ranks", (ALIGN, empty), more)
    assert "in a batch with nothing to learn" in said


def test_calls_that_depend_on_the_batch_are_found():
    longer = f"{ALIGN}\n        if batch.input_ids.numel() > 50: self.norm_state(features.last)"
    assert "calls other modules" in failure("ranks", (ALIGN, longer))


def test_hits_that_are_promised_are_told():
    told = "objective(weights, teacher, steps, self.divergence))"
    silent = (told, f"{told[:-1]}._replace(drafted=None))")
    found = outcome("totals", silent)
    assert found.level is Level.FAILED and "set tells_hits = False in the class" in found.sentence
    owned = ("    def start(", "    tells_hits = False\n\n    def start(")
    assert outcome("totals", silent, owned).level is not Level.FAILED


def test_totals_are_minded():
    assert outcome("totals").level is Level.NOT_APPLICABLE
    takes = (
        "def training_loss(self, batch, features, target)",
        "def training_loss(self, batch, features, target, totals=None)",
    )
    found = outcome("totals", (START, COUNT), takes)
    assert found.level is Level.FAILED and "total=totals[s]" in found.sentence
    minded = ("weight=self.step_decay**step)", "weight=self.step_decay**step, total=totals and totals[step])")
    assert outcome("totals", (START, COUNT), takes, minded).level is Level.PASSED
