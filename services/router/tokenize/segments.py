"""Text to block hashes, as far as anybody holds the blocks, and piece by piece so that shared beginnings cost nothing.

A chain of blocks is only as good as its first missing block: once a block is held by no worker, the rest of the prompt
need not even be tokenized. And a text can be cut (see ``text_cuts``) and its pieces be remembered: prompts with the
same beginning, as those of a conversation's turns, share the same pieces.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer

from services.router.tokenize.block_hash import PIECES, extend_packed
from services.router.tokenize.text_cuts import find_cuts
from services.router.tokenize.word_cache import PackedWords
from shared.contracts.workers import HashScheme

SEGMENT_CHARS = 1024
"""A piece is cut between two words at the first place after so many characters."""
TURN_CHARS = 256
"""It is cut before an added token, as stands at the beginning of a chat's turn, after so many."""
PIECE_CHARS_MAX = 256 * 1024
"""A longer piece is not tokenized: of text that a tokenizer cannot divide, it would take minutes and gigabytes."""
PIECES_AT_ONCE_MAX = 16
"""So many pieces are tokenized together at most, and at first one: nobody may hold the next."""
CHARS_PER_TOKEN_GUESSED = 4.0
CHARS_GUESSED = 2048
"""How many characters that are known weigh as much as the guess, in a prompt of which not all is walked."""
NODE_BYTES_COUNTED = 400
"""What a remembered piece takes beside its text, its hashes and its left-over tokens."""
NUMBER_BYTES_COUNTED = 40


class PieceTooLong(Exception):
    """The text has too long a piece that cannot be cut."""


class Node:
    """The tokenization of a text up to the end of one piece of it."""

    __slots__ = ("digest", "hashes", "number", "over", "size", "tokens")

    def __init__(self, number: int, tokens: int, hashes: list[int], digest: bytes | None, over: list[bytes]) -> None:
        self.number = number
        """Names this node among the pieces that may follow it."""
        self.tokens = tokens
        """From the beginning of the prompt."""
        self.hashes = hashes
        """Of the blocks that end in this piece."""
        self.digest = digest
        """Full hash of the last block so far; None before the first is full."""
        self.over = over
        """Tokens behind the last full block, packed."""
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

    def step(self, node: Node, end: int) -> None:
        """Over one piece."""
        self.node = node
        self.hashes += node.hashes
        self.at = end


