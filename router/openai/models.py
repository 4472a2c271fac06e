"""`/v1/models`: every name and alias that requests may use."""

from __future__ import annotations

from typing import Any

from kvferry.errors import NotFound, Unavailable
from router.models import Model
from router.openai.endpoint import Call

OWNER = "kvferry"


async def list_models(call: Call) -> None:
    """`GET /v1/models`."""
    models = call.serving.parts.models.all
    data = [_card(call, model, name) for model in models for name in (model.name, *model.aliases)]
    await call.exchange.answer({"object": "list", "data": data})


async def show_model(call: Call) -> None:
    """`GET /v1/models/{name}`; a name may hold slashes."""
    name = call.exchange.path_params["name"]
    if not name:
        raise NotFound("model: no name is given", field="model")
    await call.exchange.answer(_card(call, call.serving.parts.models.find(name), name))


def _card(call: Call, model: Model, name: str) -> dict[str, Any]:
    """vLLM's: an alias has the model's name as its root."""
    return {
        "id": name,
        "object": "model",
        "created": call.started_s,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": _max_context(call, model),
    }


def _max_context(call: Call, model: Model) -> int | None:
    """None until a worker has told."""
    try:
        return model.limits(call.serving.parts.config).max_context
    except Unavailable:
        return None
