"""Text to block hashes, as far as anybody holds the blocks, and piece by piece so that shared beginnings cost nothing.

Two facts make this cheap. A chain of blocks is only as good as its first missing block: once a block is held by no
worker, the rest of the prompt need not even be tokenized. And a byte-level tokenizer never joins what stands on the
two sides of ``letter|space letter``, so a text may be cut there and its pieces be remembered: prompts with the same
beginning share the same pieces.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer

from services.router.core.block_hash import extend_chain
from shared.contracts.workers import HashScheme

SEGMENT_CHARS = 1024
"""A piece is cut at the first safe place after so many characters."""
PIECE_CHARS_MAX = 256 * 1024
"""A longer piece is not tokenized: of text that a tokenizer cannot divide, it would take minutes and gigabytes."""
CUT = re.compile(r"[A-Za-z] (?=[A-Za-z])")
SAMPLE = (
    "Cutting is safe if it changes nothing: 1234567 words, l'été, naïve  double  spaces, tabs\tand\nnew lines\n\n"
    "snake_case CamelCase x+=1; if (a && b) { return c[d]; } 漢字 and kana かな, emoji 🙂 and more words to end with. "
) * 3
NODE_BYTES_COUNTED = 400
"""What a remembered piece takes beside its text, its hashes and its left-over tokens."""
NUMBER_BYTES_COUNTED = 40


class PieceTooLong(Exception):
    """The text has too long a piece that cannot be cut."""


class Node:
    """The tokenization of a text up to the end of one piece of it."""

    __slots__ = ("digest", "hashes", "number", "over", "size", "tokens")

    def __init__(self, number: int, tokens: int, hashes: list[int], digest: bytes | None, over: list[int]) -> None:
        self.number = number
        """Names this node among the pieces that may follow it."""
        self.tokens = tokens
        """From the beginning of the prompt."""
        self.hashes = hashes
        """Of the blocks that end in this piece."""
        self.digest = digest
        """Full hash of the last block so far; None before the first is full."""
        self.over = over
        """Tokens behind the last full block."""
        self.size = NODE_BYTES_COUNTED + NUMBER_BYTES_COUNTED * (len(hashes) + len(over))


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as placement needs it."""

    tokens: int
    hashes: Sequence[int]
    """Of its blocks, at least as far as any worker held them."""
    exact: bool
    """Whether the cached tokens that follow from ``hashes`` are what the engine will find."""


class Walk:
    """One prompt on its way through the pieces."""

    __slots__ = ("at", "hashes", "node", "salt", "text")

    def __init__(self, text: str, root: Node, salt: str) -> None:
        self.text = text
        self.node = root
        self.salt = salt
        self.hashes: list[int] = list(root.hashes)
        self.at = 0


class Segments:
    """All texts of one tokenizer. Calls from two threads at a time are safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheme: HashScheme,
        *,
        cache_bytes_max: int,
        segment_chars: int = SEGMENT_CHARS,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._scheme = scheme
        self._segment_chars = segment_chars
        self._before, self._after = special_tokens(tokenizer)
        self._nodes = Nodes(cache_bytes_max)
        self._cuts = may_cut(tokenizer)

    def begin(self, text: str, *, special: bool, salt: str) -> Walk:
        """A walk from the beginning of ``text``."""
        root = self._nodes.get(0, f"{int(special)}{salt}")
        if root is None:
            tokens = self._before if special else []
            hashes, digest = extend_chain(None, tokens, self._scheme, salt=salt)
            over = tokens[len(hashes) * self._scheme.block_size :]
            root = self._nodes.put(0, f"{int(special)}{salt}", len(tokens), hashes, digest, over)
        return Walk(text, root, salt)

    def go_on(self, walk: Walk, held: Callable[[int], bool], chars_max: int) -> bool:
        """Walk until the text ends, a block is held by nobody, or more than ``chars_max`` characters had to be
        tokenized. Answers whether the walk is over. Raises PieceTooLong.
        """
        while walk.at < len(walk.text):
            if walk.hashes and not held(walk.hashes[-1]):
                return True
            end = self._end_of_piece(walk)
            piece = walk.text[walk.at : end]
            node = self._nodes.get(walk.node.number, piece)
            if node is None:
                if len(piece) > PIECE_CHARS_MAX:
                    raise PieceTooLong
                if len(piece) > chars_max:
                    return False
                chars_max -= len(piece)
                node = self._tokenize(walk, piece)
            walk.node = node
            walk.hashes += node.hashes
            walk.at = end
        return True

    def prompt(self, walk: Walk, *, special: bool) -> Prompt:
        """What a finished walk found. The length of what was not walked is guessed from what was."""
        tokens = walk.node.tokens
        left = len(walk.text) - walk.at
        if left:
            tokens += 1 + left * max(tokens, 1) // max(walk.at, 1)
        elif special:
            tokens += len(self._after)
        return Prompt(tokens, walk.hashes, exact=True)

    def _end_of_piece(self, walk: Walk) -> int:
        if not self._cuts or len(walk.text) - walk.at <= self._segment_chars:
            return len(walk.text)
        cut = CUT.search(walk.text, walk.at + self._segment_chars)
        return cut.start() + 1 if cut is not None else len(walk.text)

    def _tokenize(self, walk: Walk, piece: str) -> Node:
        before = walk.node
        ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
        tokens = before.over + ids
        hashes, digest = extend_chain(before.digest, tokens, self._scheme, salt=walk.salt)
        over = tokens[len(hashes) * self._scheme.block_size :]
        return self._nodes.put(before.number, piece, before.tokens + len(ids), hashes, digest, over)


class Nodes:
    """The newest pieces, bounded in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._made = 0
        self._nodes: OrderedDict[tuple[int, str], Node] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, parent: int, piece: str) -> Node | None:
        """The node behind ``parent``, if it is remembered; it is the newest then."""
        with self._lock:
            node = self._nodes.get((parent, piece))
            if node is not None:
                self._nodes.move_to_end((parent, piece))
            return node

    def put(
        self, parent: int, piece: str, tokens: int, hashes: list[int], digest: bytes | None, over: list[int]
    ) -> Node:
        """Remember, and forget the oldest beyond the bound."""
        with self._lock:
            self._made += 1
            node = Node(self._made, tokens, hashes, digest, over)
            replaced = self._nodes.pop((parent, piece), None)
            self._bytes -= replaced.size + len(piece) if replaced is not None else 0
            self._nodes[parent, piece] = node
            self._bytes += node.size + len(piece)
            while self._bytes > self._bytes_max:
                (_, text), oldest = self._nodes.popitem(last=False)
                self._bytes -= oldest.size + len(text)
            return node


def special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text when it adds special tokens."""
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    dressed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(dressed) - len(plain) + 1):
        if dressed[begin : begin + len(plain)] == plain:
            return dressed[:begin], dressed[begin + len(plain) :]
    return [], []


def may_cut(tokenizer: Tokenizer) -> bool:
    """Whether texts may be cut between a letter and a space with a letter behind it.

    Asked of the tokenizer itself, on a text with a bit of everything; and no added token may reach across a cut.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        if re.search(r"^[A-Za-z ]|[A-Za-z ]$| ", token.content):
            return False
    cuts = [cut.start() + 1 for cut in CUT.finditer(SAMPLE)]
    pieces = [SAMPLE[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(SAMPLE)], strict=True)]
    joined = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    return joined == tokenizer.encode(SAMPLE, add_special_tokens=False).ids
