"""Chat templates tell in which form their models write calls."""

from __future__ import annotations

import pytest

from router.tools.formats import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat, tool_format

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- \"# Tools\\n<tools>\" }}{%- for tool in tools %}"
    "{{- tool | tojson }}{%- endfor %}"
    '{{- "</tools>\\n\\n" }}{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}'
    "{%- endif %}"
)
QWEN_CODER = "{{- '<tool_call>\\n<function=example>\\n<parameter=a>' }}{{ tool_call.arguments | items }}"
GLM = "{{ '<tool_call>' ~ name }}{% for k, v in arguments.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}"
LLAMA = (
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\''
    '}}{{- \'{"name": "\' + tool_call.name + \'", \' }}{{- \'"parameters": \' }}{{- "<|eot_id|>" }}'
)
NEMO = '{{- "[TOOL_CALLS] [" }}{{- tool_call.function|tojson }}{{- \', "id": "\' + tool_call.id }}'
SMALL = "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((QWEN, HERMES), (QWEN_CODER, None), (GLM, None), (LLAMA, LLAMA3_JSON), (NEMO, MISTRAL), (SMALL, None)),
        *(("{{ messages[0].content }}", None), ("", None)),
    ],
)
def test_the_template_says_which(template: str, expected: ToolFormat | None) -> None:
    assert tool_format("auto", template) is expected
    assert tool_format("none", template) is None
    assert tool_format("mistral", template) is MISTRAL
