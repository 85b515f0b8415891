import signal

import pytest

from specdraft.errors import UserError
from specdraft.training.run_lock import acquire_run_lock
from tests.training import faults_worker
from tests.training.forked import Ranks


def test_a_directory_belongs_to_one_process_until_it_ends(tmp_path):
    holder = Ranks(tmp_path / "logs", 1, faults_worker.hold, tmp_path)
    holder.wait_for("claimed")
    pid = holder.processes[0].pid
    with pytest.raises(UserError, match=rf"another run writes into {tmp_path} \(process {pid} on .*\): wait for it"):
        acquire_run_lock(tmp_path)
    holder.kill(0, signal.SIGKILL)
    assert holder.end(0) == -signal.SIGKILL
    acquire_run_lock(tmp_path)


@pytest.mark.parametrize("trained", ["drafter/config.json", "checkpoints/step-000003.ckpt"])
def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path, trained):
    acquire_run_lock(tmp_path)
    acquire_run_lock(tmp_path)  # a run that ended before it had trained anything is begun again
    (tmp_path / trained).parent.mkdir()
    (tmp_path / trained).touch()
    with pytest.raises(
        UserError, match=rf"{tmp_path} holds a run: choose another .* or continue it with resume={tmp_path}"
    ):
        acquire_run_lock(tmp_path)
    with pytest.raises(UserError, match="holds a run"):
        acquire_run_lock(tmp_path, tmp_path.parent / "checkpoints" / "step-000003.ckpt")
    acquire_run_lock(tmp_path, tmp_path / "checkpoints" / "step-000003.ckpt")