class Segments:
    """All texts of one tokenizer. Calls from two threads at a time are safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheme: HashScheme,
        *,
        cache_bytes_max: int,
        segment_chars: int = SEGMENT_CHARS,
        hint: str = "",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._scheme = scheme
        self._segment_chars = segment_chars
        self._before, self._after = special_tokens(tokenizer)
        self._nodes = Nodes(cache_bytes_max)
        self._cuts = find_cuts(tokenizer, hint)
        self._words = PackedWords(tokenizer, self._cuts)
        self._chars, self._tokens = CHARS_GUESSED, CHARS_GUESSED / CHARS_PER_TOKEN_GUESSED

    @property
    def chars_per_token(self) -> float:
        """In all that was tokenized so far."""
        return self._chars / self._tokens

    def begin(self, text: str, *, special: bool, salt: str) -> Walk:
        """A walk from the beginning of ``text``."""
        root = self._nodes.get(0, f"{int(special)}{salt}")
        if root is None:
            tokens = list(map(PIECES.__getitem__, self._before)) if special else []
            hashes, digest = extend_packed(None, tokens, self._scheme, salt=salt)
            over = tokens[len(hashes) * self._scheme.block_size :]
            root = self._nodes.put(0, f"{int(special)}{salt}", len(tokens), hashes, digest, over)
        return Walk(text, root, salt)

    def go_on(self, walk: Walk, held: Callable[[int], bool], chars_max: int) -> bool:
        """Walk until the text ends, a block is held by nobody, or more than ``chars_max`` characters had to be
        tokenized. Answers whether the walk is over. Raises PieceTooLong.
        """
        text, length, known, at_once = walk.text, len(walk.text), self._nodes.get, 1
        while walk.at < length:
            if walk.hashes and not held(walk.hashes[-1]):
                return True
            end = self._end(text, walk.at)
            node = known(walk.node.number, text[walk.at : end])
            if node is not None:
                walk.step(node, end)
                continue
            ends = self._next_ends(text, walk.at, end, min(chars_max, at_once * self._segment_chars))
            if not ends or ends[-1] - walk.at > chars_max:
                return False
            chars_max -= ends[-1] - walk.at
            at_once = min(2 * at_once, PIECES_AT_ONCE_MAX)
            self._tokenize(walk, ends, held)
        return True

    def prompt(self, walk: Walk, *, special: bool, more: Sequence[int] = ()) -> Prompt:
        """What a finished walk found, and ``more`` tokens behind it. The length of what was not walked is guessed from
        what was, and from what all texts of this tokenizer are like.
        """
        tokens, hashes = walk.node.tokens, walk.hashes
        behind = [*(self._after if special else ()), *more]
        left = len(walk.text) - walk.at
        if left:
            chars = walk.at + CHARS_GUESSED
            tokens += 1 + round(left * (tokens + CHARS_GUESSED / self.chars_per_token) / chars)
        elif behind:
            rest = walk.node.over + list(map(PIECES.__getitem__, behind))
            hashes = hashes + extend_packed(walk.node.digest, rest, self._scheme, salt=walk.salt)[0]
        return Prompt(tokens + len(behind), hashes, exact=True)

    def _end(self, text: str, at: int) -> int:
        chars = self._segment_chars
        return self._cuts.end(text, at, min(TURN_CHARS, chars), chars, PIECE_CHARS_MAX)

    def _next_ends(self, text: str, at: int, end: int, chars: int) -> list[int]:
        """Of the pieces from ``at`` on that have about so many characters together: one at least. Raises
        PieceTooLong.
        """
        ends = [end]
        if end - at > PIECE_CHARS_MAX:
            raise PieceTooLong
        while end < len(text) and end - at < chars:
            begin, end = end, self._end(text, end)
            if end - at > chars or end - begin > PIECE_CHARS_MAX:
                break
            ends.append(end)
        return ends

    def _tokenize(self, walk: Walk, ends: list[int], held: Callable[[int], bool]) -> None:
        """Go on to the last of these ends, or as far as blocks are held. All pieces are new: the first one is."""
        text, begins = walk.text, [walk.at, *ends]
        pieces = [text[begin:end] for begin, end in zip(begins, ends, strict=False)]
        # Where a word's space is no part of it, the piece behind a cut begins without.
        drops = self._cuts.drops_space
        given = [piece[1:] if at and piece[0] == " " else piece for at, piece in zip(begins, pieces, strict=False)]
        for piece, end, found in zip(pieces, ends, self._words.tokenize(given if drops else pieces), strict=True):
            if walk.hashes and not held(walk.hashes[-1]):
                return
            before = walk.node
            tokens = before.over + found if before.over else found
            hashes, digest = extend_packed(before.digest, tokens, self._scheme, salt=walk.salt)
            over = tokens[len(hashes) * self._scheme.block_size :]
            self._chars += len(piece)
            self._tokens += len(found)
            walk.step(self._nodes.put(before.number, piece, before.tokens + len(found), hashes, digest, over), end)


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
        self, parent: int, piece: str, tokens: int, hashes: list[int], digest: bytes | None, over: list[bytes]
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
    """What the tokenizer puts before and behind a text when it adds special tokens. Raises ValueError."""
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    dressed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(dressed) - len(plain) + 1):
        if plain and dressed[begin : begin + len(plain)] == plain:
            return dressed[:begin], dressed[begin + len(plain) :]
    raise ValueError("what it adds to a text cannot be told from the text")
