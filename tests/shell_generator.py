"""Random launch scripts, each from its seed."""

import random

NAMES = ("A", "B", "C")
ARRAYS = ("L", "M")
GIVEN = ("E1", "E2")
TEXTS = ("1", "2", "7b", "x", "a-b", "data/x.y", "--bf16", "3e-4")
SPACED = ("'x y'", '"p  q"', "'$A'", "''", '" z"', "'it\"s'", "a\\ b", "'*'", '"\\$B"')


class Generator:
    """Writes one script."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.depth = 0
        self.fresh = 0

    def script(self) -> str:
        """Some statements, and a command that starts the program."""
        lines = [self.statement() for _ in range(self.random.randint(1, 7))]
        return "\n".join([*lines, self.launch(), *self.maybe(0.1, self.statement), ""])

    def new(self, stem: str) -> str:
        """A name that no statement has: loops and functions that share one may never end."""
        self.fresh += 1
        return f"{stem}{self.fresh}"

    def pick(self, *choices):
        chosen = self.random.choice(choices)
        return chosen() if callable(chosen) else chosen

    def maybe(self, chance: float, make) -> list[str]:
        return [make()] if self.random.random() < chance else []

    def name(self) -> str:
        return self.random.choice(NAMES)

    def any_name(self) -> str:
        return self.random.choice((*NAMES, *NAMES, *GIVEN))

    def reference(self) -> str:
        name = self.any_name()
        array = self.random.choice(ARRAYS)
        edits = ("%%-*", "%b", "#a", "##*/", "/a/z", "//x/", "^^", ":1", ":0:2", ":-d", "-d", ":+s")
        return self.pick(
            f"${name}",
            f"${name}",
            f"${{{name}}}",
            f"${{{name}{self.random.choice(edits)}}}",
            f"${{{name}:-{self.pick('d', 'u v', '$B', '')}}}",
            f"${{{name}:={self.pick('d', 'u v', '$C')}}}",
            f"${{#{name}}}",
            f"$(({self.arithmetic()}))",
            f"${{{array}[@]}}",
            f"${{{array}[*]}}",
            f"${{#{array}[@]}}",
            f"${array}",
            f"${{{array}[{self.random.randint(0, 2)}]}}",
            f"$(echo {self.pick(f'${name}', 'k', 'k  l')})",
            "$1",
            "$#",
            "$@",
        )

    def arithmetic(self) -> str:
        name = self.name()
        return self.pick(
            "1+2*3",
            f"{name}+1",
            f"{name}*2",
            f"{name}=4",
            f"{name}++",
            f"{name}>2?5:6",
            f"E1+{name}",
            f"${name}-1",
        )

    def word(self) -> str:
        return "".join(
            self.pick(
                lambda: self.random.choice(TEXTS),
                lambda: self.random.choice(SPACED),
                self.reference,
                lambda: f'"{self.reference()}"',
                lambda: f'"{self.reference()} {self.reference()}"',
                lambda: f"{{{self.random.choice(TEXTS)},{self.random.choice(TEXTS)}}}",
            )
            for _ in range(self.random.choice((1, 1, 1, 2, 3)))
        )

    def words(self, most: int = 4) -> str:
        return " ".join(self.word() for _ in range(self.random.randint(0, most)))

    def launch(self) -> str:
        plain = f"torchrun pretrain_gpt.py {self.words(6)}"
        inner = f"torchrun pretrain_gpt.py {self.pick('$A', '$E1 x', '$B $C', 'u')}"
        return self.pick(
            plain,
            plain,
            plain,
            plain,
            f"Q={self.word()} {plain}",
            f"export A B\nsrun bash -c '{inner}'",
            f'srun -n2 bash -c "{inner}"',
            f'run() {{ torchrun pretrain_gpt.py "$@" $A; }}\nrun {self.words()}',
            f'CMD="{inner}"\neval $CMD',
            f"{plain} | cat",
        )

    def condition(self) -> str:
        name = self.any_name()
        return self.pick(
            f'[ -z "${name}" ]',
            f'[ -n "${name}" ]',
            f'[ "${name}" = {self.random.choice(TEXTS)} ]',
            f"[[ ${name} == *b* ]]",
            f"[[ -n ${name} && ${self.name()} != x ]]",
            f"(( {self.arithmetic()} > 2 ))",
            f"[ ${{#{name}}} -gt 1 ]",
            "true",
            "false",
            f'[ "${{{name}:-d}}" != d ]',
            "[ -f blend.txt ]",
            f'! [ -z "${name}" ]',
        )

    def block(self) -> str:
        return "; ".join(self.statement() for _ in range(self.random.randint(1, 2)))

    def statement(self) -> str:
        self.depth += 1
        simple = (
            lambda: f"{self.name()}={self.word()}",
            lambda: f"{self.name()}={self.word()}",
            lambda: f"{self.name()}+={self.word()}",
            lambda: f"export {self.name()}={self.word()}",
            lambda: f"{self.random.choice(ARRAYS)}=({self.words()})",
            lambda: f"{self.random.choice(ARRAYS)}+=({self.words()})",
            lambda: f"{self.random.choice(ARRAYS)}[{self.random.randint(0, 2)}]={self.word()}",
            lambda: f"set -- {self.words()}",
            lambda: f": ${{{self.any_name()}:={self.word_in_braces()}}}",
            lambda: f"(({self.arithmetic()}))",
            lambda: f"let '{self.arithmetic()}'",
            lambda: f"read {self.name()} {self.name()} <<< {self.word()}",
            lambda: f"printf -v {self.name()} '%s,%s' {self.words()}",
            lambda: f"unset {self.name()}",
            lambda: f"declare {self.name()}={self.word()}",
            lambda: f"eval '{self.name()}=3'",
            lambda: f"{self.condition()} && {self.name()}={self.word()}",
            lambda: f"{self.condition()} || {self.name()}={self.word()}",
            lambda: f"IFS={self.pick('-', ',', ' ')}" if self.random.random() < 0.2 else ":",
            lambda: "cd sub" if self.random.random() < 0.2 else ":",
            lambda: "shift" if self.random.random() < 0.5 else "set -e",
        )
        nested = (
            lambda: f"if {self.condition()}; then {self.block()}; else {self.block()}; fi",
            lambda: f"if {self.condition()}; then {self.block()}; fi",
            lambda: f"for i in {self.words()}; do {self.name()}+=$i; {self.block()}; done",
            lambda: (
                f"for i in 1 2 3; do {self.condition()} && {self.pick('break', 'continue')}; "
                f"{self.name()}+=-$i; {self.block()}; done"
            ),
            lambda: (
                f"case {self.word()} in 1|x) {self.block()};; *b*) {self.block()};; "
                f"*) {self.block()};; esac"
            ),
            self.function,
            self.returning,
            lambda: f"( {self.block()} )",
            self.counting,
            lambda: f"{{ {self.block()}; }}",
            lambda: f"{self.condition()} && exit 3" if self.random.random() < 0.3 else ":",
        )
        made = self.pick(*simple, *(nested if self.depth < 4 else ()))
        self.depth -= 1
        return made

    def function(self) -> str:
        name = self.new("f")
        body = f"local {self.name()}={self.word()}; {self.block()}"
        return f"{name}() {{ {body}; }}\n{name} {self.words()}"

    def returning(self) -> str:
        name = self.new("g")
        body = f"{self.condition()} && return 1; {self.block()}"
        return f"{name}() {{ {body}; }}\n{name} {self.words()} || :"

    def counting(self) -> str:
        name = self.new("i")
        return f"{name}=0; while [ ${name} -lt 2 ]; do {name}=$(({name}+1)); {self.block()}; done"

    def word_in_braces(self) -> str:
        return self.pick("d", "u v", "$A", '"$B x"')
