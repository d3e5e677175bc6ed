"""Memory-saving training in PyTorch: the library of the course.

Each lesson has a package, such as `course_lib.memory`. Import the packages that you need:
`import course_lib` alone imports none of them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("course_lib")
except PackageNotFoundError:  # the source folder is on the path, but the package is not installed
    __version__ = "unknown"
