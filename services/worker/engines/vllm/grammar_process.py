"""The process that tries grammars, so that the engine compiles none that takes too long: a thread that compiles cannot
be ended, a process can.

It is forked from the worker before the engine starts, keeps one thread, loads the tokenizer, and forks a child for each
trial, which runs vLLM's own code. Timers of the kernel end a child that uses too much CPU time, a limit of its address
space one that takes too much memory. Only its end is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import msgspec
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from services.worker.engines.vllm.grammar_trials import (
    BACKENDS,
    CHECK_TIMER,
    COMPILE_TIMER,
    HEADER,
    INVALID,
    NO_MEMORY,
    GiveUp,
    GrammarProcess,
    Tried,
    Try,
    encode,
)

CHECK_S_MAX: Final = 0.25
"""CPU time in which vLLM checks a request on the event loop of its server."""
MASK_S_MAX: Final = 0.1
"""CPU time for the mask of a token, which vLLM makes between two steps: every request waits for it."""
TOKENS_TRIED: Final = 8
MEMORY_BYTES_MAX: Final = 3 << 29
"""What a trial may add to the address space; 0.5 GiB of it may be reserved by the allocator for threads."""
NICENESS_OF_LONG: Final = 10
WARM: Final[dict[str, dict[str, Any]]] = {
    "xgrammar": {"type": "object"},
    "guidance": {"type": "integer", "multipleOf": 2},
}
"""Schemas for which vLLM chooses these, if it may."""
PR_SET_PDEATHSIG: Final = 1
WORD_BITS: Final = 32


_orders = msgspec.msgpack.Decoder(Try | GiveUp)


def start(config: Any) -> GrammarProcess:
    """Fork it. ``config``: a VllmConfig. Call while this process has few threads."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _run(lambda: _Trials(theirs, config, parent).serve(), keep=theirs.fileno())
    theirs.close()
    return GrammarProcess(pid, ours)


