#!/usr/bin/env bash
# Software: transformers 5.23.0, Jinja2 3.1.6
# Expected: a message with tool_calls and content null (OpenAI's own form) reaches the chat
#   template as it is, so that a template may ask `message['content'] is none`.
# Seen: apply_chat_template removes keys whose value is null. DeepSeek-R1-Distill's template prints
#   tool calls beside null alone: without the key it raises, and beside "" it leaves the calls out,
#   so the turn is the assistant's header and its end.
# Output:
#   null: 'dict object' has no attribute 'content'
#   "":   <Assistant><end>
#   null, by Jinja: <Assistant>weather<end>
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 Jinja2==3.1.6 tokenizers==0.23.3

cat >"$work/finding.py" <<'PY'
import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

# The two branches of DeepSeek-R1-Distill's template, with shorter tokens.
template = (
    "{% for message in messages %}"
    "{% if message['content'] is none %}<Assistant>"
    "{% for tool in message['tool_calls'] %}{{ tool['function']['name'] }}{% endfor %}<end>"
    "{% endif %}"
    "{% if message['content'] is not none %}{{ '<Assistant>' + message['content'] + '<end>' }}"
    "{% endif %}{% endfor %}"
)
call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def render(content):
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    try:
        return tokenizer.apply_chat_template([message], tokenize=False)
    except jinja2.exceptions.UndefinedError as error:
        return str(error)


null, empty = render(None), render("")
message = {"role": "assistant", "content": None, "tool_calls": [call]}
by_jinja = jinja2.Template(template).render(messages=[message])
print("null:", null)
print('"":  ', empty)
print("null, by Jinja:", by_jinja)
assert null == "'dict object' has no attribute 'content'"
assert empty == "<Assistant><end>"
assert by_jinja == "<Assistant>weather<end>"
PY
"$work/venv/bin/python" "$work/finding.py"
