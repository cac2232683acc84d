"""Prints what Python's Jinja2, set up as in transformers, makes of expressions and templates that chat templates have, as JSON.

    .venv/bin/python data/tests/templates.py > data/tests/templates.json

`cargo test -p shoal-data templates` renders the same with the engine of this crate: each text must be equal, or the template
refused."""

import json

from transformers.utils.chat_template_utils import _compile_jinja_template

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "It's \"two\"?\n", "n": 3},
    {"role": "assistant", "content": "four", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, True]}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
]
EXPRESSIONS = """
1.0
1e16
1e-5
0.1 + 0.2
1 / 2
4 / 2
7 // 2
-7 // 2
7 % 3
-7 % 3
2 ** 10
2 ** -1
2 ** 64
10 ** 20
9007199254740993
18446744073709551615 + 1
true
none
[1, 2.0, none, true, 'a', "it's"]
{'a': 1, 'b': [none]}
(1, 2)
(1,)
'it\\'s'
['it\\'s']
['a"b']
['\\n']
['é']
[]
{}
messages[1]
messages[2].tool_calls
messages[3].content
'abc' is sequence
'abc' is iterable
'abc' is mapping
'abc' is string
[1] is sequence
[1] is iterable
{'a': 1} is sequence
{'a': 1} is mapping
{'a': 1} is iterable
none is sequence
none is iterable
messages[0].get('x') is iterable
1 is iterable
1 is number
1.0 is number
1.0 is integer
1 is integer
1.0 is float
true is number
true is integer
true is boolean
none is none
missing is defined
missing is undefined
missing
messages[0].nothing
messages[0].nothing is defined
1 is odd
2 is divisibleby 2
'a' is in 'abc'
'a' in ['a']
'A' is upper
'a' is lower
'x' is sameas 'x'
1 == 1.0
'1' == 1
1 < 2 < 3
not ''
[] or 'x'
'x' and 'y'
'' or none
'a' ~ 1 ~ none ~ true
'a' + 'b'
'a' * 3
[1] + [2]
'abc'[1]
'abc'[-1]
'abc'[1:]
'abc'[::-1]
'abc'[:-1]
[1, 2, 3][::-1]
[1, 2, 3][1:]
messages[::-1] | length
messages[1:] | length
messages | length
'abc' | length
{'a': 1} | length
' a ' | trim
' a '.strip()
'xxaxx'.strip('x')
'xxaxx'.lstrip('x')
'xxaxx'.rstrip('x')
'a,b'.split(',')
'a b  c'.split()
'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1)
'a\\nb'.splitlines()
','.join(['a', 'b'])
'abc'.startswith('a')
'abc'.startswith(('x', 'a'))
'abc'.endswith('c')
'abc'.find('c')
'abc'.find('z')
'abc'.index('c')
'abc'.count('b')
'abc'.replace('b', 'x')
'aaa'.replace('a', 'x', 1)
'abc'.upper()
'ABC'.lower()
'abc def'.title()
'abc'.capitalize()
'abc'.center(7)
'5'.zfill(3)
'abc'.isalpha()
'1'.isdigit()
'{} {}'.format(1, 'b')
'{0:>4}'.format('a')
'%s-%d' % ('a', 3)
'%.2f' % 1.5
'%s' % 'a'
'%5s|' % 'a'
'%s' | format('a')
{'a': 1, 'b': 2}.items() | list
{'a': 1}.keys() | list
{'a': 1}.values() | list
{'a': 1}.get('b')
{'a': 1}.get('b', 3)
{'a': 1}['a']
{'a': 1}.a
{'b': 1, 'a': 2} | dictsort
{'b': 1, 'a': 2} | items | list
['b', 'a'] | sort
[2, 1] | sort(reverse=true)
messages | map(attribute='role') | list
messages | map(attribute='role') | join(', ')
messages | selectattr('role', 'equalto', 'user') | list | length
messages | selectattr('n') | list | length
messages | selectattr('n', 'defined') | list | length
messages | rejectattr('role', 'equalto', 'user') | list | length
messages | selectattr('role', 'in', ['user', 'tool']) | list | length
[1, 2, 3] | select('odd') | list
[1, 2, 3] | reject('odd') | list
[1, 2, 3] | sum
[1, 2, 3] | first
[1, 2, 3] | last
[1, 2, 3] | max
[1, 2, 3] | min
[3, 1] | min
[1, 1, 2] | unique | list
[1, 2, 3, 4, 5] | batch(2) | list
[1, 2, 3] | slice(2) | list
[[1, 'a'], [2, 'b']] | map('first') | list
['a', 'b'] | map('upper') | list
messages | groupby('role') | length
messages | map(attribute='content.0.type') | list | length
'abc' | upper
'ABC' | lower
'abc def' | title
'abc def' | capitalize
'abc' | replace('b', 'x')
'abc' | first
'abc' | last
'abc' | reverse
[1, 2] | reverse | list
'abc' | list
'a' | default('b')
missing | default('b')
'' | default('b')
'' | default('b', true)
none | default('b')
'3' | int
'x' | int
'x' | int(7)
3.7 | int
'3.5' | float
3 | float
3 | string
1.0 | string
none | string
true | string
2.5 | round
2.567 | round(2)
3 | abs
-3 | abs
'a b' | wordcount
'a b c' | truncate(3)
'abc' | indent
'a\\nb' | indent(2)
'a\\nb' | indent(2, true)
'<a>' | escape
'<a>' | e
'<a>' | safe
'a' | center(5) | length
'a/b' | urlencode
'x y' | wordwrap(1)
messages[2].tool_calls | tojson
messages[2].tool_calls | tojson(indent=2)
messages[2].tool_calls[0].function.arguments | tojson(separators=(',', ':'))
'é<>&' | tojson
1.0 | tojson
1e16 | tojson
{'b': 1, 'a': 2} | tojson(sort_keys=true)
{1: 'a'} | tojson
namespace(a=1).a
range(3) | list
range(1, 6, 2) | list
dict(a=1)
dict(a=1).items() | list
'yes' if true else 'no'
'yes' if false
[1, 2] == [1, 2]
[1, 2] == (1, 2)
{'a': 1} == {'a': 1}
'a' < 'b'
messages[0] == messages[0]
messages[0]['role'] in ['system']
'content' in messages[0]
messages[0].items() | list | length
messages[0].keys() | list
messages[-1].role
messages[0].content.split(' ')[0]
raise_exception('no')
'abc' is filter
'upper' is filter
'odd' is test
loop is defined
1 if messages else 2
'a' if not missing
none == missing
missing == missing
missing | length
missing ~ 'a'
missing or 'x'
messages[9]
messages[0]['x']['y']
[1, 2].append(3)
1 | string | length
'a' in none
'\\u00e9'
"\\t|"
'a' 'b'
not none
1 is eq 1
1 is ne 2
2 is gt 1
'x' is callable
range is callable
true + 1
'a' is string and 'b' is string
[1, [2, [3.0, 'x']]]
{'a': {'b': none}}
{'a': true}
1_000
0x1f
5 is not odd
(1, 2) | list
[none, none] | list
messages | length > 2
(messages | length) - 1
messages[1].n + 1
messages[1].n / 2
messages[1].n | string + 'x'
{'x': 1} | string
[1.0] | string
'a\\\\b'
['a\\\\b']
['\\x00']
-0.0
1 // 0.5
7.5 // 2
7.5 % 2
2 ** 0.5
1e3
100000000000000000000.0
123456789.123
""".strip("\n").split("\n")
TEMPLATES = [
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }};{% endfor %}",
    "{% for m in messages %}{% if loop.previtem is defined %}{{ loop.previtem.role }}<{% endif %}{{ m.role }}{% if loop.nextitem is defined %}>{{ loop.nextitem.role }}{% endif %};{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = i %}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x }}|{{ x | length }}",
    "{% set x | upper %}ab{% endset %}{{ x }}",
    "{% macro f(a, b='x') %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=2) }}{{ f(a=3) }}",
    "{% macro f(a) %}{{ caller() }}{{ a }}{% endmacro %}{% call f(1) %}in{% endcall %}",
    "{% macro f(m) %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% endmacro %}{{ f({'a': 1, 'b': none}) }}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
    "{% for k in {'b': 1, 'a': 2} %}{{ k }}{% endfor %}",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}",
    "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.index }}{% endfor %}",
    "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for c in 'abc' %}{{ c }},{% endfor %}",
    "{% for x in [1, [2, 3]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }},{% endfor %}",
    "{% for x in [1, 2] %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}",
    "{% filter upper %}abc{% endfilter %}",
    "{% raw %}{{ a }}{% endraw %}",
    "{# a comment #}x{#- another -#} y",
    "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "  {% if true %}\n  b\n  {% endif %}\n",
    "a {%- if true %} b {% endif -%} c",
    "a\n  {{- 'x' -}}  \nb",
    "a\n\n",
    "a\r\nb\r\n{% if true %}\r\nc{% endif %}",
    "{{ '\\n' }}x",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set x = [] %}{% for m in messages %}{% set _ = x.append(m.role) %}{% endfor %}{{ x }}",
    "{% set d = {} %}{% set _ = d.update({'a': 1}) %}{{ d }}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.type }}{% endfor %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is sequence %}s{% else %}n{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is iterable and m.content is not mapping %}s{% else %}n{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is iterable and m.content is not string %}s{% else %}n{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m['tool_calls'] is defined and m['tool_calls'] %}{% for t in m.tool_calls %}{{ t.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set s = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set s = '' %}{% endif %}{{ s }}{{ loop_messages | length }}",
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}x{% endif %}{% endfor %}",
    "{{ bos_token }}|{{ eos_token }}",
    "{% set x = messages | selectattr('role', 'equalto', 'user') | list %}{{ x[0].content | trim }}",
    "{% block a %}x{% endblock %}",
    "{% set x = 1 %}{% block a %}{{ x }}{% endblock %}",
    "{% set x = 1 %}{% macro f() %}{{ x }}{% endmacro %}{{ f() }}",
    "{% for i in range(2) %}{% set x = i %}{% endfor %}{{ x is defined }}",
    "{{ messages[0].content.split('.')[0] ~ '!' }}",
    "{% if 'x' in messages[0].content %}a{% elif 'brief' in messages[0].content %}b{% endif %}",
    "{{ {'a': 1, 'b': 2.0} }}{{ [1, 'x'] }}",
    "{%- for m in messages -%}{{- m.role -}}{%- if not loop.last -%}, {% endif -%}{%- endfor -%}",
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}",
    "{% set ns = namespace() %}{% set ns.a = 'x' %}{{ ns.a }}{{ ns.b is defined }}",
    "{{ messages }}",
    "{% for m in messages | reverse %}{{ m.role }},{% endfor %}",
    "{% do [].append(1) %}",
    "{% include 'x' %}",
    "{% for c in 'abc' %}{{ c }}{% if not loop.last %},{% endif %}{% endfor %}",
    "{% set k = 'ab' %}{% macro f() %}{{ k[:1] }}{% endmacro %}{{ f() }}",
    "{% set k = 'ab' %}{% macro f() -%}  \n  a{{ k[:1] }}{% endmacro %}{{ f() }}",
    "{{ ('a<' | e) ~ ('\"' | escape) }}{{ [messages | tojson] }}",
    "{% filter indent(2) %}a\n\nb\n{% endfilter %}|",
    "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}",
    "{{ ['' | first, 1] }}",
    "{{ ['a' | safe] }}",
    "{{ [1] + [messages[0].nothing] }}{{ 'é日a'.title() }}",
    "{{ 'it\'s \"a\" b'.title() }}{{ 'ab'.removeprefix('a') }}{{ 'ab'.removesuffix('b') }}",
    "{{ 'x' | int }}{{ '2.7' | int }}{{ 2.7 | int }}{{ true | int }}{{ '' | float }}{{ 'y' | float(1.5) }}{{ '7' | int(default=3) }}",
]


def main():
    found = []
    for source in ["{{ " + line + " }}" for line in EXPRESSIONS] + TEMPLATES:
        try:
            text = _compile_jinja_template(source).render(
                messages=MESSAGES, tools=None, documents=None, add_generation_prompt=False, bos_token="<s>", eos_token="</s>"
            )
        except Exception:
            text = None
        found.append([source, text])
    print(json.dumps({"messages": MESSAGES, "cases": found}, indent=0, ensure_ascii=False))


main()
