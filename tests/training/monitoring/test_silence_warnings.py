import warnings

from specdraft.training.monitoring.silence_warnings import silence_warnings


def test_advice_that_is_none_is_silent_and_the_rest_is_not():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_warnings()
        warnings.warn("The 'train_dataloader' does not have many workers which may be a bottleneck", stacklevel=1)
        warnings.warn("The dirpath has changed from 'a' to 'b'", stacklevel=1)
        warnings.warn("the loss is odd", stacklevel=1)
    assert [str(each.message) for each in seen] == ["the loss is odd"]
