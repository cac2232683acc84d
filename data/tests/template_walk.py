"""Random chat templates, and what Python's Jinja2, set up as in transformers, makes of them.

Usage: template_walk.py SEED COUNT

Prints the messages and COUNT pairs of a template and its text as JSON; the text is null where Jinja2 refuses the template."""

import json
import random
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

WORDS = ["a", "user", "It's", 'say "x"', "  two  ", "line\nnext\n", "", "<b>", "é日", "12", "A,b", "x\\y"]
NAMES = ["role", "content", "n", "tool_calls", "none_there"]
TESTS = ["string", "mapping", "iterable", "number", "integer", "float", "boolean", "none", "defined", "undefined", "sequence", "true", "false"]


def messages(dice):
    roles = ["system", "user", "assistant", "tool"]
    made = []
    for _ in range(dice.randint(1, 5)):
        one = {"role": dice.choice(roles), "content": dice.choice(WORDS)}
        if dice.random() < 0.2:
            one["content"] = [{"type": "text", "text": dice.choice(WORDS)}, {"type": "image"}]
        if dice.random() < 0.3:
            one["n"] = dice.choice([0, 1, -7, 2.5, None, True])
        if dice.random() < 0.3:
            arguments = {dice.choice("xyz"): dice.choice([1, 1.5, "é<", None, [1, 2], {"k": False}])}
            one["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        made.append(one)
    return made


class Walk:
    """A template, with the names that are set where it writes them."""

    def __init__(self, dice):
        self.dice, self.texts, self.lists, self.numbers, self.in_loop = dice, [], ["messages"], [], 0

    def pick(self, *ways):
        return self.dice.choice(ways)()

    def literal(self):
        text = self.dice.choice(WORDS)
        quoted = json.dumps(text, ensure_ascii=False)
        return quoted if "'" in text or self.dice.random() < 0.5 else "'" + quoted[1:-1].replace('\\"', '"') + "'"

    def text(self, depth=0):
        if depth > 2 or self.dice.random() < 0.3:
            return self.pick(self.literal, lambda: self.dice.choice(self.texts) if self.texts else "bos_token", self.role)
        inner = lambda: self.text(depth + 1)
        return self.pick(
            lambda: f"({inner()} + {inner()})", lambda: f"({inner()} ~ {self.value(depth + 1)})",
            lambda: f"{inner()}{self.slice()}", lambda: f"({inner()} if {self.truth(depth + 1)} else {inner()})",
            lambda: f"{inner()}.{self.method()}", lambda: f"({inner()} | {self.filter()})",
            lambda: f"({self.number(depth + 1)} | string)", lambda: f"({self.value(depth + 1)} | tojson)",
            lambda: f"({self.list(depth + 1)} | map('string') | join({self.literal()}))",
            lambda: f"{self.literal()}.join(['a', {inner()}])",
            lambda: f"'{{}}-{{}}'.format({inner()}, {self.number(depth + 1)})",
            lambda: f"({inner()} * {self.dice.randint(0, 2)})")

    def role(self):
        return self.dice.choice(["messages[0].role", "messages[0]['role']", "messages[-1].role", "messages[-1]['content'] | string"])

    def slice(self):
        return self.dice.choice(["[1:]", "[:-1]", "[::-1]", "[:2]", "[-2:]", "[1:3]", "[::2]", "[0:0]"])

    def method(self):
        word = self.literal
        return self.pick(
            lambda: "strip()", lambda: "lstrip()", lambda: "rstrip()", lambda: f"strip({word()})", lambda: f"lstrip({word()})",
            lambda: f"replace({word()}, {word()})", lambda: "upper()", lambda: "lower()", lambda: "title()", lambda: "capitalize()",
            lambda: f"split('{self.dice.choice([',', ' ', 'a', chr(92) + 'n'])}')[0]", lambda: "split()[0:1] | join",
            lambda: f"rstrip('{self.dice.choice(['a', ' ', 'er'])}')", lambda: "replace('a', 'b', 1)", lambda: "splitlines() | join('/')",
            lambda: f"split('a', 1)[-1]", lambda: f"removeprefix('a')", lambda: "removesuffix('r')")

    def filter(self):
        return self.dice.choice([
            "trim", "upper", "lower", "title", "capitalize", "replace('a', 'x')", "default('d')", "default('d', true)", "length | string",
            "list | join('.')", "reverse", "indent(2)", "indent(1, true)", "tojson", "string", 
            "int | string", "float | string", "list | length | string", "list | unique | join"])

    def number(self, depth=0):
        if depth > 2 or self.dice.random() < 0.4:
            return self.pick(
                lambda: str(self.dice.choice([0, 1, 2, 7, -3, 2.5, 0.1, 1e15, 3.0, 10])), lambda: "messages | length",
                lambda: self.dice.choice(self.numbers) if self.numbers else "1", lambda: "loop.index" if self.in_loop else "2",
                lambda: "loop.index0" if self.in_loop else "4", lambda: f"({self.text(depth + 1)} | length)")
        inner = lambda: self.number(depth + 1)
        sign = self.dice.choice(["+", "-", "*", "//", "%", "/"])
        return self.pick(
            lambda: f"({inner()} {sign} {inner()})", lambda: f"({inner()} {sign} {inner()})", lambda: f"({inner()} | abs)",
            lambda: f"({inner()} | int)", lambda: f"({inner()} | round)", lambda: f"({self.numbers_list(depth)} | sum)",
            lambda: f"({self.numbers_list(depth)} | max)", lambda: f"{self.text(depth + 1)}.find('a')",
            lambda: f"{self.text(depth + 1)}.count('a')")

    def numbers_list(self, depth):
        return self.pick(lambda: f"[{self.number(depth + 1)}, 2]", lambda: "range(4)", lambda: f"[3, 1, 2]{self.slice()}")

    def list(self, depth=0):
        if depth > 2 or self.dice.random() < 0.3:
            return self.dice.choice([*self.lists, "[1, 'a', none]", "[]", "[1.0, true]"])
        inner = lambda: self.list(depth + 1)
        return self.pick(
            lambda: f"[{self.value(depth + 1)}, {self.value(depth + 1)}]", lambda: f"{inner()}{self.slice()}", lambda: f"({inner()} + {inner()})",
            lambda: f"({inner()} | list)", lambda: f"({inner()} | reverse | list)", lambda: f"{self.text(depth + 1)}.split(' ')",
            lambda: "messages | map(attribute='role') | list", lambda: "messages | selectattr('n', 'defined') | list",
            lambda: f"(messages | selectattr('role', '{self.dice.choice(['equalto', 'eq', 'ne', '=='])}', 'user') | list)",
            lambda: "(messages | rejectattr('role', 'equalto', 'user') | list)", lambda: f"({self.numbers_list(depth)} | sort)",
            lambda: f"({self.text(depth + 1)} | list)", lambda: "messages[0].keys() | list", lambda: "messages[0].items() | list",
            lambda: "messages[0] | dictsort", lambda: f"({self.numbers_list(depth)} | select('odd') | list)",
            lambda: f"({self.numbers_list(depth)} | batch(2) | list)")

    def truth(self, depth=0):
        if depth > 2:
            return self.dice.choice(["true", "false", "messages", "add_generation_prompt", "tools", "missing is defined"])
        inner = lambda: self.truth(depth + 1)
        return self.pick(
            lambda: f"{self.text(depth + 1)} == {self.text(depth + 1)}", lambda: f"{self.text(depth + 1)} in {self.text(depth + 1)}",
            lambda: f"{self.literal()} not in {self.list(depth + 1)}", lambda: f"({inner()} and {inner()})", lambda: f"({inner()} or {inner()})",
            lambda: f"not ({inner()})", lambda: f"{self.value(depth + 1)} is {self.dice.choice(['', 'not '])}{self.dice.choice(TESTS)}",
            lambda: f"{self.number(depth + 1)} {self.dice.choice(['<', '>=', '!=', '==', '>', '<='])} {self.number(depth + 1)}",
            lambda: f"messages[0].{self.dice.choice(NAMES)} is defined", lambda: f"{self.text(depth + 1)}.startswith({self.literal()})",
            lambda: f"'{self.dice.choice(NAMES)}' in messages[-1]", lambda: self.text(depth + 1), lambda: self.list(depth + 1),
            lambda: "loop.first" if self.in_loop else "true", lambda: "loop.last" if self.in_loop else "none",
            lambda: f"{self.number(depth + 1)} is {self.dice.choice(['odd', 'even', 'divisibleby 3'])}")

    def value(self, depth=0):
        return self.pick(
            lambda: self.text(depth + 1), lambda: self.number(depth + 1), lambda: self.list(depth + 1), lambda: "none", lambda: "true",
            lambda: f"messages[0].{self.dice.choice(NAMES)}", lambda: f"messages[-1].get('{self.dice.choice(NAMES)}')",
            lambda: f"{{'k': {self.text(depth + 1)}, 'j': {self.number(depth + 1)}}}", lambda: f"({self.truth(depth + 1)})",
            lambda: "messages[0]", lambda: "bos_token")

    def trim(self, tag):
        left, right = (self.dice.choice(["", "", "-"]) for _ in range(2))
        return "{" + tag[0] + left + tag[1:-1] + right + tag[-1] + "}"

    def tag(self, inside):
        return self.trim(f"% {inside} %")

    def around(self):
        return self.dice.choice(["", "", " ", "\n", "\n  ", "x", "\r\n", "a\n\n"])

    def body(self, depth):
        kept = len(self.texts), len(self.lists), len(self.numbers)
        made = "".join(self.around() + self.statement(depth + 1) for _ in range(self.dice.randint(1, 2))) + self.around()
        del self.texts[kept[0]:], self.lists[kept[1]:], self.numbers[kept[2]:]
        return made

    def statement(self, depth=0):
        show = lambda: self.trim("{ " + self.value() + " }")
        if depth > 2:
            return show()
        return self.pick(show, lambda: self.trim("{ " + self.text() + " }"), lambda: self.condition(depth), lambda: self.loop(depth),
                         self.set_text, self.set_number, lambda: self.set_list(), lambda: self.namespace(depth), lambda: self.macro(depth),
                         lambda: self.tag("set block") + self.body(depth) + self.tag("endset") + "{{ block | length }}{{ block }}",
                         lambda: self.trim("# a comment #"), lambda: self.tag("generation") + self.body(depth) + self.tag("endgeneration"),
                         lambda: self.tag(f"filter {self.dice.choice(['upper', 'trim', 'indent(2)'])}") + self.body(depth) + self.tag("endfilter"))

    def condition(self, depth):
        made = self.tag(f"if {self.truth()}") + self.body(depth)
        if self.dice.random() < 0.3:
            made += self.tag(f"elif {self.truth()}") + self.body(depth)
        if self.dice.random() < 0.5:
            made += self.tag("else") + self.body(depth)
        return made + self.tag("endif")

    def loop(self, depth):
        name = f"m{depth}"
        over, shown = self.pick(
            lambda: (self.list(), f"{{{{ {name} }}}}"),
            lambda: ("messages", f"{{{{ {name}.role }}}}{{{{ {name}['content'] }}}}{{{{ {name}.n }}}}"),
            lambda: (self.text(), f"{{{{ {name} }}}}"), lambda: (f"messages[0].items()", f"{{{{ {name}[0] }}}}"),
            lambda: (f"messages if {name}.role {self.dice.choice(['==', '!='])} 'user'", f"{{{{ loop.index }}}}{{{{ {name}.role }}}}"))
        self.in_loop += 1
        shown += self.dice.choice(["", "{{ loop.length }}", "{{ loop.revindex0 }}", "{{ loop.previtem is defined }}", "{{ loop.cycle('a', 'b') }}"])
        made = self.tag(f"for {name} in {over}") + shown + self.body(depth)
        # With `continue`, Jinja2 takes the loop for one without items.
        leaves = self.dice.random() < 0.2
        if leaves:
            made += self.tag(f"if {self.truth()}") + self.tag(self.dice.choice(["break", "continue"])) + self.tag("endif") + shown
        self.in_loop -= 1
        if not leaves and self.dice.random() < 0.2:
            made += self.tag("else") + "nothing"
        return made + self.tag("endfor")

    def set_text(self):
        name = f"t{len(self.texts)}"
        made = self.tag(f"set {name} = {self.text()}")
        self.texts.append(name)
        return made

    def set_number(self):
        name = f"k{len(self.numbers)}"
        made = self.tag(f"set {name} = {self.number()}")
        self.numbers.append(name)
        return made

    def set_list(self):
        name = f"l{len(self.lists)}"
        made = self.tag(f"set {name} = {self.list()}")
        self.lists.append(name)
        return made

    def namespace(self, depth):
        made = self.tag(f"set ns = namespace(a={self.value()}, b=false)") + self.tag(f"for i in range({self.dice.randint(0, 3)})")
        made += self.tag(f"set ns.a = {self.dice.choice(['i', 'ns.a', 'loop.last', self.text()])}") + self.tag("endfor")
        return made + self.trim("{ ns.a }") + self.trim("{ ns.b }")

    def macro(self, depth):
        loops, self.in_loop = self.in_loop, 0
        made = self.tag("macro f(a, b='x')") + self.body(depth) + "{{ a }}|{{ b }}" + self.tag("endmacro")
        self.in_loop = loops
        return made + f"{{{{ f({self.value()}) }}}}{{{{ f(1, b={self.text()}) | trim }}}}"


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    cases = []
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        chat = messages(dice)
        walk = Walk(dice)
        source = "".join(walk.around() + walk.statement() for _ in range(dice.randint(1, 4))) + walk.around()
        try:
            text = _compile_jinja_template(source).render(
                messages=chat, tools=None, documents=None, add_generation_prompt=False, bos_token="<s>", eos_token="</s>")
        except Exception:
            text = None
        cases.append({"messages": chat, "source": source, "text": text})
    print(json.dumps(cases))


main()
