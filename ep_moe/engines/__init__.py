"""Integrations of ep_moe into serving engines, one module each, which alone imports its engine."""
