"""Memory-saving training in PyTorch: the library beside the course.

One lesson, one module: import the module you need (`course_lib.memory`, ...); nothing is imported here.
"""

__version__ = "0.1.0"
