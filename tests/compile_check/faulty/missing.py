"""A module that does not import."""

import a_module_that_is_nowhere  # noqa: F401
