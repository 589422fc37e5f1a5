"""Grammars that the text of an answer must follow, by llguidance: which tokens may come next, after each token.

A grammar is llguidance's own text (Lark, or JSON with schemas). What clients send is first compiled by `Checker` in a
process of its own: a compilation that takes too long can be ended only so, and one that crashes ends nothing else.
Nothing here imports torch, so that this process starts at once.
"""

import collections
import contextlib
import importlib.util
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 2**16  # of a grammar's text
MOST_CPU_SECS = 1.0  # that its compilation may take; ranks do it again, beside their passes
MOST_SECS = 5.0  # after which the compiling process is ended
MOST_KEPT = 16  # compiled grammars
_MOST_LEXER_STATES = 25_000  # of a grammar, about 2 KiB each
_MOST_MEMORY = 2**30  # more, in bytes, for the process that compiles
_END = "<|end of the grammar|>"
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ep_moe.grammar import main; main()"


class Vocabulary:
    """The tokens of a model, and one more that stands for the end of a grammar.

    Args:
        tokenizer: of transformers, one of the tokenizers library.
    Attributes:
        text: JSON of the tokenizers library. end: the additional token.
    Errors: ValueError for a tokenizer of another library.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        known = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(known, Tokenizer):
            raise ValueError(f"the tokenizer ({type(tokenizer).__name__}) is not one of the tokenizers library")
        copied = Tokenizer.from_str(known.to_str())
        copied.no_padding()
        copied.no_truncation()
        copied.add_special_tokens([AddedToken(_END, special=True)])
        end = copied.token_to_id(_END)
        assert end is not None
        self.text, self.end = copied.to_str(), end


class Compiler:
    """Makes matchers, which follow a grammar token by token; keeps the last compiled grammars. Any thread.

    Args:
        text, end: of a `Vocabulary`.
    Errors: ValueError for a tokenizer that llguidance cannot read.
    """

    def __init__(self, text: str, end: int) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._tokens = LLTokenizer(text, eos_token=end)
        self._limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
        self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def kept(self, grammar: str) -> Any:
        """A new matcher of a grammar that is compiled already; None for another one. Waits for no compilation."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return None if found is None else found.deep_copy()

    def matcher(self, grammar: str) -> Any:
        """A new matcher at the beginning of a grammar; its `get_error()` tells what is wrong with the grammar."""
        from llguidance import LLMatcher

        found = self.kept(grammar)
        if found is not None:
            return found
        made = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)  # other threads run meanwhile
        with self._lock:
            self._kept[grammar] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made.deep_copy()

    def forget(self, grammar: str) -> None:
        """Compile a grammar anew if it is asked for again."""
        with self._lock:
            self._kept.pop(grammar, None)


class Checker:
    """Compiles grammars in a process of its own, which starts with the first one. Any thread, one at a time.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._checked: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._lock = threading.Lock()

    def error_of(self, grammar: str) -> str:
        """What is wrong with a grammar, "" if nothing is."""
        size = len(grammar.encode())
        if size > MOST_BYTES:
            return f"it has {size} bytes, the limit is {MOST_BYTES}"
        with self._lock:
            if grammar not in self._checked:
                error, lasts = self._ask(grammar)
                if not lasts:
                    return error
                self._checked[grammar] = error
                if len(self._checked) > MOST_KEPT:
                    self._checked.popitem(last=False)
            self._checked.move_to_end(grammar)
            return self._checked[grammar]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None

    def _ask(self, grammar: str) -> tuple[str, bool]:
        """What is wrong with a grammar, and whether it would be another time: time and memory depend on what else the
        machine does."""
        if self._process is None:
            self._process = subprocess.Popen(  # imports what this process does, and nothing of its working directory
                [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._send([self._vocabulary.text, self._vocabulary.end])
        self._send(grammar)
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], MOST_SECS)[0]:
            answer = self._process.stdout.readline()
            if answer:
                error, lasts = json.loads(answer)
                return str(error), bool(lasts)
            why = "its compilation takes too much memory, or crashes"
        else:
            why = f"its compilation takes longer than {MOST_SECS:g} s"
        self.close()
        return why, False

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, as reading from it tells
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def is_installed() -> bool:
    """Whether llguidance is."""
    return importlib.util.find_spec("llguidance") is not None


def _first_error(compiler: Compiler, grammar: str) -> tuple[str, bool]:
    """What is wrong with a grammar, or with its first token; and whether it would be another time."""
    start = time.process_time()
    matcher = compiler.matcher(grammar)
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    secs = time.process_time() - start
    if matcher.is_error():
        return str(matcher.get_error()) or "it cannot be compiled", True
    if secs > MOST_CPU_SECS:
        compiler.forget(grammar)  # else it took no time the next time
        return f"its compilation takes {secs:.1f} s of a processor, the limit is {MOST_CPU_SECS:g}", False
    only_end = int.from_bytes(first, "little").bit_count() == 1 and matcher.is_accepting()
    return "it allows no text but the empty one" if only_end else "", True


def main() -> None:
    """Answer each line of stdin, a grammar as JSON, with its error; the first line is the vocabulary."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_MEMORY,) * 2)
    compiler = Compiler(*json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_first_error(compiler, json.loads(line))) + "\n")
        sys.stdout.flush()
