"""Pictures behind sliders: things to play with where playing teaches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_lib.labels import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def playground(draw: Callable[..., "Figure"], sliders: Callable[[Any], dict[str, Any]]) -> None:
    """Show a picture behind sliders; they need a running kernel. Without Jupyter a line says so.

    Args:
        draw: makes the picture.
        sliders: from the module `ipywidgets` to a widget for each of the picture's arguments; their
            descriptions are labels, said in the language in force.
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
