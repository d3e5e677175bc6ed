"""Settings of hypothesis for all tests. Without hypothesis, as on a GPU machine, its tests are
skipped."""

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    # A slow machine is not an error of the code.
    settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("course")
except ImportError:
    from unittest.mock import MagicMock

    import pytest

    st = MagicMock()

    def given(*_, **__):
        return pytest.mark.skip(reason="hypothesis is not installed")

    def settings(*_, **__):
        return lambda test: test


__all__ = ["given", "settings", "st"]
