from pathlib import Path

import pytest

from specdraft.errors import UserError
from specdraft.training.planning.gpus import find_gpu

CONF = Path(__file__).parents[2] / "conf"


def test_gpus_have_names_and_plausible_peaks():
    for name in ("a100", "h100", "h200", "b200"):
        gpu = find_gpu(name)
        assert 1e14 < gpu.flops < 1e16 and 3e10 < gpu.memory < 3e11 and gpu.network <= gpu.link < gpu.bandwidth
    with pytest.raises(UserError, match=r"planning.gpu is 'h300': expected one of a100-40gb, a100"):
        find_gpu("h300")
