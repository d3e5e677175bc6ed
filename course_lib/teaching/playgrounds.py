"""Pictures behind sliders: things to play with where playing teaches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .languages import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def playground(draw: Callable[..., "Figure"], sliders: Callable[[Any], dict[str, Any]]) -> None:
    """Show a picture behind sliders; they need a running kernel. Without Jupyter a line says so.

    Args:
        draw: makes the picture.
        sliders: from the module `ipywidgets` to a widget for each of the picture's arguments.
    """
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        print(text("The sliders need JupyterLab.", "滑块需要在 JupyterLab 中使用。"))
        return

    def show(**chosen: Any) -> None:
        display(draw(**chosen))

    ipywidgets.interact(show, **sliders(ipywidgets))
