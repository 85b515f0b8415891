"""``specdraft store data.store=DIR ...``: compute hidden states once, for many trainings.

Several processes, under torchrun or started one by one, share the shards."""

import os

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "store")
def main(config: DictConfig) -> None:
    """Target and data as in training; then the disk is checked, and the shards that are missing are written."""
    # Imported here so that --help answers at once.
    import torch
    from lightning import seed_everything

    from specdraft.data.places import open_place
    from specdraft.data.store import StoreWriter, describe
    from specdraft.data.store.contents import check_same, read_index
    from specdraft.data.store.encoding import find_dtype
    from specdraft.data.store.source import FeatureSource, InProcess

    if config.data.store is None:
        raise UserError(
            "there is no place to write to: expected data.store=DIR (or s3://BUCKET/DIR), as train.py takes it"
        )
    find_dtype(config.dtype)
    source: FeatureSource = build(config.features)
    place = open_place(config.data.store)
    rank = int(os.environ.get("RANK", 0))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    seed_everything(config.seed, verbose=False)
    generator = build(config.generator)
    data = build(config.data, store=None)
    check_same(place, {"settings": data.preparation.settings(), "dtype": config.dtype})  # before the target answers
    target = build(config.target)
    data.prepare(target, generator)
    # The drafter itself knows what it reads.
    vocabulary = data.draft_vocabulary(config.model.draft_vocab_size)
    drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=vocabulary)
    contents = describe(
        target,
        drafter.layers,
        drafter.reads_every_last if config.every_last is None else config.every_last,
        config.dtype,
        data.packed,
        data.preparation.settings(),
        {split: data.about(split) for split in data.packed},
        int(config.shard_mb * 2**20),
    )
    writer = StoreWriter(place, contents, data.packed)
    writer.check_disk(None if config.max_gb is None else int(config.max_gb * 1e9))

    if not writer.missing():
        source = InProcess()  # no engine has to start for nothing
    length = max(split.sequence_length for split in contents.splits.values())
    with source.open(target, drafter.layers, length) as capture:
        writer.write(capture, config.data.batch_size, show=rank == 0)
    index = read_index(place)
    if rank == 0 and index is not None:
        errors = ", ".join(f"{name} {error:.2g}" for name, error in index.relative_error.items())
        print(f"store: {place}  {contents.bytes() / 1e9:.3g} GB of {contents.dtype}, relative error {errors}")


if __name__ == "__main__":
    main()
