"""A limit on the work of a learner's answer, so that a check of a slow answer ends.

Work is counted in operators of PyTorch, not in seconds, so the verdict is the same on every
machine.
"""

from typing import Any

from course_lib._torch.modes import TorchDispatchMode
from course_lib.teaching.exercises import WrongAnswer


class WorkLimit(TorchDispatchMode):
    """A dispatch mode that ends the check of a learner's answer when the answer does too much work.

    If more than `limit` PyTorch operators run inside the `with` block, the mode raises
    `WrongAnswer`.

    Args:
        limit: Number of operators that may run.
        message: Label that explains the error to the learner. No hint is added to it.
    """

    def __init__(self, limit: int, message: str) -> None:
        super().__init__()
        self.limit, self.message, self.count = limit, message, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += 1
        if self.count > self.limit:
            raise WrongAnswer(self.message, exact=True)
        return operator(*args, **(kwargs or {}))
