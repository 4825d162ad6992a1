"""A worker's tokenizer, chat template or record cannot stop or hold a router."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from functools import partial

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from services.router.request.fields import read_request
from services.router.telemetry.metrics import health_of
from services.router.tokenize import passed_trials, trials
from services.router.tokenize.block_hash import NO_KEYS
from services.router.tokenize.linear import is_linear
from services.router.tokenize.passed_trials import PassedTrials
from services.router.tokenize.segments import Segments, TokenizerFailed
from services.router.tokenize.tokenizer import PromptTokenizer, Unfinished
from services.router.tokenize.trials import Trials, Verdict
from services.router.tokenize.turns import Work
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import COMPLETIONS
from shared.contracts.workers import HashScheme
from tests.support.fleet_builders import record
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.world import World, in_world, prompt

SCHEME = HashScheme(block_size=32)
CHARS_MAX = 100_000
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MULTIPLYING = normalizers.Sequence([normalizers.Replace("a", "a" * 16)] * 12)
REMOTE = normalizers.Sequence([normalizers.Replace("ж", "ж" * 16)] * 3)
BACKTRACKING = r"(?:.|.)+[0-9]{9}"


def asset(pattern: str = CL100K, normalizer=None, template: str = TEMPLATE) -> TokenizerAsset:
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    if normalizer is not None:
        made.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return TokenizerAsset(worker_id="w", epoch=1, tokenizer_json=made.to_str().encode(), chat_template=template)


TOKENIZERS = {
    "backtracks": asset(BACKTRACKING),
    "multiplies": asset(normalizer=MULTIPLYING),
    "multiplies rare characters": asset(normalizer=REMOTE),
    "not JSON": msgspec.structs.replace(asset(), tokenizer_json=b"[1, 2"),
    "no object": msgspec.structs.replace(asset(), tokenizer_json=b"[]"),
    "not UTF-8": msgspec.structs.replace(asset(), tokenizer_json=b"\xff"),
}
TEMPLATES = {
    "300 parentheses": f"{{{{ {'(' * 300}1{')' * 300} }}}}",
    "120 nested ifs": "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "an argument twice": "{{ f(a=1,a=2) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
THROUGH_WORKERS = [
    TOKENIZERS["backtracks"],
    TOKENIZERS["multiplies"],
    *(asset(template=one) for one in TEMPLATES.values()),
]


def verdict_on(candidate: TokenizerAsset, one: Trials | None = None) -> Verdict:
    return asyncio.run((one or Trials()).verdict(candidate, SCHEME, CHARS_MAX))


@pytest.mark.slow
@pytest.mark.parametrize("candidate", [asset(), asset(r"\s+|\S+"), asset(normalizer=normalizers.NFKC())])
def test_honest_tokenizers_and_templates_pass(candidate):
    assert verdict_on(candidate) == Verdict()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_hangs_grows_or_panics_is_refused(name):
    verdict = verdict_on(TOKENIZERS[name])

    assert verdict.tokenizer
    assert not verdict.template


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_does_not_compile_or_end_is_refused_alone(name):
    verdict = verdict_on(asset(template=TEMPLATES[name]))

    assert verdict.template
    assert not verdict.tokenizer


def test_a_template_that_refuses_a_chat_is_no_failure():
    assert verdict_on(asset(template="{{ raise_exception('system messages are not supported') }}")) == Verdict()


def test_the_router_ends_a_child_that_does_not_end_in_time():
    begun = time.monotonic()

    assert verdict_on(TOKENIZERS["multiplies"], Trials(s_max=0.05)).tokenizer
    assert time.monotonic() - begun < 10


def test_what_was_tried_is_not_tried_again(monkeypatch):
    one = Trials()
    assert verdict_on(TOKENIZERS["not JSON"], one).tokenizer
    monkeypatch.setattr(trials, "CHILD", ("/does/not/exist",))

    again = msgspec.structs.replace(TOKENIZERS["not JSON"], epoch=2)

    assert verdict_on(again, one).tokenizer


@pytest.mark.slow
def test_a_router_that_starts_later_does_not_try_what_has_passed(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "trials"
    assert verdict_on(asset(), Trials(PassedTrials(folder))) == Verdict()
    assert verdict_on(TOKENIZERS["not JSON"], Trials(PassedTrials(folder))).tokenizer
    assert verdict_on(asset(template=TEMPLATES["an argument twice"]), Trials(PassedTrials(folder))).template
    monkeypatch.setattr(trials, "CHILD", ("/does/not/exist",))

    assert verdict_on(asset(), Trials(PassedTrials(folder))) == Verdict()
    for other in (TOKENIZERS["not JSON"], asset(template=TEMPLATES["an argument twice"]), asset(r"\s+|\S+")):
        with pytest.raises(FileNotFoundError):
            verdict_on(other, Trials(PassedTrials(folder)))


def test_a_passed_trial_counts_for_the_same_code_and_libraries_only(tmp_path):
    PassedTrials(tmp_path, b"tokenizers 1").add(b"candidate")

    assert PassedTrials(tmp_path, b"tokenizers 1").has(b"candidate")
    assert not PassedTrials(tmp_path, b"tokenizers 2").has(b"candidate")
    assert not PassedTrials(tmp_path, b"tokenizers 1").has(b"another")


@pytest.mark.parametrize("of", ["folder", "file"])
def test_a_passed_trial_that_others_may_have_written_does_not_count(tmp_path, of):
    folder = tmp_path / "trials"
    passed = PassedTrials(folder, b"")
    passed.add(b"candidate")
    assert passed.has(b"candidate")
    assert [folder.stat().st_mode & 0o777, next(folder.iterdir()).stat().st_mode & 0o777] == [0o700, 0o600]

    (folder if of == "folder" else next(folder.iterdir())).chmod(0o777)
    assert not passed.has(b"candidate")


def test_a_link_is_no_passed_trial(tmp_path):
    folder = tmp_path / "trials"
    passed = PassedTrials(folder, b"")
    passed.add(b"candidate")
    (file,) = folder.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not passed.has(b"candidate")

    file.unlink()
    passed.add(b"candidate")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert not passed.has(b"candidate")


def test_a_bounded_number_of_passed_trials_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(passed_trials, "KEPT_MAX", 3)
    passed = PassedTrials(tmp_path / "trials", b"")
    for number in range(5):
        passed.add(b"%d" % number)
        os.utime(passed._file(b"%d" % number), (number, number))

    assert [passed.has(b"%d" % number) for number in range(5)] == [False, False, True, True, True]


def test_a_folder_that_cannot_be_written_costs_a_trial(tmp_path):
    (tmp_path / "file").touch()
    passed = PassedTrials(tmp_path / "file" / "trials", b"")

    passed.add(b"candidate")

    assert not passed.has(b"candidate")


def test_a_child_inherits_no_secrets(monkeypatch):
    monkeypatch.setenv("ROUTER_SALT", "secret")
    seen = {}
    monkeypatch.setattr(trials.subprocess, "Popen", partial(_spy, trials.subprocess.Popen, seen))

    assert verdict_on(asset()) == Verdict()
    assert "ROUTER_SALT" in os.environ
    assert "ROUTER_SALT" not in seen["env"]


def _spy(popen, seen, *args, **kw):
    seen |= kw
    return popen(*args, **kw)


async def join(world: World, name: str, sent: TokenizerAsset, epoch: int = 1) -> FakeWorker:
    sent = msgspec.structs.replace(sent, worker_id=name, epoch=epoch)
    return await world.worker(name, revision=name, epoch=epoch, asset=sent)


@pytest.mark.slow
@in_world(tokenize="always")
async def test_one_workers_tokenizers_and_templates_do_not_stop_a_router(world: World):
    for number, hostile in enumerate(THROUGH_WORKERS):
        await join(world, f"hostile{number}", hostile)
    await join(world, "good", asset())
    prompts = world.router.prompts
    keys = [world.workers[f"hostile{number}"].record().fingerprint.key() for number in range(len(THROUGH_WORKERS))]
    good = world.workers["good"].record().fingerprint.key()
    while not (prompts.followed(good) and all(map(prompts.failure, keys))):
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)

    assert not prompts.failure(good)
    assert [prompts.followed(key) for key in keys[:2]] == [False, False]
    assert health_of(world.router.fleet.index, prompts.parity.book, prompts.failures()).tokenizers_failed
    assert (await world.ask(prompt())).status == 200


@pytest.mark.slow
@in_world(tokenize="always")
async def test_a_failed_tokenizer_is_fetched_again_when_its_worker_restarts(world: World):
    worker = await join(world, "w1", TOKENIZERS["not JSON"])
    key, prompts = worker.record().fingerprint.key(), world.router.prompts
    while not prompts.failure(key):
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)

    await worker.vanish()
    await join(world, "w1", asset(), epoch=2)
    while not prompts.followed(key):
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)

    assert not prompts.failure(key)


@pytest.mark.parametrize(
    "fields",
    [
        {"models": []},
        {"models": [""]},
        {"models": ["m"] * 300},
        {"models": ["m" * 600]},
        {"max_model_len": -1},
        {"legs_max": 1 << 63},
        {"kv_tokens": -5},
        {"ranks": 0},
        {"step_tokens_max": 0},
        {"cache_hit_threshold": 1.5},
        {"cache_hit_threshold": math.nan},
        {"hashing": HashScheme(block_size=0)},
        {"hashing": HashScheme(block_size=-32)},
        {"note": "n" * 5000},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_a_workers_is_refused_with_one_log_line(fields, caplog):
    @in_world(tokenize="always")
    async def attack(world: World) -> None:
        await world.worker("good")
        bad = msgspec.structs.replace(record("bad", revision="bad"), **fields)
        store = await world.bus.key_value_store(WORKER_RECORDS)
        for _ in range(3):
            await store.put(bad)
            await asyncio.sleep(1)

        assert "bad" not in world.router.fleet.cluster.workers
        assert (await world.ask(prompt())).status == 200

    attack()
    assert sum("is refused" in one.getMessage() for one in caplog.records if one.levelno == logging.WARNING) == 1


@pytest.mark.slow
def test_a_tokenizer_that_takes_long_of_a_text_is_used_no_more():
    segments = Segments(Tokenizer.from_str(asset().tokenizer_json.decode()), SCHEME, cache_bytes_max=1 << 20)
    tokenize(segments, "The rain had stopped.")
    assert not segments.failure

    slow = segments._words._tokenizer = Slow(segments._words._tokenizer)
    tokenize(segments, "An orchard behind the mill.")

    assert slow.calls == 1
    assert "characters" in segments.failure
    with pytest.raises(TokenizerFailed):
        tokenize(segments, "It smelled of leaves.")
    assert slow.calls == 1


class Slow:
    """Takes more than a second of CPU time for a text."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.calls = 0

    def encode_batch_fast(self, texts, **kw):
        self.calls += 1
        end = time.thread_time() + 1.1
        while time.thread_time() < end:
            pass
        return self._tokenizer.encode_batch_fast(texts, **kw)