def _run(serve: Callable[[], None], keep: int) -> NoReturn:
    """In the forked process, which has copies of all that the worker had open."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends with the worker, which ends in order.
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        serve()
    except BaseException:  # nothing above may run twice
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


class _Trials:
    """The process's own side."""

    def __init__(self, connection: socket.socket, config: Any, parent: int) -> None:
        self._connection = connection
        self._config = config
        self._parent = parent
        self._children: dict[int, tuple[int, int]] = {}
        """Number and pid of each trial that runs, by its pidfd."""
        self._tokenizer: Any = None
        self._backends: dict[str, StructuredOutputManager] = {}

    def serve(self) -> None:
        """Until the worker has ended or closed the connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(os.pidfd_open(self._parent), selectors.EVENT_READ, self._worker_ended)
            # Copies of the worker's end are open in its other processes, so that it may not be seen to close.
            selector.register(self._connection, selectors.EVENT_READ, self._ordered)
            self._prepare()
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        selector.unregister(key.fd)
                        self._ended(key.fd)
                    elif (begun := key.data()) is not None:
                        selector.register(begun, selectors.EVENT_READ, None)

    def _prepare(self) -> None:
        """What takes seconds for a large vocabulary, and is the same for all trials."""
        # Ends of time are the timers' business: this one would leave a thread that compiles on.
        os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"
        self._tokenizer = getattr(StructuredOutputManager(self._config), "tokenizer", None)
        chosen = self._config.structured_outputs_config.backend
        for name, demand in WARM.items() if chosen == "auto" else ((chosen, WARM[BACKENDS[0]]),):
            with contextlib.suppress(Exception):  # It does not support this tokenizer.
                self._manager(name)
                self._validate(StructuredOutputsParams(json=demand))

    def _manager(self, backend: str) -> StructuredOutputManager:
        if backend not in self._backends:
            manager = StructuredOutputManager(self._config)
            manager._use_async_grammar_compilation = False
            params = StructuredOutputsParams(json_object=True)
            params._backend = backend
            compile_grammar(manager, params)
            self._backends[backend] = manager
        return self._backends[backend]

    def _worker_ended(self) -> NoReturn:
        for _, pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _ordered(self) -> int | None:
        """Returns the pidfd of a child that has begun."""
        header = self._received(HEADER.size)
        order = _orders.decode(self._received(HEADER.unpack(header)[0]))
        if isinstance(order, GiveUp):
            for number, pid in self._children.values():
                if number == order.number:
                    os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            self._try(order)
        begun = os.pidfd_open(pid)
        self._children[begun] = order.number, pid
        return begun

    def _received(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._connection.recv(size - len(parts))
            if not part:
                self._worker_ended()
            parts += part
        return bytes(parts)

    def _ended(self, child: int) -> None:
        number, pid = self._children.pop(child)
        os.close(child)
        _, status = os.waitpid(pid, 0)
        told = encode(Tried(number, os.waitstatus_to_exitcode(status)))
        self._connection.sendall(HEADER.pack(len(told)) + told)

    def _try(self, order: Try) -> NoReturn:
        """In the child."""
        status = NO_MEMORY
        try:
            _bound(order)
            status = self._tried(order)
        finally:
            os._exit(status)

    def _tried(self, order: Try) -> int:
        params = StructuredOutputsParams(**json.loads(order.constraint))
        try:
            with _at_most(CHECK_TIMER, CHECK_S_MAX):
                self._validate(params)
        except Exception as error:  # of any library
            return NO_MEMORY if _is_of_memory(error) else INVALID
        chosen = params._backend or BACKENDS[0]
        for backend in {chosen, *order.backends}:
            try:
                with _at_most(COMPILE_TIMER, order.cpu_s):
                    self._compile(backend, params)
            except Exception as error:  # of any library; the engine's server says so, too
                if _is_of_memory(error):
                    return NO_MEMORY
        return BACKENDS.index(chosen)

    def _validate(self, params: StructuredOutputsParams) -> None:
        """As vLLM's server does. Changes ``params`` to what its engine gets."""
        config = self._config
        request = SamplingParams(structured_outputs=params)
        request._validate_structured_outputs(config.model_config, config.structured_outputs_config, self._tokenizer)

    def _compile(self, backend: str, params: StructuredOutputsParams) -> None:
        manager = self._manager(backend)
        grammar = compile_grammar(manager, params)
        mask = manager.backend.allocate_token_bitmask(1)
        chosen = Random(0)  # the same tokens in each trial
        for _ in range(TOKENS_TRIED):
            if grammar.is_terminated():
                return
            with _at_most(CHECK_TIMER, MASK_S_MAX):
                grammar.fill_bitmask(mask, 0)
            words = [(index, word) for index, word in enumerate(mask[0].tolist()) if word]
            if not words:
                return
            index, word = chosen.choice(words)
            bit = chosen.choice([bit for bit in range(WORD_BITS) if word >> bit & 1])
            grammar.accept_tokens("trial", [index * WORD_BITS + bit])


def compile_grammar(manager: StructuredOutputManager, params: StructuredOutputsParams) -> Any:
    """As vLLM's engine does. Raises what the library raises."""
    sampling = SamplingParams(structured_outputs=params)
    demand = StructuredOutputRequest.from_sampling_params(sampling)
    assert demand is not None
    manager.grammar_init(
        SimpleNamespace(request_id="trial", sampling_params=sampling, structured_output_request=demand)
    )
    grammar = demand.grammar
    if isinstance(grammar, Exception):
        raise grammar
    return grammar


@contextlib.contextmanager
def _at_most(timer: tuple[int, signal.Signals], cpu_s: float) -> Any:
    """The kernel ends this process if it takes more."""
    which, _ = timer
    signal.setitimer(which, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(which, 0.0)


def _is_of_memory(error: BaseException) -> bool:
    """Libraries wrap it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "bad_alloc" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _bound(order: Try) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Its parent has one thread.
    for _, ends in (CHECK_TIMER, COMPILE_TIMER):
        signal.signal(ends, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES_MAX, used + MEMORY_BYTES_MAX))
    with contextlib.suppress(OSError):  # Where memory is short, the kernel ends this process first.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if order.is_long:
        os.nice(NICENESS_OF_LONG)
    # Its messages would quote what a client has sent.
    with Path(os.devnull).open("w", encoding="ascii") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
