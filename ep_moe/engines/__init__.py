"""Integrations of ep_moe into engines, a folder each, which alone imports its engine; `common` is what all of them use.

Nothing registers itself with an engine when it is imported: the functions that a user calls do.
"""
