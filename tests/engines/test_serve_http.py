"""The client of engines' HTTP servers, beside a server that is a stand-in; and the tokenizer whose text names ids."""

import argparse
import asyncio
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import serve_engine
import serve_http
import serve_models
import transformers

COUNT = 100  # ids


def echo(folder: Path, options: argparse.Namespace, port: int) -> None:
    """A server that answers with the rank that was named, in both ways, and the prompt's tokens behind it."""
    import fastapi
    import uvicorn
    from fastapi.responses import StreamingResponse

    app = fastapi.FastAPI()

    @app.get("/health")
    def health() -> None:
        pass

    @app.post("/v1/completions")
    async def completions(request: fastapi.Request) -> object:
        asked = await request.json()
        assert (asked["model"], asked["temperature"], asked["ignore_eos"]) == (str(folder), 0.0, True)
        ranks = [asked.get("routed_dp_rank", 99), int(request.headers.get("x-data-parallel-rank", 99))]
        given = [str(token) for token in [*ranks, *asked["prompt"]]]
        words = given[: asked["max_tokens"]]
        base = {"id": "1", "created": 0, "model": "", "object": "text_completion"}
        if not asked.get("stream"):
            found = {"top_logprobs": [{word: -float(i) for i, word in enumerate(given[: asked["logprobs"]])}]}
            return {**base, "choices": [{"text": words[0], "index": 0, "finish_reason": "length", "logprobs": found}]}

        def chunks() -> Iterator[str]:
            for at in range(0, len(words), 2):
                choice = {"text": " ".join(["", *words[at : at + 2]]), "index": 0, "finish_reason": None}
                yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    uvicorn.run(app, host=serve_http.HOST, port=port, log_level="warning")


def failing(folder: Path, options: argparse.Namespace, port: int) -> None:
    sys.exit(3)


def server(serve: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> serve_http.HttpServer:
    monkeypatch.setattr(serve_http, "START", "fork")
    monkeypatch.setattr(serve_http.importlib.metadata, "version", lambda name: f"{name} 1.0")
    monkeypatch.setattr(serve_models, "MODELS", {"small": {**serve_models.MODELS["qwen3-30b"], "vocab_size": COUNT}})
    module = types.SimpleNamespace(serve=serve)
    return serve_http.HttpServer(module, serve_models.write_model("small", tmp_path), argparse.Namespace(engine="vllm"))


def test_tokens_are_asked_for_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> None:
        engine = server(echo, tmp_path, monkeypatch)  # while a loop runs, as in a turn
        try:
            assert engine.version == "vllm 1.0"
            found = [new async for new in engine.stream([7, 8, 9], 4, 1)]
            assert found == [[1, 1], [7, 8]]
            answer = await serve_engine.answer(engine, [5, 6, 7], 5, None, 0.0)
            assert answer.tokens == [99, 99, 5, 6, 7]
            assert await engine.first_logprobs([5, 6, 7], 4, None) == {99: -1.0, 5: -2.0, 6: -3.0}
            with pytest.raises(RuntimeError, match="a request of 9 tokens ended after 5"):
                await serve_engine.answer(engine, [5, 6, 7], 9, None, 0.0)
        finally:
            engine.close()
        assert not engine._process.is_alive()

    asyncio.run(asked())


def test_a_server_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the server ended before it was ready, with exit code 3"):
        server(failing, tmp_path, monkeypatch)


def test_words_of_the_tokenizer_are_the_numbers_of_their_ids(tmp_path: Path) -> None:
    serve_models.write_model("qwen3-30b", tmp_path, 2)
    serve_http.write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = [0, 17, 4096, 151935]
    assert tokenizer.decode(ids) == "0 17 4096 151935"
    assert tokenizer("0 17 4096 151935").input_ids == ids
    assert tokenizer("no number").input_ids == [0, 0]
