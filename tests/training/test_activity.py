import threading
import time

import torch

from specdraft.training.activity import Activity


class Waiting(torch.nn.Module):
    """Its forward asks where the main thread is, from another one."""

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self.activity, self.said = activity, ""

    def forward(self) -> None:
        thread = threading.Thread(target=self.ask)
        thread.start()
        thread.join()

    def ask(self) -> None:
        self.said = self.activity.where()


def test_a_stack_is_told_by_its_function_its_module_and_its_phase():
    outer = torch.nn.Module()
    activity = Activity({"drafter": outer})
    outer.add_module("inner", Waiting(activity))
    activity.beat("step 7")
    outer.inner()
    words = outer.inner.said.split(" ")
    assert words[:2] == ["in", words[1]] and words[2].startswith("(") and ".py:" in words[2]
    assert outer.inner.said.endswith("of drafter.inner during step 7")
    assert activity.where().startswith("in where (")


def test_progress_is_the_time_since_the_last_beat(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity({})
    for seconds in (3.0, 20.0, 5.0):
        now[0] += seconds
        assert activity.stalled() == seconds
        activity.beat()
    assert activity.longest == 20.0 and activity.stalled() == 0.0
    with activity.during("a measurement"):
        assert activity.phase == "a measurement"
    assert activity.phase == "between two steps"
