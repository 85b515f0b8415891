"""The view of a W&B project: what ``conf/dashboard.yaml`` says, as the client reads it back."""

import json
import sys

import pytest
from omegaconf import OmegaConf

from specdraft.commands.dashboard import build_workspace, main
from specdraft.entry import CONF
from specdraft.errors import UserError


def test_the_dashboard_is_a_view_that_wandb_reads_back():
    layout = OmegaConf.to_container(OmegaConf.load(CONF / "dashboard.yaml"))
    workspace = build_workspace(layout, "team")
    view = workspace._to_model()
    again = type(workspace)._from_model(type(view).model_validate_json(view.model_dump_json(by_alias=True)))
    assert [section.name for section in again.sections] == ["Acceptance", "Decoded samples", "Learning", "Machine"]
    lines = [metric.name for metric in again.sections[0].panels[0].y]
    assert lines == ["acceptance_length", "validation/teacher_forced_acceptance_length"]
    assert again.sections[0].panels[1].metric_regex == "^conditional_acceptance_rate_[0-9]+$"
    assert [panel.table_name for panel in again.sections[1].panels] == ["samples", "conditional_acceptance"]
    broken = layout | {"sections": [{"name": "a", "columns": 1, "panels": [{"title": "b", "z": 1}]}]}
    with pytest.raises(UserError, match=r"the panel .* is unknown: expected title and y, title and regex, or table"):
        build_workspace(broken, "team")


def test_a_plan_prints_the_view(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specdraft", "project=ours", "entity=team", "plan=true"])
    main()
    assert json.loads(capsys.readouterr().out)["project"] == "ours"
    assert list(tmp_path.iterdir()) == []