def tokenize(segments: Segments, text: str) -> None:
    walk = segments.begin(text, special=False, keys=NO_KEYS)
    while segments.advance(walk, lambda _block: True, 1 << 20):
        pass


def test_a_panic_at_a_text_leaves_its_prompt_to_load(monkeypatch):
    used = PromptTokenizer(asset(), SCHEME, cache_bytes_max=1 << 20)
    panicking = Tokenizer.from_str(asset(BACKTRACKING).tokenizer_json.decode())
    monkeypatch.setattr(used._segments._words, "_tokenizer", panicking)
    body = msgspec.json.encode({"model": "m", "prompt": "unseen0" * 40 + "1 "})

    assert used.whole_prompt(read_request(COMPLETIONS, body)) is None


SLOW_AT_RARE = r"(?:[\x{416}]|[\x{416}]){18}!|\s+|[^\s\x{416}]+|."
"""Takes some milliseconds at each character of a run that no trial has."""
RARE = "\u0416" * 600
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def built(one: TokenizerAsset) -> Tokenizer:
    return Tokenizer.from_str(one.tokenizer_json.decode())


def test_the_patterns_of_usual_models_are_known_to_be_linear():
    assert all(is_linear(built(asset(pattern))) for pattern in (CL100K, GPT2, O200K, DEEPSEEK))


