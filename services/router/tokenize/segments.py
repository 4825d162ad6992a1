"""Text to block hashes, piece by piece, as far as any worker holds the blocks.

Only a prefix can be cached: after the first block that no worker holds, the prompt need not be tokenized.
A text is cut into pieces (see ``text_cuts``) whose tokens are cached: prompts with the same beginning, such as the
turns of a conversation, share their pieces.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from time import clock_gettime, pthread_getcpuclockid, thread_time
from typing import Final

from tokenizers import Encoding, Tokenizer

from services.router.request.prompt import Prompt
from services.router.tokenize.block_hash import HashKeys, extend_packed, goes_on, pack
from services.router.tokenize.words import words_between
from shared.contracts.workers import HashScheme
from shared.text_cuts import PIECE_CHARS, PIECE_CHARS_MAX, Cuts, Words, find_cuts, special_tokens
from shared.third_party import CONTAINED

WORDS_MAX: Final = 1 << 16
"""Words cached in addition to those of the vocabulary; beyond that, all of them are dropped."""
WORD_CHARS_MAX: Final = 256
"""Maximum length of a cached word."""
VOCABULARY_WORDS_MAX: Final = 1 << 16
WORDS_AT_ONCE: Final = 1024
"""Words of the vocabulary that are tokenized in one call."""
VOCABULARY_WORD: Final = re.compile("[\u2581\u0120]?([A-Za-z]+)")
"""Optional mark that tokenizers use for the space before a word, and the word."""

ENCODING_S_MAX: Final = 1.0
S_PER_CHAR_MAX: Final = 2e-4
"""CPU time of one call for which a tokenizer is given up: 1 s, and a hundred times what characters usually take."""
STUCK_S_MAX: Final = 0.5
"""CPU time instead of the 1 s, of a call for which a prompt has waited in vain."""

# Without this, the tokenizers library uses every CPU for one prompt; the router tokenizes in one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerFailed(Exception):
    """The tokenizers library failed at a text, or the tokenizer is used no more."""


class PackedWords:
    """Text to tokens, word by word: the tokens of each word are cached, so that most words of a new text are looked up.

    Splitting a text into words and looking them up is ten times as fast as the tokenizer. Tokens are cached in the form
    that block hashes are computed from: the CBOR of their ids, one after the other. Safe to call from two threads at a
    time: both would store the same tokens.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts) -> None:
        self._tokenizer = tokenizer
        self.failure = ""
        """Why no further text is tokenized; empty while the tokenizer is used."""
        self._calls: dict[int, tuple[float, int]] = {}
        """CPU time at the beginning, and characters, of the calls that run, by thread."""
        self._words = cuts.between_words
        self._words_max = WORDS_MAX
        if self._words is not None:
            self._words_max += self._learn_vocabulary(self._words, "" if cuts.drops_space else " ")

    def tokenize(self, texts: Sequence[str]) -> list[bytes]:
        """The packed tokens of each text, without special tokens."""
        if self._words is None:
            return self._encode(texts)
        recalled = list(map(self._words.recall, texts))
        unknown = list({word for _runs, between in recalled for word in between})
        if not unknown:
            return [runs[0] for runs, _between in recalled]
        found = dict(zip(unknown, self._encode(unknown), strict=True))
        if self._words.learn({word: found[word] for word in unknown if len(word) <= WORD_CHARS_MAX}) > self._words_max:
            self._words.forget()
        return [
            b"".join([runs[0], *chain.from_iterable(zip(map(found.__getitem__, between), runs[1:], strict=True))])
            for runs, between in recalled
        ]

    def _learn_vocabulary(self, words: Words, space: str) -> int:
        """The words that the vocabulary has, which are most words of most texts; returns how many."""
        matches = map(VOCABULARY_WORD.fullmatch, self._tokenizer.get_vocab(with_added_tokens=False))
        own = iter({space + match[1]: None for match in matches if match is not None})
        count = 0
        while count < VOCABULARY_WORDS_MAX and (some := list(islice(own, WORDS_AT_ONCE))):
            count = words.learn(dict(zip(some, self._encode(some), strict=True)))
        words.keep()
        return count

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        if self.failure:
            raise TokenizerFailed(self.failure)
        begun, chars, thread = thread_time(), sum(map(len, texts)), threading.get_ident()
        self._calls[thread] = begun, chars
        try:
            with CONTAINED:
                encoded: Iterable[Encoding] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise TokenizerFailed(str(error)) from error
        finally:
            del self._calls[thread]
        self._judge(thread_time() - begun, chars, ENCODING_S_MAX)
        return [pack(one.ids) for one in encoded]

    def give_up_stuck(self) -> None:
        """Use the tokenizer no more if a call that runs in another thread takes too long."""
        for thread, (begun, chars) in list(self._calls.items()):
            with suppress(OSError):
                self._judge(clock_gettime(pthread_getcpuclockid(thread)) - begun, chars, STUCK_S_MAX)

    def _judge(self, took_s: float, chars: int, s_max: float) -> None:
        if took_s > max(s_max, chars * S_PER_CHAR_MAX):
            self.failure = f"it took {took_s:.1f} s for {chars} characters"


