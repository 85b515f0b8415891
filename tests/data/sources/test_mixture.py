from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.mixture import Mixture
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.errors import UserError
from tests.data.written import chat, write

CONF = Path(__file__).parents[3] / "conf"


def test_mixtures_keep_their_proportions_in_every_prefix(tmp_path: Path, library: Path) -> None:
    many = Conversations(write(tmp_path / "many.jsonl", [chat(n) for n in range(300)]))
    code = PythonStdlib(root=str(library))
    mixture = Mixture({"many": many, "code": code}, {"many": 3, "code": 1})
    found = mixture.conversations("train")
    for size in (4, 40, 200):
        assert abs(sum(c.id.startswith("many:") for c in found[:size]) - 0.75 * size) <= 1
        assert list(mixture.conversations("train", size)) == found[:size]
    assert sum(c.id.startswith("many:") for c in found) == len(many.conversations("train"))  # the first to end
    assert len(found) < 1.4 * len(many.conversations("train"))
    assert mixture.name == f"75% {many.name} + 25% python-stdlib"
    for weight in (0, "many"):
        with pytest.raises(UserError, match="a positive weight for each source"):
            Mixture({"many": many}, {"many": weight})  # type: ignore[dict-item]


def test_the_shipped_mixture() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides=["data=mixture"])
        missing = compose("train", overrides=["data=messages"])
    assert instantiate(config.data).preparation.source.name == "75% HuggingFaceH4/ultrachat_200k + 25% python-stdlib"
    assert OmegaConf.is_missing(missing.data, "path")
