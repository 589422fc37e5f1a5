"""Serving: generations of many clients on a model whose experts are spread over ranks.

`scheduler` turns a queue of generations into plans, `core` has them carried out, `channel` sends them to all ranks,
`text` makes text of tokens, `http` speaks OpenAI's protocol over `connections`.
"""
