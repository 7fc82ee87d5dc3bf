"""How often the loops of a compiled program run.

A compiler that knows the number writes it beside the loop. Where it doesn't, the number follows from the loop's condition
(a comparison of a carried counter with a constant), the counter's first value and its step, which are traced through
tuples, copies, fusions and enclosing loops. What can't be traced is unknown; nothing is guessed.
"""

import math
import re
from collections import defaultdict

from kimi_jax.planning.hlo import Instruction, Program

_KNOWN = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_PASSED_ON = frozenset(
    {"bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "optimization-barrier", "reshape"}
)
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_MAX_DEPTH = 200

# A value: a number, or (loop, element) for what a loop carries and changes, or None for what can't be traced.
Value = int | tuple[str, int] | None


class Trips:
    """Finds trip counts of one program.

    Args:
        program: the program.
    """

    def __init__(self, program: Program):
        self.program = program
        # Where a computation is called: (name of the caller, instruction, how).
        self._calls: dict[str, list[tuple[str, Instruction, str]]] = defaultdict(list)
        for computation in program.computations.values():
            for instruction in computation:
                if instruction.attributes:
                    for key in ("body", "condition", "calls", "to_apply"):
                        called = instruction.called(key)
                        if called is not None:
                            self._calls[called].append((computation.name, instruction, key))

    def count(self, caller: str, loop: Instruction) -> int | None:
        """How often the body of a loop runs, or None when that can't be known from the text.

        Args:
            caller: the computation that the loop is in.
            loop: its instruction.
        """
        match = _KNOWN.search(loop.attributes)
        if match is not None:
            return int(match[1])
        condition, body = loop.called("condition"), loop.called("body")
        if condition is None or body is None:
            return None
        compared = self._comparison(condition)
        if compared is None:
            return None
        where, comparison = compared
        direction = comparison.attribute("direction")
        left, right = (self._value(where, name, _MAX_DEPTH) for name in comparison.operands)
        if isinstance(left, int) and isinstance(right, tuple):
            left, right, direction = right, left, _FLIPPED.get(direction, "")
        if not isinstance(left, tuple) or left[0] != body or not isinstance(right, int):
            return None
        first = self._initial(caller, loop, left[1])
        step = self._step(body, left[1])
        return None if first is None or step is None else _trips(first, right, step, direction)

    def started(self, name: str) -> bool:
        """Whether a computation is one that its caller starts and waits for later."""
        return any(call.opcode.endswith("-start") for _, call, _ in self._calls.get(name, []))

    def _comparison(self, name: str) -> tuple[str, Instruction] | None:
        """The comparison that a condition is, and the computation that it is in."""
        instruction = self.program[name][self.program[name].root]
        for _ in range(_MAX_DEPTH):
            if instruction.opcode == "compare":
                return name, instruction
            called = instruction.called("calls") or instruction.called("to_apply")
            if instruction.opcode in ("fusion", "call") and called is not None:
                name = called
                instruction = self.program[name][self.program[name].root]
            elif instruction.opcode in _PASSED_ON:
                instruction = self.program[name].operand(instruction, 0)
            else:
                return None
        return None

    def _value(self, where: str, name: str, depth: int) -> Value:
        if depth == 0:
            return None
        computation = self.program[where]
        instruction = computation[name]
        opcode = instruction.opcode
        if opcode == "constant":
            return _integer(instruction.literal)
        if opcode in _PASSED_ON or (opcode == "broadcast" and instruction.arrays()[0].size == 1):
            return self._value(where, instruction.operands[0], depth - 1)
        if opcode in ("add", "subtract", "multiply", "minimum", "maximum"):
            values = [self._value(where, operand, depth - 1) for operand in instruction.operands]
            return _arithmetic(opcode, values[0], values[1])
        if opcode == "get-tuple-element":
            return self._element(where, instruction.operands[0], int(instruction.attribute("index")), depth - 1)
        if opcode in ("fusion", "call"):
            called = instruction.called("calls") or instruction.called("to_apply")
            return None if called is None else self._value(called, self.program[called].root, depth - 1)
        if opcode == "parameter":
            site = self._only_call(where)
            if site is not None and site[2] in ("calls", "to_apply"):
                number = int(instruction.literal)
                if number < len(site[1].operands):
                    return self._value(site[0], site[1].operands[number], depth - 1)
        return None

    def _element(self, where: str, name: str, index: int, depth: int) -> Value:
        """The value of an element of a tuple."""
        if depth == 0:
            return None
        instruction = self.program[where][name]
        opcode = instruction.opcode
        if opcode == "tuple":
            return self._value(where, instruction.operands[index], depth - 1)
        if opcode in _PASSED_ON:
            return self._element(where, instruction.operands[0], index, depth - 1)
        if opcode == "while":
            body = instruction.called("body")
            if body is not None and self._invariant(body, index):
                return self._element(where, instruction.operands[0], index, depth - 1)
        elif opcode in ("fusion", "call"):
            called = instruction.called("calls") or instruction.called("to_apply")
            if called is not None:
                return self._element(called, self.program[called].root, index, depth - 1)
        elif opcode == "parameter":
            site = self._only_call(where)
            if site is None:
                return None
            caller, call, key = site
            if key in ("body", "condition"):
                body = call.called("body")
                if body is None:
                    return None
                if not self._invariant(body, index):
                    return body, index
                return self._element(caller, call.operands[0], index, depth - 1)
            return self._element(caller, call.operands[int(instruction.literal)], index, depth - 1)
        return None

    def _initial(self, caller: str, loop: Instruction, index: int) -> int | None:
        value = self._element(caller, loop.operands[0], index, _MAX_DEPTH)
        return value if isinstance(value, int) else None

    def _returned(self, body: str, index: int) -> str | None:
        """The name of what a body returns as an element."""
        computation = self.program[body]
        root = computation[computation.root]
        while root.opcode in _PASSED_ON:
            root = computation.operand(root, 0)
        return root.operands[index] if root.opcode == "tuple" and index < len(root.operands) else None

    def _invariant(self, body: str, index: int) -> bool:
        """Whether a body hands an element on as it got it."""
        computation = self.program[body]
        name = self._returned(body, index)
        for _ in range(_MAX_DEPTH):
            if name is None:
                return False
            instruction = computation[name]
            if instruction.opcode == "get-tuple-element":
                source = computation.operand(instruction, 0)
                return source.opcode == "parameter" and int(instruction.attribute("index")) == index
            if instruction.opcode not in _PASSED_ON:
                return False
            name = instruction.operands[0]
        return False

    def _step(self, body: str, index: int) -> int | None:
        """What a body adds to an element that it carries."""
        where, name = body, self._returned(body, index)
        for _ in range(_MAX_DEPTH):
            if name is None:
                return None
            instruction = self.program[where][name]
            called = instruction.called("calls") or instruction.called("to_apply")
            if instruction.opcode in _PASSED_ON:
                name = instruction.operands[0]
            elif instruction.opcode in ("fusion", "call") and called is not None:
                where, name = called, self.program[called].root
            elif instruction.opcode in ("add", "subtract"):
                left, right = (self._value(where, operand, _MAX_DEPTH) for operand in instruction.operands)
                if instruction.opcode == "add" and isinstance(left, int):
                    left, right = right, left
                if left == (body, index) and isinstance(right, int):
                    return right if instruction.opcode == "add" else -right
                return None
            else:
                return None
        return None

    def _only_call(self, name: str) -> tuple[str, Instruction, str] | None:
        """The place from which a computation is called; a loop calls by its body and by its condition."""
        calls = self._calls.get(name, [])
        return calls[0] if len(calls) == 1 else None


def _trips(first: int, bound: int, step: int, direction: str) -> int | None:
    """Values of a counter for which its comparison holds, until it first doesn't."""
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    elif direction == "GE":
        bound, direction = bound - 1, "GT"
    if direction == "LT":
        if first >= bound:
            return 0
        return math.ceil((bound - first) / step) if step > 0 else None
    if direction == "GT":
        if first <= bound:
            return 0
        return math.ceil((bound - first) / step) if step < 0 else None
    if direction == "NE" and step != 0:
        trips, rest = divmod(bound - first, step)
        return trips if rest == 0 and trips >= 0 else None
    return None


def _arithmetic(opcode: str, left: Value, right: Value) -> Value:
    if not isinstance(left, int) or not isinstance(right, int):
        return None
    if opcode == "add":
        return left + right
    if opcode == "subtract":
        return left - right
    if opcode == "multiply":
        return left * right
    return min(left, right) if opcode == "minimum" else max(left, right)


def _integer(literal: str) -> int | None:
    try:
        return int(literal)
    except ValueError:
        return None
