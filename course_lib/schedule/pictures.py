"""A schedule as a picture."""

from __future__ import annotations

from .actions import Backward, Schedule
from .chain import Chain
from .referee import Referee

# Apart in lightness too, for readers who see no colours and for grey prints.
COLORS = {"all": "#228833", "input": "#224488", "nothing": "#BBBBBB", "backward": "#EE6677"}


def draw(schedule: Schedule, ax, chain: Chain | None):
    """`Schedule.plot`."""
    import matplotlib.pyplot as plt
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    def boxes(spans: list[tuple], kind: str, **look) -> None:
        found = [Rectangle((start, i - 0.5), end - start, 1.0) for i, start, end, what in spans if what == kind]
        ax.add_collection(PatchCollection(found, facecolor=COLORS[kind], **look))

    if chain is None:
        chain = Chain.uniform(1 + max(action.stage for action in schedule))
    ax = plt.subplots()[1] if ax is None else ax
    runs, kept = _spans(schedule, chain)
    boxes(kept, "all", alpha=0.25, linewidth=0)
    boxes(kept, "input", alpha=0.35, linewidth=0)
    for what in COLORS:
        edge = {"edgecolor": "#888888", "linewidth": 0.6} if what == "nothing" else {"linewidth": 0}
        boxes(runs, what, **edge)
    ax.set(xlim=(0, max(end for _, _, end, _ in runs) or 1), ylim=(-0.5, len(chain) - 0.5))
    ax.set(xlabel="time", ylabel="stage")
    labels = {"all": "keep all", "input": "keep input", "nothing": "keep nothing", "backward": "backward"}
    ax.legend(handles=[Patch(color=COLORS[what], label=label) for what, label in labels.items()], fontsize="small")
    return ax


def _spans(schedule: Schedule, chain: Chain) -> tuple[list[tuple], list[tuple]]:
    """(stage, start, end, kind) of what runs; (stage, start, end, "all" or "input") of what is kept meanwhile."""
    referee, now, runs, kept = Referee(chain), 0.0, [], []
    since: dict[tuple[int, str], float] = {}
    for action in schedule:
        referee.take(action)
        start, now = now, now + referee.times[-1]
        runs.append((action.stage, start, now, "backward" if isinstance(action, Backward) else action.keep))
        # x_L belongs to no stage as an input; it is drawn with the last stage's "all".
        alive = {(i, "input") for i in referee.inputs if i < len(chain)} | {(i, "all") for i in referee.saved}
        for value in alive - since.keys():
            since[value] = start
        for value in since.keys() - alive:
            kept.append((value[0], since.pop(value), now, value[1]))
    kept += [(i, start, now, what) for (i, what), start in since.items()]
    return runs, kept
