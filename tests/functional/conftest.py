"""One thread for these tests."""

from helpers.threads import one_thread  # noqa: F401
