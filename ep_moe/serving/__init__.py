"""Serving: generations of many clients on a model whose experts are spread over ranks.

`scheduler` turns a queue of generations into plans, `channel` sends them to all ranks, `core` carries them out,
`text` makes text of tokens, `http` speaks OpenAI's protocol.
"""
