"""Pictures with sliders that change the arguments of a plot."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_lib.labels import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def playground(draw: Callable[..., "Figure"], sliders: Callable[[Any], dict[str, Any]]) -> None:
    """Show a plot with sliders that change its arguments.

    The sliders need a running Jupyter kernel. Without Jupyter, the function prints a line instead.

    Args:
        draw: Function that draws the plot.
        sliders: Function that takes the module `ipywidgets`, and returns a dict from each argument
            of `draw` to a widget. The descriptions of the widgets are labels.
    """
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        print(say("The sliders need JupyterLab."))
        return

    def show(**chosen: Any) -> None:
        display(draw(**chosen))

    made = sliders(ipywidgets)
    for widget in made.values():
        widget.description = say(widget.description)
    ipywidgets.interact(show, **made)
