"""Token ids of one choice in, text to show out: detokenising, stop strings, and which text is hidden.

The router has one `ChoiceText` a choice. It pushes ids in order as they arrive, in messages of any size: the result is
the same however they are grouped. A resumed request, or one that moves to another router, pushes the ids it already has
into a new `ChoiceText` and drops the text: the state is a function of the ids (half characters and half stop strings
included).

Which text and ids belong together:

- Ids run up to and including the token that ended the choice; all are counted. Later ones are overshoot, not in the
  delta.
- The text of an ending token (end of sequence, stop id) is never shown.
- Text is cut before a stop string, or behind it with `include_stop`.
- `min_tokens`: the token that ends a choice is never among the first `min_tokens` ones. A stop string that completes
  there is ordinary text; it does not match later either. One that begins there and completes later does match.
- Stop strings are looked for in the text that is shown, so not in special tokens when these are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.sampling import Finish, FinishKind
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopMatcher, StopStrings
from router.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push adds to a choice.

    Attributes:
        text: text to show now, whole characters only; may be empty while ids are not.
        token_ids: ids that belong to the choice.
        stop: set once, when a stop string ended the choice; it wins over a finish that the worker reports for the same
            or a later token.
        num_overshoot: ids of this push that came after the end; neither shown nor counted.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    stop: Finish | None = None
    num_overshoot: int = 0


class ChoiceText:
    """Text state of one choice.

    Attributes:
        num_output_tokens: ids that belong to the choice so far.
        num_overshoot: ids that came after its end.
        stop: the stop string's finish, once it was found.
    """

    __slots__ = (
        "_detokenizer",
        "_hidden",
        "_is_finished",
        "_matcher",
        "_min_tokens",
        "num_output_tokens",
        "num_overshoot",
        "stop",
    )

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        kept_special_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        ending_token_ids: frozenset[int] = frozenset(),
        continues_text: bool = False,
        goes_on_from: Detokenizer | None = None,
    ) -> None:
        """Starts before the first output token.

        Args:
            token_bytes: of the model's tokenizer.
            stops: the request's stop strings, compiled once for all its choices.
            include_stop: the stop string stays in the text.
            skip_special_tokens: special tokens add no text, but for `kept_special_ids`.
            min_tokens: see the module's page.
            ending_token_ids: ids that end the choice, so their text is hidden (`SamplingParams.ending_token_ids`).
            continues_text: a text prompt is continued, so a first space is kept.
            goes_on_from: state behind the text of a prompt that is shown before the output, half a character included.
        """
        self._detokenizer = (
            Detokenizer(
                token_bytes,
                skip_special_tokens=skip_special_tokens,
                kept_special_ids=kept_special_ids,
                continues_text=continues_text,
            )
            if goes_on_from is None
            else goes_on_from.copy()
        )
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
        self._hidden = ending_token_ids
        self._min_tokens = min_tokens
        self._is_finished = False
        self.num_output_tokens = 0
        self.num_overshoot = 0
        self.stop: Finish | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next ids, in order. After the end of the choice all of them are overshoot."""
        texts: list[str] = []
        num_taken = 0
        for token_id in token_ids:
            if self._is_finished:
                break
            num_taken += 1
            self.num_output_tokens += 1
            if token_id not in self._hidden:
                texts.append(self._shown(self._detokenizer.push(token_id)))
        num_overshoot = len(token_ids) - num_taken
        self.num_overshoot += num_overshoot
        stop = self.stop if num_taken else None
        return TextDelta("".join(texts), tuple(token_ids[:num_taken]), stop, num_overshoot)

    def finish(self) -> TextDelta:
        """Ends the choice from outside (end of sequence, length, cancel): gives the text that was held back.

        An unfinished character becomes one replacement mark. Nothing more after a stop string or a second call.
        """
        if self._is_finished:
            return TextDelta("")
        text = self._shown(self._detokenizer.flush())
        self._is_finished = True
        if self._matcher is not None and self.stop is None:
            text += self._matcher.flush()
        return TextDelta(text, stop=self.stop)

    def _shown(self, text: str) -> str:
        if self._matcher is None:
            return text
        scan = self._matcher.push(text, may_match=self.num_output_tokens > self._min_tokens)
        if scan.match is not None:
            self.stop = Finish(FinishKind.STOP_STRING, stop_string=scan.match.stop_string)
            self._is_finished = True
        return scan.text
