"""The kinds of panels of the dashboards, built with Grafana's own types. Contains no metric names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models.dashboard import Dashboard, DashboardCursorSync, DashboardLinkType, DataSourceRef
from grafana_foundation_sdk.models.dashboard import VariableRefresh as Refresh
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "pilotfish"
WIDTH = 24  # columns of Grafana's grid
ALL = ".*"

Kind = Literal["lines", "stack", "heat", "number"]
PanelBuilder: TypeAlias = timeseries.Panel | heatmap.Panel | stat.Panel


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are (PromQL, legend), `unit` is Grafana's name of it, `help` explains how to read it."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    help: str
    kind: Kind = "lines"
    span: int = 8  # columns, of WIDTH

    def build(self) -> PanelBuilder:
        """Return the panel as a Grafana builder."""
        panel = _NEW[self.kind]()
        panel = panel.title(self.title).description(self.help).unit(self.unit).datasource(SOURCE)
        for name, (expr, legend) in zip("ABCDEFGH", self.queries, strict=False):
            panel = panel.with_target(self._target(name, expr, legend))
        return panel.span(self.span).height(4 if self.kind == "number" else 8)

    def _target(self, name: str, expr: str, legend: str) -> prometheus.Dataquery:
        target = prometheus.Dataquery().ref_id(name).expr(expr).legend_format(legend).datasource(SOURCE)
        if self.kind == "heat":
            return target.format(PromQueryFormat.HEATMAP)
        return target.exemplar("histogram_quantile" in expr)


def _lines() -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(shapes.LegendDisplayMode.LIST)
    panel = timeseries.Panel().legend(legend.placement(shapes.LegendPlacement.BOTTOM).calcs([]))
    return panel.min(0).line_width(1).fill_opacity(8).show_points(shapes.VisibilityMode.NEVER)


def _stack() -> timeseries.Panel:
    return _lines().fill_opacity(40).stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))


def _heat() -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    linear = common.ScaleDistributionConfig().type(shapes.ScaleDistribution.LINEAR)
    return heatmap.Panel().calculate(False).color(color).scale_distribution(linear)


def _number() -> stat.Panel:
    values = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return stat.Panel().reduce_options(values).graph_mode(shapes.BigValueGraphMode.AREA).no_value("none")


_NEW: Mapping[Kind, Callable[[], PanelBuilder]] = {"lines": _lines, "stack": _stack, "heat": _heat, "number": _number}


def board(name: str, title: str, panels: Sequence[Panel]) -> Dashboard:
    """Return a dashboard with selectors for the data source and the instances, and links to the others on top."""
    others = dashboard.DashboardLink("Pilotfish").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    built = (
        dashboard.Dashboard(title)
        .uid(f"pilotfish-{name}")
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others.as_dropdown(True).include_vars(True).keep_time(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_instances())
    )
    for panel in panels:
        built = built.with_panel(panel.build())
    finished = built.build()
    for number, panel_of_board in enumerate(finished.panels or (), 1):
        panel_of_board.id_val = number
    return finished


def _instances() -> dashboard.QueryVariable:
    query = "label_values(pilotfish_build_info, instance)"
    variable = dashboard.QueryVariable("instance").label("Instance").datasource(SOURCE).query(query)
    return variable.refresh(Refresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(ALL)
