"""The public service over gRPC: a shell that takes calls apart and writes messages; `serving.py` does the work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvferry import __version__
from kvferry.wire import layout_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import inference_pb2_grpc, types_pb2
from router.models import Model
from router.serving import Serving
from router.tokenizing import detokenize, tokenize
from router.validation import UNSUPPORTED_FIELDS, Limits

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

LONGEST_DEADLINE_S = 10 * 365 * 86400.0

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


GENERATE = f"{SERVICE_NAME}/Generate"
"""The rpc, for the log."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(  # type: ignore[override]  # a coroutine that writes
        self, request: pb.GenerateRequest, context: ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        deadline_s = _deadline_s(context.time_remaining())
        await self._serving.generate(request, context.invocation_metadata(), context.write, deadline_s, route=GENERATE)

    async def Abort(
        self, request: pb.AbortRequest, context: ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        tenant = self._serving.tenant(context.invocation_metadata())
        return pb.AbortResponse(aborted_request_ids=self._serving.abort(list(request.request_ids), tenant))

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: ServicerContext[pb.GetCapabilitiesRequest, pb.GetCapabilitiesResponse],
    ) -> pb.GetCapabilitiesResponse:
        self._serving.tenant(context.invocation_metadata())
        models, config = self._serving.parts.models, self._serving.parts.config
        model = models.find(request.model)
        with self._serving.answering(context.invocation_metadata()):
            limits = model.limits(config)
        paths = (worker.status.model_path for worker in model.workers.accepted if worker.status is not None)
        capabilities = types_pb2.Capabilities(
            model=limits.model,
            model_path=next(paths, ""),
            max_context=limits.max_context,
            vocab_size=limits.vocab_size,
            layout=layout_to_pb(limits.layout),
            version=__version__,
            tiers=sorted(limits.tiers, key=lambda name: limits.tiers[name]),
            default_tier=config.default_tier.name,
            max_request_bytes=limits.max_request_bytes,
            unsupported_fields=list(UNSUPPORTED_FIELDS),
        )
        listed = [
            pb.ServedModel(name=model.name, aliases=model.aliases, is_ready=not model.workers.missing)
            for model in models.all
        ]
        return pb.GetCapabilitiesResponse(
            capabilities=capabilities,
            models=listed,
            compact_json=limits.compact_json,
            default_sampling=limits.defaults.filled(pb.SamplingOptions()),
            default_max_tokens=limits.defaults.max_tokens or 0,
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse]
    ) -> pb.ListWorkersResponse:
        del request
        tenant = self._serving.tenant(context.invocation_metadata())
        workers = self._serving.parts.membership.workers
        return pb.ListWorkersResponse(workers=[worker.to_pb(shows_place=tenant.is_admin) for worker in workers])

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        with self._serving.admitted(context.invocation_metadata()):
            model, limits = self._find(request.model)
            token_ids = await tokenize(request, model, limits)
        return pb.TokenizeResponse(token_ids=token_ids, max_context=limits.max_context)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse]
    ) -> pb.DetokenizeResponse:
        with self._serving.admitted(context.invocation_metadata()):
            model, limits = self._find(request.model)
            skips = request.skip_special_tokens
            text = await detokenize(request.token_ids, model, limits, skip_special_tokens=skips, field="token_ids")
        return pb.DetokenizeResponse(text=text)

    def _find(self, name: str) -> tuple[Model, Limits]:
        model = self._serving.parts.models.find(name)
        return model, model.limits(self._serving.parts.config)


def _deadline_s(remaining_s: float | None) -> float | None:
    """On the monotonic clock; the library says None or a very long time where the call has none."""
    if remaining_s is None or remaining_s > LONGEST_DEADLINE_S:
        return None
    return time.monotonic() + remaining_s
