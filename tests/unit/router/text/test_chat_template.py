"""Chats become prompt text as the model's template says, and template trouble fails one request only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.errors import FailedPrecondition, InvalidArgument
from router.text.chat_template import ChatMessage, ChatTemplate
from tests.support.tokenizers import CHATML_TEMPLATE, LLAMA_TEMPLATE

HELLO = [ChatMessage("user", " hello ")]
LLAMA = ChatTemplate(LLAMA_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})


def test_a_chat_is_rendered_with_and_without_the_next_turn() -> None:
    template = ChatTemplate(CHATML_TEMPLATE, {})
    turn = "<|im_start|>user\n hello <|im_end|>\n"
    assert template.render(HELLO) == turn + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == turn


def test_named_special_tokens_are_known_to_the_template() -> None:
    assert LLAMA.render([*HELLO, ChatMessage("assistant", "hi")]) == "<s>[INST] hello [/INST] hi </s>"


def test_a_model_without_template_is_told() -> None:
    with pytest.raises(InvalidArgument, match=r"prompt\.chat: the model has no chat template"):
        ChatTemplate(None, {}).render(HELLO)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"prompt\.chat: no messages"):
        LLAMA.render([])


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(InvalidArgument, match=r"prompt\.chat: .*only user and assistant roles"):
        LLAMA.render([ChatMessage("system", "be kind")])


@pytest.mark.parametrize("source", ["{{ messages + 1 }}", "{{ messages[9].role.x.y }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_on_the_messages_fails_the_request(source: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        ChatTemplate(source, {}).render(HELLO)


def test_a_template_that_cannot_be_compiled_is_the_models_fault() -> None:
    with pytest.raises(FailedPrecondition, match="cannot be compiled"):
        ChatTemplate("{% if %}", {}).render(HELLO)


def test_the_text_plane_does_not_load_torch() -> None:
    modules = "tokenizer, router.text.output_text, router.text.chat_template, router.text.control_text"
    render = "router.text.chat_template.ChatTemplate('x', {}).render([router.text.chat_template.ChatMessage('a', 'b')])"
    code = f"import router.text.{modules}, sys; {render}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
