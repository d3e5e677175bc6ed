"""Memory-saving training in PyTorch: the library of the course.

Each lesson has a module, such as `course_lib.memory`. Import the modules that you need, because
this one imports none of them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("course_lib")
except PackageNotFoundError:  # the source folder is on the path, but the package is not installed
    __version__ = "unknown"
