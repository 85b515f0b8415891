"""A look at other documents, or at what is to be predicted, and positions of the batch are found."""

from tests.check.mine import failure

LAST = "last = features.last.flatten(0, 1)"
READ = "state = self.read(state, alignment.tokens[at + 1 + step])"


def test_a_mean_over_the_batch_is_a_leak():
    assert "beside other" in failure("documents", (LAST, f"{LAST}; last = last + last.mean(0)"))


def test_the_token_to_predict_is_not_read():
    assert "no look at what comes behind" in failure("future", (READ, READ.replace("1 + step", "2 + step")))


def test_the_hidden_state_of_the_next_token_is_not_read():
    assert "no look at what comes behind" in failure("future", ("last[before], []", "last[before + 2], []"))


def test_places_in_the_batch_are_no_positions():
    change = ("last[before], []", "last[before] + 0.1 * before[:, None].to(last.dtype), []")
    assert "begin at 0 with every document" in failure("positions", change)
