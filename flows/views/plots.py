"""The charts of a run as methods, for notebooks."""

from metaloom.flows.errors import UsageError
from metaloom.flows.views.charts import Drawing, draw
from metaloom.flows.views.history import load_history
from metaloom.flows.views.run_charts import run_charts
from metaloom.flows.views.series import Chart
from metaloom.storage import Run


class Plots:
    """Draws the charts of `metaloom report`, each as a matplotlib figure that a notebook shows.

    A chart that the run does not have raises UsageError, which names the available ones.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"Plots({self._run.location}: {', '.join(self.names())})"

    def names(self) -> list[str]:
        """List the charts that the run has."""
        return [*self._charts()]

    def draw(self, name: str) -> Drawing:
        """Draw a chart by its name."""
        charts = self._charts()
        if name not in charts:
            raise UsageError(f"{self._run.location}: found no chart {name!r}; required one of {', '.join(charts)}")
        return draw(charts[name])

    def learning_curve(self) -> Drawing:
        """Average episode return before and after adaptation against environment steps."""
        return self.draw("learning_curve")

    def classes(self) -> Drawing:
        """Returns before and after adaptation, a panel for each class of task."""
        return self.draw("classes")

    def returns_by_class(self) -> Drawing:
        """Draw returns after adaptation, a line for each class of task."""
        return self.draw("returns_by_class")

    def adaptation(self) -> Drawing:
        """Draw returns of the last iteration's tasks after adaptation against returns before it."""
        return self.draw("adaptation")

    def task_returns(self) -> Drawing:
        """Draw the return of every task over training."""
        return self.draw("task_returns")

    def evaluation(self) -> Drawing:
        """Test returns of the evaluations during training."""
        return self.draw("evaluation")

    def stage_seconds(self) -> Drawing:
        """Draw the seconds per iteration by stage."""
        return self.draw("stage_seconds")

    def _charts(self) -> dict[str, Chart]:
        return {chart.name: chart for chart in run_charts(self._run, load_history(self._run))}