PIECES_AT_ONCE_MAX: Final = 16
"""Maximum number of pieces tokenized in one batch. The first batch is one piece, since no worker may hold the next."""
LOOKED_UP_MAX: Final = 256
"""Pieces in one call: those that are cached take a microsecond or two each."""
CHARS_PER_TOKEN_GUESSED: Final = 4.0
CHARS_GUESSED: Final = 2048
"""Weight, in characters, of the tokenizer's average in the estimated length of the untokenized rest of a prompt."""
NODE_BYTES_COUNTED: Final = 650
"""Memory of a cached piece without its text, its hashes and its tail tokens."""
NUMBER_BYTES_COUNTED: Final = 40
SPARED_MAX: Final = 16
"""Pieces that are spared before one is evicted, so that eviction never takes long."""


class PieceTooLong(Exception):
    """The text has a piece longer than ``PIECE_CHARS_MAX`` that cannot be cut."""


class Node:
    """The tokenization of a text up to the end of one of its pieces."""

    __slots__ = ("behind", "digest", "hashes", "number", "piece", "size", "tail", "tokens", "used")

    def __init__(
        self, number: int, piece: str, tokens: int, hashes: list[int], digest: bytes | None, tail: bytes
    ) -> None:
        self.piece = piece
        self.behind = ""
        """A text that has ``piece`` and then this is cut after the piece, too."""
        self.number = number
        """Identifies this node as the parent of the pieces that follow it."""
        self.tokens = tokens
        """Tokens from the beginning of the prompt to the end of this piece."""
        self.hashes = hashes
        """Hashes of the blocks that end in this piece."""
        self.digest = digest
        """Full hash of the last block so far; None before the first is full."""
        self.tail = tail
        """Tokens after the last full block, packed."""
        self.size = NODE_BYTES_COUNTED + NUMBER_BYTES_COUNTED * len(hashes) + len(tail) + len(piece)
        self.used = False
        """Whether the node was used since it was made, or last spared from eviction."""


class Walk:
    """Progress through the pieces of one prompt."""

    __slots__ = ("at", "hashes", "keys", "node", "special", "text")

    def __init__(self, text: str, root: Node, keys: HashKeys, special: bool) -> None:
        self.text = text
        self.node = root
        self.keys = keys
        self.special = special
        self.hashes = list(root.hashes)
        self.at = 0

    def step(self, node: Node, end: int) -> None:
        """Advance past one piece."""
        self.node = node
        self.hashes += node.hashes
        self.at = end


def root_of(special: bool, keys: HashKeys) -> str:
    """Names what comes before a prompt's text."""
    # ``repr`` of an adapter begins with a parenthesis and quotes both texts: no salt makes another prefix of it.
    return f"{int(special)}{keys.adapter!r}{keys.salt}" if keys.adapter is not None else f"{int(special)}-{keys.salt}"


