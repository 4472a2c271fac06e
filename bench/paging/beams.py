"""Which beam extends which: recorded from real beam searches, replayed in simulations.

A recording is one string a step; character j of it is the number of the beam that the next beam j extends. Only that
decides which blocks beams share, the tokens do not matter. `python -m bench paper --record-beams` records anew.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.beam import BeamSearch
from engine.forward_batch import Candidate
from kvferry.config import load_config
from kvferry.model_store import ModelStore
from kvferry.sampling import BeamParams, SamplingParams

STORED = Path(__file__).parents[1] / "data" / "beams.json"
WIDTHS = (2, 4, 6)
NUM_STEPS = 256
PROMPTS = (
    "Explain to a new colleague how a paged memory works and why operating systems use it.",
    "Tell the story of a ferry that crosses a river every night, and of the people on board.",
    "Translate into German, sentence by sentence: The harbour was quiet. Nobody had seen the ship. It came at dawn.",
)
CHOSEN_STEP, UNCHOSEN = 1.0, -1e6
"""Log-probabilities that make a search choose as recorded: beams a whole unit apart, all others far below."""


@dataclass(frozen=True, slots=True)
class BeamRecording:
    """One search. `parents`: one string a step, from the second token on."""

    width: int
    prompt: str
    num_prompt_tokens: int
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeamRecordings:
    """All searches and where they come from."""

    source: str
    runs: tuple[BeamRecording, ...]

    def of_width(self, width: int) -> tuple[BeamRecording, ...]:
        return tuple(run for run in self.runs if run.width == width)


def load(path: Path = STORED) -> BeamRecordings:
    plain = json.loads(path.read_text(encoding="utf-8"))
    return BeamRecordings(
        plain["source"], tuple(BeamRecording(**{**run, "parents": tuple(run["parents"])}) for run in plain["runs"])
    )


def store(recordings: BeamRecordings, path: Path = STORED) -> None:
    path.write_text(json.dumps(dataclasses.asdict(recordings), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def steering_candidates(parents: str, beam: int) -> tuple[Candidate, ...]:
    """Candidates of live beam `beam` with which a search whose beams lie a unit apart goes on as `parents` says.

    Beam number i has the sum -i before and after: the child j of parent i needs i - j.
    """
    children = [child for child, parent in enumerate(parents) if int(parent) == beam]
    chosen = [Candidate(child, CHOSEN_STEP * (beam - child)) for child in children]
    return tuple(chosen) or (Candidate(len(parents), UNCHOSEN),)


def record(report: Callable[[str], None]) -> BeamRecordings:
    """Runs beam searches of the default model; minutes. End of sequence is banned, so that every search is long."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    name = "smollm2-135m-instruct"
    folder = ModelStore(load_config().model.cache_path).prepare(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    runs = []
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for width in WIDTHS:
            parents = _search(model, tokens, width, tokenizer.eos_token_id)
            runs.append(BeamRecording(width, prompt, len(tokens), parents))
            report(f"recorded {len(runs)} of {len(PROMPTS) * len(WIDTHS)} beam searches")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    source = f"{name}, float32, {NUM_STEPS} tokens each, end of sequence banned, length penalty 1; {today}"
    return BeamRecordings(source, tuple(runs))


def _search(model: Any, tokens: Sequence[int], width: int, eos_token_id: int) -> tuple[str, ...]:
    import torch

    sampling = SamplingParams(max_tokens=NUM_STEPS, min_tokens=NUM_STEPS, eos_token_ids=(eos_token_id,))
    search = BeamSearch(BeamParams(width), sampling, model.config.vocab_size)
    recorded: list[str] = []
    input_ids, cache = torch.tensor([list(tokens)]), None
    with torch.inference_mode():
        while True:
            output = model(input_ids=input_ids, past_key_values=cache, use_cache=True)
            best = output.logits[:, -1].float().log_softmax(-1).topk(search.num_candidates)
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            steps = search.advance([[Candidate(*pair) for pair in zip(*row, strict=True)] for row in rows])
            if not steps:
                return tuple(recorded[1:])  # at the first all extend the one beam there is
            recorded.append("".join(str(step.parent) for step in steps))
            cache = output.past_key_values
            cache.reorder_cache(torch.tensor([step.parent for step in steps]))
            input_ids = torch.tensor([[step.token_id] for step in steps])
