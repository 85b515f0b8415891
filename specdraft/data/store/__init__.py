"""Hidden states on disk: computed once, read by many trainings (``specdraft store``)."""

from specdraft.data.store.contents import Contents, describe
from specdraft.data.store.reader import Store, StoredBatch, StoredData
from specdraft.data.store.writer import StoreWriter

__all__ = ["Contents", "Store", "StoreWriter", "StoredBatch", "StoredData", "describe"]