@pytest.mark.parametrize(
    "pattern", [BACKTRACKING, SLOW_AT_RARE, r"\s+|(?:\s+)+", r"\p{N}{1,3}|\p{L}+.*x", r"(\s+|\s+)", r"\s+|[]|a]+"]
)
def test_other_patterns_are_not(pattern):
    assert not is_linear(built(asset(pattern)))


def test_a_pattern_is_found_wherever_the_tokenizer_has_it():
    nested = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("(a|a)+b"), "c")])
    assert not is_linear(built(asset(normalizer=nested)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), True),
        (models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]", max_input_chars_per_word=5000), False),
        (models.Unigram([("a", 0.0), ("ab", -1.0)], 0), True),
        (models.Unigram([("a", 0.0), ("a" * 300, -1.0)], 0), False),
    ],
    ids=repr,
)
def test_models_with_long_tokens_are_not_linear(model, expected):
    assert is_linear(Tokenizer(model)) is expected


@pytest.mark.slow
@in_world(tokenize="always")
async def test_a_tokenizer_that_is_slow_at_a_text_that_no_trial_had_does_not_hold_the_router(world: World):
    await join(world, "slow", asset(SLOW_AT_RARE))
    await join(world, "good", asset())
    prompts = world.router.prompts
    slow, good = (world.workers[name].record().fingerprint.key() for name in ("slow", "good"))
    while not (prompts.followed(slow) and prompts.followed(good)):
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)
    known = prompts.tokenizer_of(slow)
    facts = read_request(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": RARE}))

    begun_s = time.thread_time()
    begun = known.begin(facts, lambda _block: True, loop_chars_max=4096)
    assert time.thread_time() - begun_s < 0.1
    assert isinstance(begun, Unfinished)
    finding = asyncio.create_task(known.finish(begun, lambda _block: True, Work(prompts._work, "tenant")))
    ends_at = time.monotonic() + 60.0
    while not prompts.failure(slow) and time.monotonic() < ends_at:
        await asyncio.to_thread(time.sleep, 0.01)
        known._segments.give_up_stuck()

    assert "600 characters" in prompts.failure(slow)
    assert not finding.done()
    quick = prompts.tokenizer_of(good).begin(facts, lambda _block: True, loop_chars_max=4096)
    assert quick.exact
    assert (await world.ask(prompt())).status == 200
    finding.cancel()
