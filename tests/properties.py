"""hypothesis where it is installed; a GPU machine as it is has none, and its tests by property are
skipped there."""

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    # a slow machine is not a fault of the code
    settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("course")
except ImportError:
    from unittest.mock import MagicMock

    import pytest

    HealthCheck = st = MagicMock()

    def given(*_, **__):
        return pytest.mark.skip(reason="hypothesis is not installed")

    def settings(*_, **__):
        return lambda test: test


__all__ = ["HealthCheck", "given", "settings", "st"]
