"""Modules that several test files share; `helpers.x` is imported from every folder of tests."""
