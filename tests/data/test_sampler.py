import pytest

from specdraft.data.sampler import ResumableSampler
from specdraft.errors import UserError


def test_an_epoch_is_a_seeded_permutation() -> None:
    sampler = ResumableSampler(12, 3, seed=1)
    first, again = list(sampler), list(sampler)
    assert sorted(first) == list(range(12))
    assert first == again
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first
    assert list(ResumableSampler(12, 3, seed=2)) != first


def test_ranks_share_the_batches_of_one_device() -> None:
    whole = list(ResumableSampler(24, 6))
    ranks = [list(ResumableSampler(24, 2, rank=rank, world_size=3)) for rank in range(3)]
    for batch in range(4):
        together = [row for rank in ranks for row in rank[2 * batch : 2 * batch + 2]]
        assert together == whole[6 * batch : 6 * batch + 6]


def test_a_last_incomplete_batch_waits_for_another_epoch() -> None:
    sampler = ResumableSampler(10, 4)
    assert len(sampler) == len(list(sampler)) == 8


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_continues_where_it_was(world_size: int) -> None:
    def make(rank: int) -> ResumableSampler:
        return ResumableSampler(16, 2, seed=3, rank=rank, world_size=world_size)

    for rank in range(world_size):
        original = make(rank)
        original.set_epoch(2)
        resumed = make(rank)
        resumed.load_state_dict(make(0).state_dict(epoch=2, batches=3))
        assert list(resumed) == list(original)[6:]
        assert len(resumed) == len(original)
        original.set_epoch(3)
        resumed.set_epoch(3)
        assert list(resumed) == list(original)


def test_a_finished_epoch_resumes_at_the_next() -> None:
    original, resumed = ResumableSampler(16, 2), ResumableSampler(16, 2)
    resumed.load_state_dict(original.state_dict(epoch=0, batches=8))
    original.set_epoch(1)
    assert list(resumed) == list(original)


def test_other_data_is_refused() -> None:
    state = ResumableSampler(16, 2).state_dict(0, 1)
    with pytest.raises(UserError, match="num_sequences was 16, now 18"):
        ResumableSampler(18, 2).load_state_dict(state)
    with pytest.raises(UserError, match="seed was 0, now 1"):
        ResumableSampler(16, 2, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="3 sequences"):
        ResumableSampler(3, 2, world_size=2)


def test_nothing_is_taken_behind_the_last_step():
    left = 5
    sampler = ResumableSampler(32, 2, accumulate=2, steps_left=lambda: left)
    whole = list(ResumableSampler(32, 2))
    assert list(sampler) == whole[:20] and len(sampler) == 32
    left = 9  # more than the epoch has
    assert list(sampler) == whole
    left = 2
    sampler.load_state_dict(sampler.state_dict(0, 4))
    assert list(sampler) == whole[8:16]
