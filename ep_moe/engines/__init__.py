"""Integrations of ep_moe into engines. Each has a folder, which alone imports its engine; all share `common`.

Nothing registers itself with an engine when it is imported: the functions that a user calls do.
"""
