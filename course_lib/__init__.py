"""Memory-saving training in PyTorch: the library beside the course.

One lesson, one module: import the module you need (`course_lib.memory`, ...); nothing is imported
here.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("course_lib")
except PackageNotFoundError:  # a checkout on the path, as on a GPU machine that installs nothing
    __version__ = "unknown"
