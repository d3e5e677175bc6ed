"""Memory-saving training in PyTorch: the library of the course.

Each lesson has its module. Import the modules that you need (`course_lib.memory`, ...); nothing is
imported here.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("course_lib")
except PackageNotFoundError:  # the checkout is on the path but not installed
    __version__ = "unknown"
