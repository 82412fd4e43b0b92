#!/usr/bin/env bash
# Software: transformers 5.23.0, Jinja2 3.1.6
# Expected: a chat template is Jinja: jinja2 renders the tools of a request to the text that
#   apply_chat_template makes.
# Seen: transformers replaces the filter tojson. Jinja's own sorts the keys and writes <, >
#   and & and ' as \u003c and the like, for HTML. A server that renders by plain jinja2
#   shows the model another text than it was trained on.
# Output:
#   transformers: {"name": "search", "description": "price < 5 & 'new'"}
#   jinja2:       {"description": "price \u003c 5 \u0026 \u0027new\u0027", "name": "search"}
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 Jinja2==3.1.6 tokenizers==0.23.3

cat >"$work/finding.py" <<'PY'
import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
tools = [{"name": "search", "description": "price < 5 & 'new'"}]
backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
messages = [{"role": "user", "content": "hello"}]
by_transformers = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
by_jinja = jinja2.Template(template).render(tools=tools)
print("transformers:", by_transformers)
print("jinja2:      ", by_jinja)
assert by_transformers == '{"name": "search", "description": "price < 5 & \'new\'"}'
assert by_jinja.startswith('{"description": "price \\u003c 5 \\u0026 \\u0027new')
PY
"$work/venv/bin/python" "$work/finding.py"
