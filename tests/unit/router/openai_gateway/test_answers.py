"""The description tells what responses are: real ones are read with its classes."""

from __future__ import annotations

from typing import Any

import httpx

from router.openai.answers import ChatCompletion, Completion, DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from router.openai.body import Body
from router.openai.openapi import OPERATIONS, openapi, page
from tests.unit.router.openai_gateway.conftest import StartGateway

COMPLETION: dict[str, Any] = {"prompt": "AB", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CALLS: tuple[tuple[str, dict[str, Any] | None, type[Body]], ...] = (
    ("/v1/models", None, ModelList),
    ("/v1/models/tiny", None, ModelCard),
    ("/v1/completions", COMPLETION, Completion),
    ("/v1/completions", {**COMPLETION, "logprobs": 2, "return_token_ids": True, "n": 2}, Completion),
    ("/v1/chat/completions", CHAT, ChatCompletion),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "return_token_ids": True}, ChatCompletion),
    ("/tokenize", {"prompt": "AB", "return_token_strs": True}, TokenizeAnswer),
    ("/detokenize", {"tokens": [35]}, DetokenizeAnswer),
)


async def test_real_responses_are_as_described(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        for path, body, kind in CALLS:
            answer = await (http.get(path) if body is None else http.post(path, json=body))
            assert answer.status_code == 200, answer.text
            kind.model_validate_json(answer.content)
    assert {kind for _, _, kind in CALLS} == {operation.answer for operation in OPERATIONS}


def test_operations_have_ids_and_answers_and_fields_their_real_ranges() -> None:
    document = openapi()
    told = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in told}) == len(told) == len(OPERATIONS)
    schemas = document["components"]["schemas"]
    for operation in told:
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[reference.rpartition("/")[2]]["properties"]
    completion, chat = schemas["CompletionBody"]["properties"], schemas["ChatBody"]["properties"]
    assert (completion["n"]["minimum"], completion["n"]["maximum"], completion["n"]["default"]) == (1, 64, 1)
    assert completion["max_tokens"]["default"] == 16 and chat["max_tokens"].get("default") is None
    assert chat["temperature"]["minimum"] == 0 and chat["top_logprobs"]["maximum"] == 20
    html = page(document)
    assert "1 … 64; default 1; Choices returned." in html and "Gives ChatCompletion." in html
    for link in ("./health", "./metrics", "docs/api.md"):
        assert link in html
