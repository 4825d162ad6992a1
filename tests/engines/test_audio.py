"""Forms of audio through vLLM's own server: read, refused clearly, transcribed, and salted with their tenant's salt."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.legs.asgi_call import AsgiCall
from shared.contracts.engine_paths import FORMS, TRANSCRIPTIONS
from tests.engines.front import MODEL, Front, front, model_with_marks
from tests.support.builders import start_leg

pytestmark = pytest.mark.vllm

MARKS = ("startoftranscript", "transcribe", "translate", "notimestamps", "en", "endoftext", "startofprev", "nospeech")
SAYS = [400, 500, 600]
SIZES = {
    "d_model": 32,
    "num_mel_bins": 8,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 32))},
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 8,
    "sampling_rate": 16_000,
    "chunk_length": 30,
    "n_fft": 400,
    "hop_length": 160,
    "padding_value": 0.0,
    "return_attention_mask": False,
    "nb_max_frames": 3000,
    "n_samples": 480_000,
}


def model_with_ears(folder: Path) -> tuple[Path, int]:
    """The directory of a tiny Whisper without weights, and its token for the end. Baton's engines refuse encoders; the
    server in front of an engine is the same for all models that transcribe.
    """
    made = model_with_marks(folder)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(f"<|{mark}|>", normalized=False, special=True) for mark in MARKS])
    tokenizer.save(str(made / "tokenizer.json"))
    start, end = tokenizer.token_to_id("<|startoftranscript|>"), tokenizer.token_to_id("<|endoftext|>")
    of_whisper = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **SIZES}
    tokens = {"vocab_size": tokenizer.get_vocab_size(), "decoder_start_token_id": start, "eos_token_id": end}
    (made / "config.json").write_text(json.dumps({**of_whisper, **tokens, "torch_dtype": "float32"}))
    (made / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "WhisperTokenizerFast", "processor_class": "WhisperProcessor"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made, end


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[Front]:
    model, end = model_with_ears(tmp_path)
    tasks = ("generate", "transcription")
    async with front(model, "", [*SAYS, end], max_model_len=448, tasks=tasks) as one:
        yield one


class Whole:
    """What a router would get."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def head(self, status: int, _content_type: str) -> None:
        self.status = status

    def data(self, data: bytes, *_about: object) -> None:
        self.body += data

    async def drain(self) -> None:
        return


async def ask(there: Front, audio: bytes, **fields: str) -> tuple[int, dict]:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())
        for name, value in fields.items()
    ]
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--x--\r\n' % audio
    form = 'multipart/form-data; boundary="x"'
    start = start_leg(path=TRANSCRIPTIONS, body=b"".join(parts) + file, content_type=form)
    given = LegInput(kind=start.kind, request_id="q", path=start.path, cache_salt="tenant")
    whole = Whole()

    async def call() -> None:
        running = AsgiCall(start, start.body, whole, no_server_error)
        CURRENT_LEG.set(Leg(given, running.result))
        await running.run(there.app)
        running.finish()

    async with asyncio.timeout(60.0):
        await asyncio.create_task(call())
    return whole.status, json.loads(whole.body)


async def no_server_error() -> None:
    return


def second_of_silence() -> bytes:
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(32_000))
    return written.getvalue()


async def test_vllms_server_reads_the_form_and_refuses_clearly(there: Front):
    assert there.app.paths >= FORMS

    status, unknown = await ask(there, b"", model="other")
    assert (status, unknown["error"]["param"]) == (404, "model")
    status, no_audio = await ask(there, b"\x00no audio", model=MODEL, language="en")
    assert (status, no_audio["error"]["message"]) == (400, "Invalid or unsupported audio file.")
    status, wrong = await ask(there, b"", model=MODEL, temperature="hot")
    assert status in (400, 422)
    assert "temperature" in wrong["error"]["message"]
    assert there.core.asked == []


async def test_audio_is_transcribed_under_its_tenants_salt(there: Front):
    status, answer = await ask(there, second_of_silence(), model=MODEL, language="en")

    assert status == 200, answer
    assert answer["text"]
    assert [request.cache_salt for request in there.core.asked] == ["tenant"]
