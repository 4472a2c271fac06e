"""lm-evaluation-harness as a client: its log-likelihoods of 50 continuations beside those of transformers in float32.

    kvferry up --dtype float32 …                       # a server of our own
    LM_EVAL/bin/python bench/lm_eval_client.py --url http://127.0.0.1:8000/v1/completions --folder MODEL_FOLDER

Run with the Python of an environment that has `lm_eval[api]`, torch and transformers; nothing of kvferry is imported.
The harness asks for the log-probabilities of the whole text with `echo` and drops the token it has to ask for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_ITEMS = 50
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"


def items() -> list[tuple[str, str]]:
    """Context and continuation: words of a text, cut at another place each time."""
    words = TEXT.read_text().split()
    pairs = []
    for number in range(NUM_ITEMS):
        part = words[7 * number : 7 * number + 12 + number]
        cut = 3 + number % 8
        pairs.append((" ".join(part[:cut]), " " + " ".join(part[cut:])))
    return pairs


@torch.inference_mode()
def expected(folder: str, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation, and whether it is the greedy one; tokens as the harness makes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = []
    for context, continuation in pairs:
        whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
        first = len(tokenizer(context, add_special_tokens=False).input_ids)
        rows = model(torch.tensor([whole])).logits[0].log_softmax(dim=-1)
        chosen = [rows[place - 1, whole[place]].item() for place in range(first, len(whole))]
        greedy = all(int(rows[place - 1].argmax()) == whole[place] for place in range(first, len(whole)))
        results.append((sum(chosen), greedy))
    return results


def main() -> None:
    """Prints the largest difference; ends with 1 where it is above 1e-3."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="of /v1/completions")
    parser.add_argument("--folder", required=True, help="the served model's folder")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its name at the server")
    parser.add_argument("--concurrent", type=int, default=4)
    options = parser.parse_args()
    client = LocalCompletionsAPI(
        base_url=options.url,
        model=options.model,
        tokenizer=options.folder,
        tokenizer_backend="huggingface",
        num_concurrent=options.concurrent,
    )
    pairs = items()
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    ours, theirs = client.loglikelihood(requests), expected(options.folder, pairs)
    worst = max(abs(one[0] - other[0]) for one, other in zip(ours, theirs, strict=True))
    num_same_greedy = sum(one[1] == other[1] for one, other in zip(ours, theirs, strict=True))
    print(
        f"{len(pairs)} items: largest difference {worst:.2e}; {num_same_greedy} of {len(pairs)} agree on being greedy"
    )
    raise SystemExit(worst > 1e-3)


if __name__ == "__main__":
    main()