class Segments:
    """Tokenizes texts with one tokenizer and caches their pieces. Safe to call from two threads at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheme: HashScheme,
        *,
        cache_bytes_max: int,
        segment_chars: int = PIECE_CHARS,
        hint: str = "",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._scheme = scheme
        self._stride = scheme.stride
        self._segment_chars = segment_chars
        self._before, self._after = special_tokens(tokenizer)
        self._nodes = Nodes(cache_bytes_max)
        self._cuts = find_cuts(tokenizer, hint, words_between)
        self._words = PackedWords(tokenizer, self._cuts)
        self._chars, self._tokens = CHARS_GUESSED, CHARS_GUESSED / CHARS_PER_TOKEN_GUESSED

    @property
    def failure(self) -> str:
        """See ``PackedWords``."""
        return self._words.failure

    def give_up_stuck(self) -> None:
        """See ``PackedWords``."""
        self._words.give_up_stuck()

    @property
    def chars_per_token(self) -> float:
        """Average of all texts tokenized so far."""
        return self._chars / self._tokens

    def begin(self, text: str, *, special: bool, keys: HashKeys) -> Walk:
        """The walk of a prompt's text, at its beginning. ``special``: with the tokenizer's special tokens."""
        name = root_of(special, keys)
        root = self._nodes.get(0, name, "")
        if root is None:
            before = pack(self._before) if special else b""
            hashes, digest, tokens, tail = extend_packed(
                None, before, self._scheme, salt=keys.salt, adapter=keys.adapter
            )
            root = self._nodes.put(0, name, "", tokens, hashes, digest, tail)
        return Walk(text, root, keys, special)

    def advance(self, walk: Walk, held: Callable[[int], bool], chars_max: int) -> int:
        """Advance until the text ends, no worker holds a block, more than ``chars_max`` characters would have to be
        tokenized, or many pieces were found in the cache. Returns 0 when the walk is complete, else how many characters
        the next piece may have. Raises PieceTooLong.
        """
        text, length, at_once = walk.text, len(walk.text), 1
        nodes = self._nodes
        looked_up = 0
        while walk.at < length:
            if not goes_on(walk.hashes, self._stride, held):
                return 0
            looked_up += 1
            if looked_up > LOOKED_UP_MAX:
                return self._segment_chars
            node = nodes.get_again(walk.node.number, text, walk.at)
            if node is not None:
                walk.step(node, walk.at + len(node.piece))
                continue
            end = self._end(text, walk.at)
            node = nodes.get(walk.node.number, text[walk.at : end], self._behind(text, end))
            if node is not None:
                walk.step(node, end)
                continue
            ends = self._next_ends(text, walk.at, end, min(chars_max, at_once * self._segment_chars))
            if ends[-1] - walk.at > chars_max:
                return ends[0] - walk.at
            chars_max -= ends[-1] - walk.at
            at_once = min(2 * at_once, PIECES_AT_ONCE_MAX)
            self._tokenize(walk, ends, held)
        return 0

    def prompt(self, walk: Walk, more: Sequence[int] = ()) -> Prompt:
        """The prompt of a complete walk, with ``more`` tokens appended. The length of its untokenized rest is estimated
        from the tokenized part and from the tokenizer's average.
        """
        tokens, hashes = walk.node.tokens, walk.hashes
        behind = [*(self._after if walk.special else ()), *more]
        left = len(walk.text) - walk.at
        if left:
            chars = walk.at + CHARS_GUESSED
            tokens += 1 + round(left * (tokens + CHARS_GUESSED / self.chars_per_token) / chars)
        elif behind:
            hashes = hashes + self._extend(walk, pack(behind))[0]
        return Prompt(tokens + len(behind), hashes, exact=True)

    def _extend(self, walk: Walk, packed: bytes) -> tuple[list[int], bytes | None, int, bytes]:
        """As ``extend_packed``, for these tokens and the walk's tail before them."""
        node, keys = walk.node, walk.keys
        return extend_packed(node.digest, node.tail + packed, self._scheme, salt=keys.salt, adapter=keys.adapter)

    def _end(self, text: str, at: int) -> int:
        return self._cuts.end(text, at, self._segment_chars)

    def _behind(self, text: str, end: int) -> str:
        """What decided that a piece ends at ``end``; empty where the end of the text may have."""
        behind = text[end : end + self._cuts.chars_behind]
        return behind if len(behind) == self._cuts.chars_behind else ""

    def _next_ends(self, text: str, at: int, end: int, chars: int) -> list[int]:
        """Ends of the pieces from ``at`` on, at least one, of about ``chars`` characters together. Raises
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
        """Advance to the last of these ends, or as far as blocks are held. None of these pieces is cached yet."""
        text, begins = walk.text, [walk.at, *ends]
        pieces = [text[begin:end] for begin, end in zip(begins, ends, strict=False)]
        # With a tokenizer that drops the space before a word, a piece after a cut is tokenized without it.
        drops = self._cuts.drops_space
        given = [piece[1:] if at and piece[0] == " " else piece for at, piece in zip(begins, pieces, strict=False)]
        for piece, end, found in zip(pieces, ends, self._words.tokenize(given if drops else pieces), strict=True):
            if not goes_on(walk.hashes, self._stride, held):
                return
            before = walk.node
            hashes, digest, count, tail = self._extend(walk, found)
            tokens = len(walk.hashes) * self._scheme.block_size + count
            self._chars += len(piece)
            self._tokens += tokens - before.tokens
            behind = self._behind(text, end)
            node = self._nodes.put(before.number, piece, behind, tokens, hashes, digest, tail)
            walk.step(node, end)


class Nodes:
    """Cache of tokenized pieces, bounded in bytes. The oldest is evicted, unless it was used since it was made or last
    spared: a use costs less so than in an order of uses.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._made = 0
        self._nodes: OrderedDict[tuple[int, str], Node] = OrderedDict()
        self._latest: dict[int, Node] = {}
        """For each parent, the node with which a text continued last."""
        self._lock = threading.Lock()

    def get(self, parent: int, piece: str, behind: str) -> Node | None:
        """The cached node after ``parent``; None on a miss. ``behind``: see ``Node``; empty if no other text need be
        cut there.
        """
        with self._lock:
            node = self._nodes.get((parent, piece))
            if node is not None:
                node.used = True
                self._note(parent, node, behind)
            return node

    def get_again(self, parent: int, text: str, at: int) -> Node | None:
        """As ``get``, for the piece with which a text continued last, if this one has it at ``at``: it is not searched
        for its end, nor hashed. Most conversations continue with their own history. Takes no lock: what another thread
        changes meanwhile is right before and after.
        """
        node = self._latest.get(parent)
        if node is None:
            return None
        piece = node.piece
        if not (text.startswith(piece, at) and text.startswith(node.behind, at + len(piece))):
            return None
        node.used = True
        return node

    def put(
        self, parent: int, piece: str, behind: str, tokens: int, hashes: list[int], digest: bytes | None, tail: bytes
    ) -> Node:
        """Add a node, unless the other thread has, and evict others beyond the bound. ``behind``: see ``get``."""
        key = parent, piece
        with self._lock:
            node = self._nodes.get(key)
            if node is None:
                self._made += 1
                node = self._nodes[key] = Node(self._made, piece, tokens, hashes, digest, tail)
                self._bytes += node.size
            self._note(parent, node, behind)
            while self._bytes > self._bytes_max:
                self._evict()
            return node

    def _note(self, parent: int, node: Node, behind: str) -> None:
        if behind:
            node.behind = behind
            self._latest[parent] = node

    def _evict(self) -> None:
        key, oldest = self._nodes.popitem(last=False)
        for _ in range(SPARED_MAX):
            if not oldest.used:
                break
            oldest.used = False
            self._nodes[key] = oldest
            key, oldest = self._nodes.popitem(last=False)
        self._bytes -= oldest.size
        self._latest.pop(oldest.number, None)
        if self._latest.get(key[0]) is oldest:
            del self._latest[key[0]]
