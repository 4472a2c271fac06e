"""The first and the last message of a response."""

from __future__ import annotations

from proto.kvferry.v1 import inference_pb2 as pb
from router.ledger import RequestLedger
from router.prepared_request import PreparedRequest
from router.resume import prompt_digest


def started(prepared: PreparedRequest) -> pb.GenerateResponse:
    """The request was accepted, with every parameter in force."""
    request, sampling = prepared.request, prepared.sampling
    message = pb.Started(
        server_request_id=prepared.id,
        request_id=request.label,
        model=request.model,
        sampling=pb.SamplingOptions(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            n=request.n,
            best_of=request.best_of,
            presence_penalty=sampling.rules.presence_penalty,
            frequency_penalty=sampling.rules.frequency_penalty,
            repetition_penalty=sampling.rules.repetition_penalty,
            logit_bias=dict(sampling.rules.bias),
            allowed_token_ids=sampling.rules.allowed_token_ids,
            bad_words=request.bad_words,
        ),
        stopping=pb.StoppingOptions(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            time_limit_s=request.time_limit_s,
        ),
        tier=request.tier,
        num_prompt_tokens=len(prepared.prompt_token_ids),
        prompt_token_ids=prepared.prompt_token_ids if request.carries.prompt_token_ids else (),
        prompt_digest=prompt_digest(prepared.prompt_token_ids),
    )
    return pb.GenerateResponse(started=message)


def completed(prepared: PreparedRequest, num_output_tokens: int, ledger: RequestLedger) -> pb.GenerateResponse:
    """Usage and timings."""
    usage = pb.Usage(
        prompt_tokens=len(prepared.prompt_token_ids),
        completion_tokens=num_output_tokens,
        cached_tokens=ledger.num_cached_tokens,
    )
    return pb.GenerateResponse(completed=pb.Completed(usage=usage, timings=ledger.timings()))
