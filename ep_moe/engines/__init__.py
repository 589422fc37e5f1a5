"""How serving engines run on ep_moe, one module each; nothing of an engine is imported before its module is."""
