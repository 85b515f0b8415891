"""A store in a bucket is read from a copy on the node's own disk, which is made once."""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from specdraft.data.bucket import Bucket
from specdraft.data.store.contents import INDEX, read_index
from specdraft.errors import UserError
from specdraft.files import cache_directory, exclusive, make_directory

_AT_A_TIME = 8  # downloads


def local_copy(bucket: Bucket) -> Path:
    """The folder that holds all files of the bucket's store; those that are not there yet are downloaded, while other
    processes of the node wait. A download that was interrupted goes on where it was, by whole files.

    Raises UserError if there is no store, or an unfinished one, or the disk has no room."""
    index = read_index(bucket)
    if index is None or index.shards is None:
        state = f"there is no store at {bucket}" if index is None else f"the store {bucket} is unfinished"
        raise UserError(f"{state}: run specdraft store data.store={bucket}, which writes it or continues it")
    name = hashlib.sha256(bucket.url.encode()).hexdigest()[:16]
    folder = make_directory(cache_directory() / "stores" / name)
    with exclusive(folder.with_suffix(".lock")):
        files = [split.file for split in index.contents.splits.values()]
        files += [file for shards in index.shards.values() for file in shards]
        for stale in {file.name for file in folder.iterdir()} - {*files, INDEX}:  # of a store before
            (folder / stale).unlink()
        sizes = {file: bucket.size(file) for file in files if not (folder / file).exists()}
        needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
        if needed > free:
            said = f"the copy of {bucket} needs {needed / 1e9:,.3g} GB more, the disk of {folder} has {free / 1e9:,.3g}"
            raise UserError(f"{said} free: set SPECDRAFT_CACHE to a folder of another disk, or write dtype=float8")
        about = f"{bucket} to {folder}"
        bar = tqdm(total=needed, desc=about, unit="B", unit_scale=True, dynamic_ncols=True, disable=not sizes)
        with bar, ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = pool.map(lambda file: bucket.download(file, folder / file), sizes)
            for file, there in zip(sizes, found, strict=True):
                if not there:
                    raise UserError(f"the store {bucket} lacks {file}: run specdraft store again, which writes it")
                bar.update(sizes[file])
        bucket.download(INDEX, folder / INDEX)
    return folder
