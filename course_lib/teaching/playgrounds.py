"""Pictures with sliders that change the arguments of a plot."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_lib.labels import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def playground(draw: Callable[..., "Figure"], sliders: Callable[[Any], dict[str, Any]]) -> None:
    """Show a picture with sliders, which need a running kernel.

    Without Jupyter, print a line instead.

    Args:
        draw: Function that creates the picture.
        sliders: Function of the module `ipywidgets` that returns a dict from each argument of
            `draw` to a widget. The descriptions of the widgets are labels, which are shown in the
            current language.
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
