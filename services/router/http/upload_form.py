"""Reads a form with one file as it arrives: no more than a piece of it is in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

PARTS_MAX = 16
FIELD_BYTES_MAX = 1024
NAME_BYTES_MAX = 64
FILE_FIELD = "file"
BOUNDARY_BYTES_MAX = 70


class BadForm(Exception):
    """It is no form with a file; the message is for the client."""


class UploadForm:
    """``feed`` it the body, then ``close``. All methods raise BadForm, and what ``take`` raises."""

    def __init__(self, content_type: str, take: Callable[[bytes], Awaitable[None]]) -> None:
        """``take`` gets the pieces of the file."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= BOUNDARY_BYTES_MAX:
            raise BadForm("Send a form: `Content-Type: multipart/form-data; boundary=...`.")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = False
        self._take = take
        self._pieces: list[bytes] = []
        self._parts = 0
        self._is_over = False
        self._header, self._header_value, self._name = b"", b"", ""
        self._is_file = False
        self._field = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    async def feed(self, data: bytes) -> None:
        """A piece of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadForm(f"The form cannot be read: {error}") from error
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            await self._take(piece)

    def close(self) -> None:
        """The body is complete."""
        if not self._is_over:
            raise BadForm("The form ends too early.")
        if not self.has_file:
            raise BadForm(f"The form has no file in a field of the name `{FILE_FIELD}`.")

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadForm(f"The form has more than {PARTS_MAX} parts.")
        self._name, self._field, self._is_file = "", b"", False

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _kind, options = parse_options_header(self._header_value)
            self._name = options.get(b"name", b"")[:NAME_BYTES_MAX].decode(errors="replace")
            if self._name == FILE_FIELD and b"filename" in options:
                if self.has_file:
                    raise BadForm("The form has more than one file.")
                self._is_file = self.has_file = True
                self.filename = options[b"filename"].decode(errors="replace")
        self._header, self._header_value = b"", b""

    def _on_headers_finished(self) -> None:
        if not self._name:
            raise BadForm("A part of the form has no name.")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > FIELD_BYTES_MAX:
            raise BadForm(f"`{self._name}` must have at most {FIELD_BYTES_MAX} bytes, or be a file.")

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_over = True
