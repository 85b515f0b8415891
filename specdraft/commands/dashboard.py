"""``specdraft dashboard project=NAME``: give a W&B project the view of ``conf/dashboard.yaml``.

Each call makes a view of its own; what others have arranged in the project stays."""

import json
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdraft.entry import CONF, entry_point
from specdraft.errors import UserError
from specdraft.text import reason


def build_workspace(layout: Mapping[str, Any], entity: str) -> Any:
    """The workspace that ``layout`` describes, not yet saved. Raises UserError for a panel that shows nothing."""
    try:
        import wandb_workspaces.workspaces as ws
    except ModuleNotFoundError as error:
        mend = "pip install 'specdraft[dashboard]', then repeat the command"
        raise UserError(f"the package wandb-workspaces is not installed: {mend}") from error

    sections = []
    for section in layout["sections"]:
        panels, columns = [_panel(panel) for panel in section["panels"]], section["columns"]
        grid = ws.SectionLayoutSettings(columns=columns, rows=-(-len(panels) // columns))
        sections.append(ws.Section(name=section["name"], panels=panels, is_open=True, layout_settings=grid))
    return ws.Workspace(entity=entity, project=layout["project"], name=layout["name"], sections=sections)


def _panel(panel: Mapping[str, Any]) -> Any:
    import wandb_workspaces.reports.v2 as wr

    match dict(panel):
        case {"table": name, **rest} if not rest:
            return wr.WeavePanelSummaryTable(table_name=name)
        case {"title": title, "y": names, **rest} if not rest:
            return wr.LinePlot(title=title, y=list(names))
        case {"title": title, "regex": pattern, **rest} if not rest:
            return wr.LinePlot(title=title, metric_regex=pattern)
    raise UserError(f"the panel {dict(panel)} is unknown: expected title and y, title and regex, or table")


@entry_point(CONF, "dashboard")
def main(config: DictConfig) -> None:
    """Build the view; print it, or save it and say where it is."""
    layout: Any = OmegaConf.to_container(config, resolve=True)
    if config.plan:
        workspace = build_workspace(layout, config.entity or "you")
        print(json.dumps(workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True), indent=2))
        return
    import wandb

    try:
        workspace = build_workspace(layout, str(config.entity or wandb.Api().default_entity))
        workspace.save()
    except UserError:
        raise
    except Exception as error:  # of the client, the network or the service
        wrong = f"W&B did not take the view ({reason(error)}): run `wandb login` and check entity and project"
        raise UserError(f"{wrong}, which must exist; plan=true shows what would be sent") from error
    print(f"view: {workspace.url}")


if __name__ == "__main__":
    main()
